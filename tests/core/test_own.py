"""Parts of a user's own: found by `module:Class(...)`, checked, and refused with what is wrong with them."""

import json
import pickle
import sys

import numpy as np
import pytest

from tests.refused import refused
from tltlab.acceptance.base import AcceptanceModel
from tltlab.acceptance.load import SHIPPED as SHIPPED_ACCEPTANCE
from tltlab.acceptance.load import load_acceptance
from tltlab.costs.linear import LinearCosts, LinearIteration
from tltlab.costs.load import load_costs, presets
from tltlab.drafters.base import Draft, TextDrafter
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.specs import SYSTEM_DRAFTERS, Drafters, HybridSpec, OwnDrafter
from tltlab.errors import ConfigError
from tltlab.own import code_allowed, named_in, parse_call, split
from tltlab.planning.placement import PLACEMENTS, Placement, load_placement, placed
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import FixedSpec
from tltlab.strategy import Strategy
from tltlab.testing import check_acceptance, check_costs, check_drafter, check_placement

MODULE = """
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.costs.load import load_costs
from tltlab.costs.scaled import ScaledCosts
from tltlab.drafters.base import Draft, TextDrafter
from tltlab.costs.linear import LinearCosts
from tltlab.planning.placement import RoundRobin

class Repeat(TextDrafter):
    has_network = True

    def __init__(self, most=3):
        super().__init__()
        self.most = most

    def propose(self, key, depth):
        return Draft(self.texts[key][-1:] * min(depth, self.most), 0.0)

class Slow(LinearCosts):
    base_s: float = 1.0
    per_request_s: float = 0.0
    per_token_s: float = 0.0
    per_context_s: float = 0.0
    sd_base_s: float = 0.0
    sd_idle_s: float = 0.0
    draft_level_s: float = 0.0
    draft_level_per_request_s: float = 0.0
    prefill_per_token_s: float = 0.0

class Kept(GeometricAcceptance):
    alpha: float = 0.25

class Turns(RoundRobin):
    def __init__(self, first=0):
        self.first = first

class Loud(RoundRobin):
    def place(self, workload, workers, history):
        return [queue.missing for queue in super().place(workload, workers, history)]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with parts of a user's own in the current folder; its name."""
    name = f"parts_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    return name


def test_lists_and_arguments_are_read_as_typed():
    assert split(" none,f(a=1,b=[2,3]) ,, m:C ") == ["none", "f(a=1,b=[2,3])", "m:C"]
    args = {"n": 3, "x": 0.5, "on": True, "name": "cpu-small", "rows": [1, 2]}
    assert parse_call("m:C(n=3, x=0.5, on=true, name=cpu-small, rows=[1,2])") == ("m:C", args)
    assert parse_call("runs/policy (1).json") == ("runs/policy (1).json", {})
    for text, fact in (("m:C(3)", "3"), ("m:C(a=1,a=2)", "a=2"), ("m:C(1a=2)", "1a=2")):
        with refused(ConfigError, naming=(text, fact)):
            parse_call(text)


def test_parts_are_made_of_their_names_with_arguments(own):
    costs, acceptance = load_costs(f"{own}:Slow(base_s=2)"), load_acceptance(f"{own}:Kept")
    assert isinstance(costs, LinearCosts)
    assert (costs.base_s, acceptance.alpha) == (2.0, 0.25)  # type: ignore[attr-defined]
    by_drafter = load_acceptance(f"learned={own}:Kept(alpha=0.5),ngram=0.4")
    assert by_drafter.in_state({}).tokens_per_iteration(Strategy.chain("learned", 1)) == 1.5
    assert load_placement(f"{own}:Turns(first=1)").first == 1  # type: ignore[attr-defined]
    drafter = OwnDrafter(path=f"{own}:Repeat", args={"most": 2}).make()
    drafter.open((0, "p", 0, 0), [7, 8])
    assert drafter.propose((0, "p", 0, 0), 4).tokens == [8, 8]
    for part in (costs, acceptance):
        # Another process does not have the current folder among its places for modules.
        module, stored = sys.modules.pop(own), pickle.dumps(part)
        assert pickle.loads(stored) == load_costs(f"{own}:Slow(base_s=2)") if part is costs else pickle.loads(stored)
        sys.modules[own] = module


def test_instances_and_classes_serve_as_they_are(own):
    costs = load_costs(f"{own}:Slow")
    assert load_costs(costs) is costs
    assert load_costs(type(costs)) == costs
    assert isinstance(load_acceptance(type(load_acceptance(f"{own}:Kept"))), AcceptanceModel)
    assert isinstance(load_placement(type(load_placement(f"{own}:Turns"))), Placement)


@pytest.mark.parametrize("load", [load_costs, load_acceptance, load_placement])
@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("OWN:Missing", ["Missing", "OWN.py"]),
        ("OWN:Repeat", ["Repeat", "subclass"]),
        ("no.such:Class", ["no.such"]),
        ("antigravity:Flying", ["antigravity", "Python"]),
    ],
)
def test_what_is_no_part_is_refused(own, load, source, facts):
    with refused(ConfigError, naming=tuple(fact.replace("OWN", own) for fact in facts)):
        load(source.replace("OWN", own))


@pytest.mark.parametrize(
    ("load", "source", "facts"),
    [
        (load_costs, "OWN:Slow(bse_s=1)", ["bse_s", "base_s"]),
        (load_costs, "OWN:Slow(base_s=fast)", ["base_s", "fast"]),
        (load_placement, "OWN:Turns(frst=1)", ["frst", "first"]),
        (load_placement, "OWN:Loud", ["missing", "OWN.py", 39]),
        (load_placement, "least_laded", ["least_loaded"]),
        (load_policy, "beg-mab(epsilom=0.1)", ["epsilom", "epsilon"]),
        (load_policy, "goodput(window=none)", ["window", "none"]),
        (load_policy, "beg-mob(epsilon=0.1)", ["beg-mab"]),
    ],
)
def test_arguments_that_do_not_fit_are_named(own, load, source, facts):
    with refused(ConfigError, naming=tuple(str(fact).replace("OWN", own) for fact in facts)):
        load(source.replace("OWN", own))


def test_a_shipped_policy_takes_parameters():
    policy = load_policy("beg-mab(epsilon=0.05,window=10)")
    assert (policy.selector.epsilon, policy.selector.window) == (0.05, 10)
    assert policy.with_settings({"epsilon": 0.1, "window": 300}) == load_policy("beg-mab")


def test_a_drafter_is_what_its_class_states(own):
    spec = OwnDrafter(path=f"{own}:Repeat")
    policy = Policy(selector=FixedSpec(strategy=Strategy.chain("mine", 4)), drafters={"mine": spec.load()})
    assert policy.drafters == {"mine": spec}
    assert load_policy(policy.model_dump(mode="json")) == policy
    assert Drafters(policy.drafters)["mine"].has_network
    assert not Drafters(policy.drafters)["ngram"].has_network
    both = Drafters({**policy.drafters, "both": HybridSpec(first="mine", otherwise="ngram")})["both"]
    assert (both.has_network, both.made_by) == (True, "engine"), "its network runs beside the scheduler"
    assert (spec.remembers, policy.own_parts) == (False, (spec,))


def test_files_do_not_choose_what_is_imported(own, tmp_path, monkeypatch):
    """They may be somebody else's; what is typed is one's own."""
    drafters = {"mine": {"kind": "custom", "path": f"{own}:Repeat"}}
    fixed = {"selector": {"kind": "fixed", "strategy": "mine:4"}, "drafters": drafters}
    goodput = load_policy("goodput").model_dump(mode="json")
    goodput["selector"]["costs"] = f"{own}:Slow"
    policy = {"selector": {"kind": "custom", "path": f"{own}:Mine"}}
    for content in (policy, fixed, goodput):
        path = tmp_path / "policy.json"
        path.write_text(json.dumps({"format": "tltlab-policy", "version": 1, **content}))
        with code_allowed(["another"]), refused(ConfigError, naming=(path, f"{own}:", f"--allow-code {own}")):
            load_policy(path)
        assert own not in sys.modules
    with named_in("a file"), refused(ConfigError, naming=("a file",)):
        load_costs(f"{own}:Slow")
    with code_allowed([own]):
        assert load_policy(path).selector.costs == f"{own}:Slow"
    monkeypatch.setenv("TLTLAB_ALLOW_CODE", f"this,{own}")
    assert load_policy(path).selector.costs == f"{own}:Slow"


def test_shipped_parts_keep_their_contracts():
    for placement in PLACEMENTS.values():
        check_placement(placement)
    for preset in presets():
        check_costs(load_costs(preset))
    for name, model in SHIPPED_ACCEPTANCE.items():
        if not name.endswith("-fresh"):
            check_acceptance(load_acceptance(name)), model
    check_acceptance(load_acceptance("constant:2.5"))


def test_shipped_drafters_meet_the_contract():
    pytest.importorskip("arctic_inference")
    for spec in SYSTEM_DRAFTERS.values():
        check_drafter(spec.make)


# One broken promise each


class Last(TextDrafter):
    def propose(self, key, depth):
        return Draft(self.texts[key][-1:] * depth, 0.5 * depth)


def drafting(**methods):
    return type("Mine", (Last,), methods)


def keeps(self, key, tokens):
    self.texts[key] = tokens


def learns_of_the_past(self, key, depth):
    self.seen = getattr(self, "seen", set()) | {key[0]}
    return Draft([len(self.seen)] * depth, 0.0)


def grows_old(self, *_):
    self.old = True


def drafts_its_age(self, key, depth):
    return Draft([1 + hasattr(self, "old")] * depth, 0.0)


BROKEN_DRAFTERS = {
    "tokens where": drafting(propose=lambda self, key, depth: Draft([1] * (depth + 1), 0.5)),
    "token ids": drafting(propose=lambda self, key, depth: Draft(["a"] * depth, 0.0)),
    "expected must": drafting(propose=lambda self, key, depth: Draft([1] * depth, depth + 1.0)),
    "expected must lie": drafting(propose=lambda self, key, depth: Draft([1] * depth, float("nan"))),
    "cut into calls": drafting(extend=lambda self, key, tokens: self.texts[key].append(tokens[0])),
    "a Draft": drafting(propose=lambda self, key, depth: [1]),
    "draw nothing": drafting(propose=lambda self, key, depth: Draft([id(self)] * depth, 0.0)),
    "asked twice": drafting(
        propose=lambda self, key, depth: (self.texts[key].append(1), Draft([len(self.texts[key])] * depth, 0.0))[1]
    ),
    "propose_all": drafting(propose_all=lambda self, queries: [Draft([], 0.0) for _ in queries]),
    "True or False, got 'no'": drafting(has_network="no"),
    "made_by": drafting(made_by="workers"),
    "catch_up": drafting(catch_up=lambda self, most=None: None),
    "memory_bytes must": drafting(memory_bytes=-1),
    "recall": drafting(propose=learns_of_the_past),
    "JSON": drafting(state_dict=lambda self: {"texts": {1, 2}}),
    "load_state_dict": drafting(state_dict=lambda self: {"id": id(self)}),
    "handed": drafting(open=keeps),
    "forget()": drafting(forget=grows_old, propose=drafts_its_age),
    "load_state_dict({})": drafting(load_state_dict=grows_old, propose=drafts_its_age),
}


@pytest.mark.parametrize("fact", BROKEN_DRAFTERS)
def test_drafter_that_breaks_promise_is_found_out(fact):
    check_drafter(Last)
    check_drafter(NgramDrafter())
    with refused(AssertionError, naming=(fact,)):
        check_drafter(BROKEN_DRAFTERS[fact])


class Halves(Placement):
    def __init__(self, place):
        self.rule, self.calls = place, 0

    def place(self, workload, workers, history):
        self.calls += 1
        return self.rule(self, [list(range(w, len(workload), workers)) for w in range(workers)], history)


BROKEN_PLACEMENTS = {
    "a queue for each worker": lambda self, queues, history: queues[:-1],
    "in one queue once": lambda self, queues, history: [queue[1:] for queue in queues],
    "and then": lambda self, queues, history: queues[:: 1 if self.calls % 2 else -1],
    "changed the history": lambda self, queues, history: history.clear() or queues,
}


@pytest.mark.parametrize("fact", BROKEN_PLACEMENTS)
def test_placement_that_breaks_promise_is_found_out(fact):
    check_placement(Halves(lambda self, queues, history: queues))
    with refused(AssertionError, naming=(fact,)):
        check_placement(Halves(BROKEN_PLACEMENTS[fact]))


def test_a_plan_is_checked_when_it_is_used():
    with refused(ConfigError, naming=("Halves", 2, 0)):
        placed(Halves(lambda self, queues, history: []), (), 2, {})


class Cost(LinearIteration):
    """An iteration whose parts a test breaks."""

    __slots__ = ()


def cost_model(part, value):
    """A cost model whose iterations have `part` replaced by what `value` makes of the right value."""

    def broken(self, *args):
        return value(getattr(LinearIteration, part)(self, *args))

    cls = type("Broken", (Cost,), {"__slots__": (), part: broken})

    class Mine(LinearCosts):
        def iteration(self, strategy, **asked):
            right = super().iteration(strategy, **asked)
            return cls(**{name: getattr(right, name) for name in LinearIteration.__dataclass_fields__})

    return lambda: Mine(**SECONDS)  # type: ignore[return-value]


SECONDS = {name: 1e-3 for name in LinearCosts.model_fields if name.endswith("_s")}
NUMBERS = iter(range(10_000_000))


class NotACost(LinearCosts):
    def iteration(self, strategy, **asked):
        return 0.01


class Deaf(LinearCosts):
    def iteration(self, strategy, **asked):
        return super().iteration(strategy)


class Ignorant(LinearCosts):
    def iteration(self, strategy, **asked):
        raise ConfigError("not known")


class Rising(LinearCosts):
    def prefill_s(self, tokens):
        return tokens * tokens


class Drafting(LinearCosts):
    def iteration(self, strategy, **asked):
        asked["tokens_to_verify"] = asked.get("tokens_to_verify", strategy.tokens_to_verify)
        return super().iteration(Strategy.chain("ngram", 2), **asked)


BROKEN_COSTS = {
    "IterationCost": lambda: NotACost(**SECONDS),
    "tokens_to_verify": lambda: Deaf(**SECONDS),
    "plain decoding, which": lambda: Ignorant(**SECONDS),
    "chunks": lambda: Rising(**SECONDS),
    "without_context_s must be 0": cost_model("without_context_s", lambda s: -s),
    "context_slope_s must be 0": cost_model("context_slope_s", lambda s: float("inf")),
    "asked again": cost_model("without_context_s", lambda s: s + next(NUMBERS)),
    "more than without_context_s": cost_model("without_context_s", lambda s: 1e-9),
    "drafts nothing": lambda: Drafting(**SECONDS),
    "seconds is not": cost_model("seconds", lambda s: s + 1.0),
    "added_s": cost_model("added_s", lambda s: s + 1.0),
}


@pytest.mark.parametrize("fact", BROKEN_COSTS)
def test_cost_model_that_breaks_promise_is_found_out(fact):
    check_costs(lambda: LinearCosts(**SECONDS))
    with refused(AssertionError, naming=(fact,)):
        check_costs(BROKEN_COSTS[fact])


class Same(AcceptanceModel):
    def survival(self, strategy, requests):
        return requests.alike(0.5 ** np.arange(1.0, strategy.reach + 1))


class Each(AcceptanceModel):
    varies_by = "request"

    def survival(self, strategy, requests):
        late = 1 / (1 + requests.generated_tokens)
        return np.stack([np.exp(-i * late) for i in range(1, strategy.reach + 1)], axis=1)


def accepting(base, **members):
    return type("Mine", (base,), members)


def survival_of(change):
    return accepting(Each, survival=lambda self, *asked: change(Each.survival(self, *asked)))


BROKEN_ACCEPTANCE = {
    "drafted": accepting(Same, num_drafted=lambda self, strategy: 0.1),
    "num_drafted of": accepting(Same, num_drafted=lambda self, strategy: 99.0),
    "varies_by must": accepting(Each, varies_by="weather"),
    "varies_by is nothing": accepting(Each, varies_by="nothing"),
    "covers nothing": accepting(Same, check=lambda self, strategy: load_costs("no such")),
    "shape": survival_of(lambda rows: rows[:, :0]),
    "between 0 and 1": survival_of(lambda rows: rows + 1),
    "rises": survival_of(lambda rows: rows[:, ::-1]),
    "asked again": survival_of(lambda rows: rows / (1 + next(NUMBERS))),
    "most_tokens": accepting(Each, most_tokens=lambda self, strategy, requests: np.ones(len(requests))),
}


@pytest.mark.parametrize("fact", BROKEN_ACCEPTANCE)
def test_acceptance_model_that_breaks_promise_is_found_out(fact):
    check_acceptance(Same)
    check_acceptance(Each)
    with refused(AssertionError, naming=(fact,)):
        check_acceptance(BROKEN_ACCEPTANCE[fact])


def test_broken_part_is_refused_where_it_is_used(own):
    for load, part in ((load_costs, Rising), (load_acceptance, BROKEN_ACCEPTANCE["rises"])):
        with refused(ConfigError, naming=("contract",)):
            load(part(**SECONDS) if part is Rising else part)  # type: ignore[operator]
    with refused(ConfigError, naming=("placement Halves",)):
        load_placement(Halves(BROKEN_PLACEMENTS["and then"]))
