import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tests.refused import refused
from tltlab.costs.base import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.policies.activation import ElasticActivation
from tltlab.policies.bandits import Ucb1
from tltlab.policies.beg_mab import BegMab
from tltlab.policies.goodput import Goodput
from tltlab.policies.policy import SHIPPED, Activation, Policy, load_policy
from tltlab.policies.specs import (
    BegMabSpec,
    Bucket,
    CustomSpec,
    ExploreSpec,
    FixedSpec,
    TableRow,
    TableSpec,
    code_allowed,
)
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy

D8, D4, D2 = (Strategy.chain("ngram", depth) for depth in (8, 4, 2))
NGRAM_4 = {"drafter": "ngram", "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5}
PLAIN = {"drafter": "none", "draft_depth": 0, "top_k": 0, "tokens_to_verify": 1}


def rng():
    return np.random.default_rng(0)


def write(path, **parts):
    path.write_text(json.dumps({"format": "tltlab-policy", "version": 1, **parts}))
    return path


def error_of(source) -> str:
    with pytest.raises(ConfigError) as caught:
        load_policy(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_survives_its_file(name, tmp_path):
    policy = load_policy(name)
    policy.write(tmp_path / "new folder" / "policy.json")
    assert load_policy(tmp_path / "new folder" / "policy.json") == policy
    assert load_policy(str(tmp_path / "new folder" / "policy.json")) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


MODEL_FREE = [name for name in SHIPPED if name != "beg-mab-learned"]


@pytest.mark.parametrize("name", MODEL_FREE)
def test_a_shipped_policy_drafts_at_a_few_depths_with_drafters_that_every_engine_has_or_it_brings_along(name):
    policy = load_policy(name)
    # The one that learns what depths cost has them all; for the others few are enough, and few are measured.
    depths = range(9) if name == "adaptive" else (0, 1, 2, 4, 8)
    for strategy in policy.strategies:
        assert strategy in [Strategy.chain(d, depth) for d in ("ngram", "suffix") for depth in depths]
        assert strategy.drafter in {*DEFAULT_DRAFTERS, *policy.drafters, "none"}


@pytest.mark.parametrize(
    ("name", "drafters", "arms"),
    [
        ("beg-mab", {"ngram"}, [4, 4, 3]),
        ("beg-mab-suffix", {"ngram", "suffix"}, [5, 5, 5]),
        ("beg-mab-learned", {"learned", "suffix"}, [5, 5, 5]),
    ],
)
def test_shipped_bandits_have_all_drafters_in_each_bucket_and_draft_deeper_at_small_batches(name, drafters, arms):
    buckets = [bucket.strategies for bucket in load_policy(name).selector.buckets]
    assert [len(strategies) for strategies in buckets] == arms
    assert all({s.drafter for s in strategies} == drafters | {"none"} for strategies in buckets)
    deepest = [max(s.draft_depth for s in strategies) for strategies in buckets]
    assert deepest == sorted(deepest, reverse=True)


def test_a_policy_builds_fresh_selectors():
    policy = load_policy("beg-mab")
    first, second = policy.build(rng()), policy.build(rng())
    assert isinstance(first, ElasticActivation)
    assert isinstance(first.inner, BegMab)
    assert first.inner is not second.inner


@pytest.mark.parametrize(
    ("activation", "strategies", "chosen"),
    [(None, (D4,), D4), (Activation(max_requests=8), (NO_SPECULATION, D4), NO_SPECULATION)],
)
def test_with_activation_plain_decoding_is_among_the_strategies(activation, strategies, chosen):
    policy = Policy(selector=FixedSpec(strategy=D4), activation=activation)
    assert policy.strategies == strategies
    assert policy.build(rng()).choose(StepState(rl_step=0, batch=512)) == chosen


def test_the_file_is_the_one_of_the_manual(tmp_path):
    policy = Policy(
        selector=BegMabSpec(buckets=(Bucket(min_batch=1, strategies=(D4, NO_SPECULATION)),), epsilon=0.2),
        activation=Activation(),
        provenance={"trace": "tiny", "seed": 3},
    )
    policy.write(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text()) == {
        "format": "tltlab-policy",
        "version": 1,
        "selector": {
            "kind": "beg-mab",
            "buckets": [{"min_batch": 1, "strategies": [NGRAM_4, PLAIN]}],
            "epsilon": 0.2,
            "window": 300,
            "reward": "paper",
            "plain_rate": None,
            "statistic": "median",
            "tries": 1,
        },
        "activation": {"kind": "elastic", "max_requests": 32, "count": "running", "hold_iterations": 10},
        "budget": None,
        "drafters": {},
        "provenance": {"trace": "tiny", "seed": 3},
    }


def test_plain_rates_survive_the_file(tmp_path):
    spec = Ucb1.Spec(strategies=(D4, D2), reward="relative", plain_rate={1: 100.0, 32: 2000.0})
    Policy(selector=spec).write(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json").selector.plain_rate == {1: 100.0, 32: 2000.0}


def test_all_faults_of_a_file_come_at_once_each_with_its_place(tmp_path):
    bad = {**NGRAM_4, "draft_depth": "deep"}
    selector = {
        "kind": "beg-mab",
        "buckets": [
            {"min_batch": 1, "strategies": [NGRAM_4, bad]},
            {"strategies": [{**NGRAM_4, "tokens_to_verify": 1}]},
        ],
        "epsilon": "often",
    }
    message = error_of(write(tmp_path / "p.json", selector=selector, activation={"max_requests": -3}, colour="red"))
    assert message.startswith(f"{tmp_path / 'p.json'}: ")
    for part in (
        "selector.buckets.0.strategies.1.draft_depth: ",
        "(got 'deep')",
        "selector.buckets.1.min_batch: Field required",
        "selector.buckets.1.strategies.0: Strategy('ngram', 4, 1, 1): tokens_to_verify counts the pending token",
        "selector.epsilon: ",
        "activation.max_requests: ",
        "colour: ",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"format": "tltlab-trace"}, ["format: ", "'tltlab-policy' (got 'tltlab-trace')"]),
        ({"version": 2}, ["version: ", "(got 2)"]),
        ({"selector": {"kind": "magic"}}, ["selector: ", "'magic'", "'beg-mab'"]),
        ({"selector": {}}, ["selector: ", "'kind'"]),
        ({"selector": {"kind": "explore", "strategies": []}}, ["selector: no strategies given"]),
        (
            {"selector": {"kind": "table", "rows": [{"min_batch": b, "strategy": NGRAM_4} for b in (1, 9, 5)]}},
            ["selector: min_batch must be at least 1 and ascend strictly, got 1, 9, 5"],
        ),
        ({"selector": {"kind": "fixed", "strategy": {"drafter": "ngram"}}}, ["selector.strategy.draft_depth: "]),
        ({"budget": {"kind": "fair"}}, ["budget: "]),
        ({"budget": {"kind": "acceptance", "min_tokens": -1}}, ["budget: ", "min_tokens", "-1"]),
        ({"budget": {"kind": "length-aware", "token_s": 0}}, ["budget: ", "token_s must be above 0"]),
        ({"budget": {"kind": "length-aware", "efficiency": 2}}, ["budget: ", "at most 1 / reach"]),
        ({"drafters": {"mine": {"kind": "oracle"}}}, ["drafters.mine: ", "'oracle'"]),
        ({"drafters": {"mine": {"kind": "ngram", "min_match": "two"}}}, ["drafters.mine.min_match: "]),
        ({"drafters": {"none": {"kind": "ngram"}}}, ["drafters: 'none' is no name for a drafter"]),
        (
            {"drafters": {"a": {"kind": "hybrid", "otherwise": "b"}, "b": {"kind": "hybrid", "first": "ngram"}}},
            ["drafters.a: a hybrid of 'b', which is a hybrid itself"],
        ),
        (
            {"selector": {"kind": "goodput", "strategies": [NGRAM_4], "costs": "b200"}},
            ["selector: no cost model at b200"],
        ),
        (
            {"selector": {"kind": "goodput", "strategies": [NGRAM_4], "costs": {"base_s": 1e-3}}},
            ["selector: the cost model has no per_request_s"],
        ),
    ],
)
def test_a_wrong_file_says_what_is_wrong(change, parts, tmp_path):
    message = error_of(write(tmp_path / "p.json", **{"selector": {"kind": "none"}, **change}))
    for part in parts:
        assert part in message


def test_a_policy_brings_its_drafters_along(tmp_path):
    own = {"mine": SuffixSpec(scopes=("group",)), "head": LearnedSpec(method="eagle3", model="checkpoints/head")}
    policy = Policy(selector=FixedSpec(strategy=Strategy.chain("mine", 4)), drafters=own)
    policy.write(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json").drafters == own


def test_goodput_takes_its_costs_by_name_or_written_out(tmp_path):
    terms = LinearCosts(
        base_s=4e-3, per_request_s=0, per_token_s=1e-4, per_context_s=0, sd_base_s=0, sd_idle_s=0, draft_level_s=0,
        draft_level_per_request_s=0,
    )  # fmt: skip
    for costs in ("h100-qwen2.5-7b", terms.model_dump(mode="json")):
        Policy(selector=Goodput.Spec(strategies=(D8, D2), costs=costs)).write(tmp_path / "policy.json")
        assert load_policy(tmp_path / "policy.json").strategies == (NO_SPECULATION, D8, D2)


def test_a_goodput_policy_keeps_what_its_costs_file_says(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    costs = load_costs("h100-qwen2.5-7b")
    costs.write(tmp_path / "there" / "costs.json")
    selector = {"kind": "goodput", "strategies": [NGRAM_4], "costs": "costs.json"}
    policy = load_policy(write(tmp_path / "there" / "policy.json", selector=selector))
    (tmp_path / "there" / "costs.json").unlink()
    policy.write(tmp_path / "copy.json")
    assert load_costs(load_policy(tmp_path / "copy.json").selector.costs) == costs
    assert "no cost model at costs.json" in error_of(tmp_path / "there" / "policy.json")
    costs.write(tmp_path / "here" / "costs.json")
    assert load_policy(tmp_path / "there" / "policy.json") == policy


def test_what_is_no_policy_file_at_all_or_does_not_say_so_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"selector": {"kind": "none"}}')
    message = error_of(tmp_path / "p.json")
    assert "format: " in message
    assert "version: " in message
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("hello")
    assert "holds one JSON object, got list" in error_of(tmp_path / "list.json")
    assert "not JSON" in error_of(tmp_path / "text.json")
    assert "cannot read" in error_of(tmp_path / "missing.json")


def test_a_name_is_not_taken_for_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fixed").mkdir()
    assert load_policy("fixed") == SHIPPED["fixed"]
    assert load_policy(SHIPPED["fixed"]) is SHIPPED["fixed"], "a policy is returned as it is"


def test_settings_are_checked_in_python_too_and_a_policy_is_frozen():
    with refused(ValidationError, naming=("strictly",)):
        TableSpec(rows=(TableRow(min_batch=4, strategy=D4), TableRow(min_batch=4, strategy=D2)))
    with refused(ValidationError, naming=("given",)):
        ExploreSpec(strategies=(D4, D4))
    with pytest.raises(ValidationError):
        SHIPPED["fixed"].version = 2
    with pytest.raises(ValidationError):
        Policy(selector=FixedSpec(strategy=D4), colour="red")


# A user's own class

OWN = """
from tltlab.policies.selector import Selector
from tltlab.strategy import NO_SPECULATION, Strategy

class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def __init__(self, border=8):
        self.border = border

    def choose(self, state):
        return self.strategies[state.batch <= self.border]

class Coin(Selector):
    strategies = Halving.strategies
    propensity_ = 0.5

    def __init__(self, rng):
        self.rng = rng

    def choose(self, state):
        return self.strategies[int(self.rng.integers(2))]

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
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


def test_a_users_own_class_is_found_in_the_current_folder(own):
    policy = load_policy(f"{own}:Halving")
    assert policy.strategies == (NO_SPECULATION, D4)
    assert policy.build(rng()).choose(StepState(rl_step=0, batch=8)) == D4


def test_a_users_own_class_takes_its_arguments_from_the_file(own, tmp_path):
    policy = Policy(selector=CustomSpec(path=f"{own}:Halving", args={"border": 2}), activation=Activation())
    policy.write(tmp_path / "p.json")
    with code_allowed([own]):
        loaded = load_policy(tmp_path / "p.json")
    assert loaded == policy
    assert loaded.build(rng()).choose(StepState(rl_step=0, batch=8)) == NO_SPECULATION


def test_the_current_folder_is_looked_up_and_left_again(own):
    before = [*sys.path]
    load_policy(f"{own}:Halving").build(rng())
    assert sys.path == before
    assert "a module of Python itself" in error_of("antigravity:Flying")


def test_a_class_is_the_policy_that_its_path_names(own):
    policy = load_policy(f"{own}:Halving")
    cls = policy.selector.load()
    assert load_policy(cls) == policy
    fixed = Policy(selector=FixedSpec(strategy=D4))
    assert (
        load_policy(D4) == load_policy({"kind": "fixed", "strategy": NGRAM_4}) == load_policy(fixed.selector) == fixed
    )
    assert load_policy(load_policy("beg-mab").model_dump(mode="json")) == load_policy("beg-mab")

    class Local(cls):
        pass

    assert "Local is defined in a function, where other processes cannot find it" in error_of(Local)


def test_arguments_that_do_not_fit_are_refused(own, tmp_path):
    selector = {"kind": "custom", "path": f"{own}:Halving", "args": {"edge": 2}}
    with code_allowed([own]):
        assert "edge" in error_of(write(tmp_path / "p.json", selector=selector))


def test_a_file_does_not_choose_what_is_imported(own, tmp_path, monkeypatch):
    """It may be somebody else's; what is typed is one's own."""
    (tmp_path / f"foreign_{own}.py").write_text(f"from {own} import Halving\nopen('imported', 'w').close()\n")
    path = write(tmp_path / "p.json", selector={"kind": "custom", "path": f"foreign_{own}:Halving"})
    monkeypatch.chdir(tmp_path)
    message = error_of(path)
    assert f"{path} names foreign_{own}:Halving, a class that is not ours, which is not imported unasked" in message
    assert f"--allow-code foreign_{own}" in message
    with code_allowed([own]):
        assert error_of(path) == message
    assert not Path("imported").exists()
    with code_allowed([f"foreign_{own}"]):
        assert load_policy(path).selector.path == f"foreign_{own}:Halving"
    assert Path("imported").exists()
    monkeypatch.setenv("TLTLAB_ALLOW_CODE", f"this,foreign_{own}")
    assert load_policy(path).selector.module == f"foreign_{own}"


def test_a_module_without_the_class_is_not_imported(own, tmp_path, monkeypatch):
    (tmp_path / f"pack_{own}").mkdir()
    for name in ("__init__", "inner"):
        (tmp_path / f"pack_{own}" / f"{name}.py").write_text("open('imported', 'w').close()\nclass Other: ...\n")
    monkeypatch.chdir(tmp_path)
    assert f"pack_{own}/inner.py) has no Missing" in error_of(f"pack_{own}.inner:Missing")
    assert not Path("imported").exists()
    assert "not a subclass" in error_of(f"pack_{own}.inner:Other")


def test_a_users_own_class_must_keep_the_contract(own):
    message = error_of(f"{own}:Liar")
    assert f"{own}:Liar breaks the contract" in message
    assert "not in strategies" in message


def test_a_generator_handed_over_must_be_part_of_the_state(own):
    assert "restored selector goes on differently" in error_of(f"{own}:Coin")


def test_what_is_not_there_or_no_selector_is_refused(own, tmp_path):
    assert "has no Missing" in error_of(f"{own}:Missing")
    assert "not a subclass" in error_of(f"{own}:NotOne")
    assert "cannot import" in error_of("no.such.module:Class")
    assert "cannot import" in error_of(f"broken_{own}:Oops")
    for name, text in {"raises": "1 / 0; Class = 1", "leaves": "raise SystemExit(0); Class = 1"}.items():
        (tmp_path / f"{name}_{own}.py").write_text(text)
        assert f"cannot import {name}_{own}: " in error_of(f"{name}_{own}:Class")
    assert f"{own}.py is a module: name the class in it" in error_of(f"{own}.py")


def test_a_policy_file_may_name_the_papers_grouping(tmp_path):
    trees = [
        {"drafter": "learned", "draft_depth": depth, "top_k": 4, "tokens_to_verify": verify}
        for depth, verify in ((8, 48), (6, 48), (4, 16))
    ]
    selector = {"kind": "beg-mab", "strategies": trees, "thresholds": [1, 8]}
    path = tmp_path / "policy.json"
    assert len(load_policy(write(path, selector=selector)).strategies) == 3
    message = error_of(write(path, selector=selector | {"thresholds": [1]}))
    assert "got 2 of the former (48, 16) and 1 of the latter (1)" in message
    message = error_of(write(path, selector={"kind": "beg-mab"}))
    assert "either buckets, or strategies and thresholds" in message


@pytest.mark.parametrize("text", ["none", "ngram:4", "learned:8x4/48", "suffix:4x1/3"])
def test_a_strategy_is_read_as_it_is_written(text: str):
    assert str(Strategy.parse(text)) == text
    assert Strategy.parse(str(Strategy.parse(text))) == Strategy.parse(text)


def test_parts_left_out_of_a_tree_are_every_node():
    assert Strategy.parse("learned:8x4/48") == Strategy("learned", 8, 4, 48)
    assert Strategy.parse("learned:2x2") == Strategy("learned", 2, 2, 7)
    assert Strategy.parse("learned:2x4/21").tokens_to_verify == 21
    for text in ("ngram", "ngram:", "ngram:x", "ngram:4@8", "8,4,48", "learned:8,4,48", "learned:2x4/22"):
        with refused(ConfigError):
            Strategy.parse(text)


def test_drafts_in_short_are_policies_and_stand_in_policy_files(tmp_path: Path):
    assert load_policy("ngram:4") == Policy(selector=FixedSpec(strategy=Strategy.chain("ngram", 4)))
    up_to_eight = load_policy("learned:8x4/48@8")
    assert up_to_eight.activation == Activation(max_requests=8)
    assert up_to_eight.selector == FixedSpec(strategy=Strategy("learned", 8, 4, 48))
    file = {"format": "tltlab-policy", "version": 1, "selector": {"kind": "fixed", "strategy": "ngram:4"}}
    (tmp_path / "mine.json").write_text(json.dumps(file))
    assert load_policy(tmp_path / "mine.json") == load_policy("ngram:4")


def test_a_name_that_is_misspelt_is_answered_with_the_nearest_and_all_that_there_are():
    message = error_of("beg-mob")
    assert "no policy named 'beg-mob' (did you mean 'beg-mab'?); there are none," in message
    assert all(name in message for name in SHIPPED)
