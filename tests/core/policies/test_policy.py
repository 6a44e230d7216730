import json
import pickle
import sys

import numpy as np
import pytest

from tests.refused import refused
from tltlab.costs.load import load_costs
from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.own import code_allowed
from tltlab.policies.goodput import Goodput
from tltlab.policies.policy import SHIPPED, Activation, Policy, load_policy
from tltlab.policies.specs import BegMabSpec, CustomSpec, FixedSpec
from tltlab.strategy import NO_SPECULATION, Strategy

from .iterations import pick

D8, D4, D2 = (Strategy.chain("ngram", depth) for depth in (8, 4, 2))
NGRAM_4 = {"drafter": "ngram", "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5}
PLAIN = {"drafter": "none", "draft_depth": 0, "top_k": 0, "tokens_to_verify": 1}


def rng():
    return np.random.default_rng(0)


def write(path, **parts):
    path.write_text(json.dumps({"format": "tltlab-policy", "version": 1, **parts}))
    return path


def assert_refused(source, *facts):
    with refused(ConfigError, naming=facts) as caught:
        load_policy(source)
    assert "\n" not in str(caught.value)


OWN_DRAFTERS = {"mine": SuffixSpec(scopes=("group",)), "head": LearnedSpec(method="eagle3", model="checkpoints/head")}
TREES = tuple(Strategy("learned", depth, 4, verify) for depth, verify in ((8, 48), (6, 48), (4, 16)))


@pytest.mark.parametrize(
    "policy",
    [
        *SHIPPED.values(),
        Policy(selector=FixedSpec(strategy=Strategy.chain("mine", 4)), drafters=OWN_DRAFTERS),
        Policy(selector=BegMabSpec(strategies=TREES, thresholds=(1, 8)), activation=Activation()),
    ],
    ids=[*SHIPPED, "drafters of its own", "the paper's grouping"],
)
def test_a_policy_survives_its_file(policy, tmp_path):
    policy.write(tmp_path / "new folder" / "policy.json")
    assert load_policy(tmp_path / "new folder" / "policy.json") == policy
    assert load_policy(str(tmp_path / "new folder" / "policy.json")) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


MODEL_FREE = [name for name in SHIPPED if name != "beg-mab-learned"]


@pytest.mark.parametrize("name", MODEL_FREE)
def test_shipped_policies_draft_with_drafters_that_are_there(name):
    policy = load_policy(name)
    # The one that learns what depths cost has them all; for the others few are enough, and few are measured.
    depths = range(9) if name == "adaptive" else (0, 1, 2, 4, 8)
    for strategy in policy.strategies:
        assert strategy in [Strategy.chain(d, depth) for d in ("ngram", "suffix") for depth in depths]
        assert strategy.drafter in {*DEFAULT_DRAFTERS, *policy.drafters, "none"}


def test_all_faults_of_a_file_come_at_once(tmp_path):
    bad = {**NGRAM_4, "draft_depth": "deep"}
    selector = {
        "kind": "beg-mab",
        "buckets": [
            {"min_batch": 1, "strategies": [NGRAM_4, bad]},
            {"strategies": [{**NGRAM_4, "tokens_to_verify": 1}]},
        ],
        "epsilon": "often",
    }
    path = write(tmp_path / "p.json", selector=selector, activation={"max_requests": -3}, colour="red")
    assert_refused(
        path,
        path,
        "selector.buckets.0.strategies.1.draft_depth: ",
        "'deep'",
        "selector.buckets.1.min_batch: ",
        "selector.buckets.1.strategies.0: Strategy('ngram', 4, 1, 1): tokens_to_verify",
        "selector.epsilon: ",
        "activation.max_requests: ",
        "colour: ",
    )


ROWS = {"kind": "table", "rows": [{"min_batch": b, "strategy": NGRAM_4} for b in (1, 9, 5)]}
GOODPUT = {"kind": "goodput", "strategies": [NGRAM_4]}
HYBRIDS = {"a": {"kind": "hybrid", "otherwise": "b"}, "b": {"kind": "hybrid", "first": "ngram"}}


@pytest.mark.parametrize(
    ("part", "value", "facts"),
    [
        ("format", "tltlab-trace", ["format: ", "'tltlab-policy'", "'tltlab-trace'"]),
        ("version", 2, ["version: ", 2]),
        ("selector", {"kind": "magic"}, ["selector: ", "'magic'", "'beg-mab'"]),
        ("selector", {}, ["selector: ", "'kind'"]),
        ("selector", ROWS, ["selector: min_batch", "1, 9, 5"]),
        ("selector", {"kind": "fixed", "strategy": {"drafter": "ngram"}}, ["selector.strategy.draft_depth: "]),
        ("selector", {"kind": "beg-mab"}, ["buckets", "strategies", "thresholds"]),
        ("selector", GOODPUT | {"costs": "b200"}, ["selector: ", "b200"]),
        ("selector", GOODPUT | {"costs": {"base_s": 1e-3}}, ["selector: ", "per_request_s"]),
        ("budget", {"kind": "fair"}, ["budget: "]),
        ("budget", {"kind": "length-aware", "token_s": 0}, ["budget: ", "token_s", 0]),
        ("drafters", {"mine": {"kind": "oracle"}}, ["drafters.mine: ", "'oracle'"]),
        ("drafters", {"mine": {"kind": "ngram", "min_match": "two"}}, ["drafters.mine.min_match: "]),
        ("drafters", HYBRIDS, ["drafters.a: ", "'b'"]),
    ],
)
def test_a_wrong_file_names_the_fault(part, value, facts, tmp_path):
    assert_refused(write(tmp_path / "p.json", **{"selector": {"kind": "none"}, part: value}), *facts)


@pytest.mark.parametrize(
    ("text", "facts"), [('{"selector": {"kind": "none"}}', ["format: ", "version: "]), ("[]", ["list"])]
)
def test_what_is_no_policy_file_is_refused(text, facts, tmp_path):
    (tmp_path / "p.json").write_text(text)
    assert_refused(tmp_path / "p.json", *facts)
    assert_refused(tmp_path / "missing.json", "missing.json")


def test_a_goodput_policy_contains_its_costs(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    costs = load_costs("h100-qwen2.5-7b")
    by_name = Policy(selector=Goodput.Spec(strategies=(D8, D2), costs="h100-qwen2.5-7b"))
    by_name.write(tmp_path / "named.json")
    assert load_costs(load_policy(tmp_path / "named.json").selector.costs) == costs
    assert load_policy(tmp_path / "named.json").strategies == (NO_SPECULATION, D8, D2)
    costs.write(tmp_path / "there" / "costs.json")
    selector = {"kind": "goodput", "strategies": [NGRAM_4], "costs": "costs.json"}
    policy = load_policy(write(tmp_path / "there" / "policy.json", selector=selector))
    (tmp_path / "there" / "costs.json").unlink()
    policy.write(tmp_path / "copy.json")
    assert load_costs(load_policy(tmp_path / "copy.json").selector.costs) == costs
    assert_refused(tmp_path / "there" / "policy.json", "costs.json")
    costs.write(tmp_path / "here" / "costs.json")
    assert load_policy(tmp_path / "there" / "policy.json") == policy


def test_a_name_is_not_read_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fixed").mkdir()
    assert load_policy("fixed") == SHIPPED["fixed"]
    assert load_policy(SHIPPED["fixed"]) is SHIPPED["fixed"], "a policy is returned as it is"


# A user's own class

OWN = """
from tltlab.policies.selector import Selector
from tltlab.state import Choice
from tltlab.strategy import NO_SPECULATION, Strategy

class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def __init__(self, border=8):
        self.border = border

    def choose(self, state):
        return self.strategies[state.batch <= self.border]

class Coin(Selector):
    strategies = Halving.strategies

    def __init__(self, rng):
        self.coins = rng

    def choose(self, state):
        return Choice(self.strategies[int(self.coins.integers(2))], propensity=0.5)

class Liar(Halving):
    strategies = (NO_SPECULATION,)

    def choose(self, state):
        return Halving.strategies[1]

class NotOne:
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with a user's selectors in the current folder; its name."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"broken_{name}.py").write_text("class Oops(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    return name


def test_users_own_class_is_found_in_folder(own):
    before = [*sys.path]
    policy = load_policy(f"{own}:Halving")
    assert policy.strategies == (NO_SPECULATION, D4)
    assert pick(policy.build(rng()), 8) == D4
    assert sys.path == before


def test_users_own_class_takes_arguments_from_file(own, tmp_path):
    policy = Policy(selector=CustomSpec(path=f"{own}:Halving", args={"border": 2}), activation=Activation())
    policy.write(tmp_path / "p.json")
    selector = {"kind": "custom", "path": f"{own}:Halving", "args": {"edge": 2}}
    with code_allowed([own]):
        loaded = load_policy(tmp_path / "p.json")
        assert_refused(write(tmp_path / "wrong.json", selector=selector), "edge")
    assert loaded == policy
    assert pick(loaded.build(rng()), 8) == NO_SPECULATION


def test_class_is_policy_that_its_path_names(own):
    policy = load_policy(f"{own}:Halving")
    cls = policy.selector.load()
    assert load_policy(cls) == policy
    assert load_policy(load_policy("beg-mab").selector) == Policy(selector=load_policy("beg-mab").selector)

    class Local(cls):
        pass

    assert_refused(Local, "Local")


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("OWN:Liar", ["OWN:Liar", "strategies"]),
        ("OWN:Coin", ["OWN:Coin", "restored"]),
        ("OWN.py", ["OWN.py", "module"]),
        ("broken_OWN:Oops", ["import broken_OWN"]),
        ("raises_OWN:Class", ["import raises_OWN"]),
        ("leaves_OWN:Class", ["import leaves_OWN"]),
    ],
)
def test_class_that_cannot_be_policy_is_refused(own, tmp_path, source, facts):
    (tmp_path / f"raises_{own}.py").write_text("1 / 0; Class = 1")
    (tmp_path / f"leaves_{own}.py").write_text("raise SystemExit(0); Class = 1")
    assert_refused(source.replace("OWN", own), *(fact.replace("OWN", own) for fact in facts))


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("none", NO_SPECULATION),
        ("ngram:4", D4),
        ("learned:8x4/48", Strategy("learned", 8, 4, 48)),
        ("suffix:4x1/3", Strategy("suffix", 4, 1, 3)),
        ("learned:2x2", Strategy("learned", 2, 2, 7)),
        ("learned:2x4/21", Strategy("learned", 2, 4, 21)),
    ],
)
def test_a_strategy_is_read_as_it_is_written(text, strategy):
    assert Strategy.parse(text) == strategy == Strategy.parse(str(strategy))
    assert str(strategy) == {"learned:2x2": "learned:2x2/7"}.get(text, text)


@pytest.mark.parametrize("text", ["ngram", "ngram:", "ngram:x", "ngram:4@8", "8,4,48", "learned:8,4,48", "a:2x4/22"])
def test_what_is_no_strategy_is_refused(text):
    with refused(ConfigError):
        Strategy.parse(text)


def test_drafts_in_short_are_policies(tmp_path):
    assert load_policy("ngram:4") == Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4)))
    up_to_eight = load_policy("learned:8x4/48@8")
    assert up_to_eight.activation == Activation(max_requests=8)
    assert up_to_eight.selector == FixedSpec(strategy=Strategy("learned", 8, 4, 48))
    file = {"format": "tltlab-policy", "version": 1, "selector": {"kind": "fixed", "strategy": "ngram:4"}}
    (tmp_path / "mine.json").write_text(json.dumps(file))
    assert load_policy(tmp_path / "mine.json") == load_policy("ngram:4")


def test_a_misspelt_name_is_answered_with_the_nearest():
    assert_refused("beg-mob", "'beg-mob'", "'beg-mab'", *SHIPPED)


@pytest.mark.parametrize("text", ["beg-mab", "none", "ngram:4", "ngram:4@16", "learned:8x4/48"])
def test_a_policy_has_the_name_that_was_typed(text):
    assert load_policy(text).name == text


def test_a_changed_policy_has_no_name():
    assert load_policy("goodput(window=100)").name is None
