"""What holds of every simulation, whatever lengths, limits, costs, acceptance and policy meet."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator import closed_form_makespan_s, per_iteration_makespan_s, table_of
from tests.fakes.curves import CurveAcceptance
from tltlab.acceptance.base import Acceptance, ConstantAcceptance, GeometricAcceptance
from tltlab.acceptance.curves import SiblingAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import BatchBand, FittedDepth, MeasuredAcceptance
from tltlab.costs.base import CostModel
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import Activation, Policy, load_policy
from tltlab.policies.specs import BegMabSpec, Bucket, CustomSpec, FixedSpec
from tltlab.sim import simulate
from tltlab.sim.placement import PLACEMENTS
from tltlab.sim.scenario import Scenario
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

from ...traces_of_lengths import of_lengths
from .. import workloads
from ..workloads import FEW, HALF, assert_above_its_bounds, with_terms

CAPACITY_TOKENS = st.integers(420, 2000)
TERMS = [name for name in LinearCosts.model_fields if name.endswith("_s")]
SECONDS = st.sampled_from([0.0, 1e-6, 1e-4, 1e-2])
PRESETS = ("h100-qwen2.5-7b", "h100-qwen2.5-32b-tp4-table", "a100-qwen2.5-32b-tp4", "cpu-small")
CHAINS = st.integers(1, 6).flatmap(
    lambda depth: st.builds(Strategy, st.just("learned"), st.just(depth), st.just(1), st.integers(2, depth + 1))
)
ANY = st.one_of(st.just(NO_SPECULATION), CHAINS)
HELD_BACK = st.one_of(
    st.none(),
    st.builds(
        Activation,
        max_requests=st.integers(0, 8),
        count=st.sampled_from(["running", "remaining"]),
        hold_iterations=st.sampled_from([0, 4]),
    ),
)


def table(arms):
    return table_of(*((1 + 3 * i, arm) for i, arm in enumerate(arms))).selector


def bandit_of(arms):
    buckets = (Bucket(min_batch=1, strategies=tuple(arms)), Bucket(min_batch=6, strategies=(arms[0],)))
    return BegMabSpec(buckets=buckets)


ARMS = st.lists(ANY, min_size=1, max_size=3, unique=True)
# Plain in large batches, as in practice: the batch falls into speculation, and a switch is paid.
FALLING = st.lists(CHAINS, min_size=1, max_size=2).map(lambda arms: table([*arms, NO_SPECULATION]))
MEMORYLESS = st.one_of(st.builds(FixedSpec, strategy=ANY), ARMS.map(table), FALLING)
POLICIES = st.builds(Policy, selector=st.one_of(MEMORYLESS, ARMS.map(bandit_of)), activation=HELD_BACK)


@st.composite
def cost_models(draw):
    limits = {
        "kv_capacity_tokens": draw(st.none() | CAPACITY_TOKENS),
        "max_num_seqs": draw(st.none() | st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.none() | st.sampled_from([1, 7, 64])),
        "switch_s": draw(SECONDS),
    }
    if draw(st.booleans()):
        return load_costs(draw(st.sampled_from(PRESETS))).model_copy(update=limits)
    terms = {name: draw(SECONDS) for name in TERMS}
    sizes = draw(st.none() | st.lists(st.integers(1, 40), min_size=1, max_size=3))
    # An iteration that takes no time at all would make every rate infinite.
    return LinearCosts.model_validate(terms | limits | {"base_s": 1e-3, "graph_sizes": sizes})


def measured(chances):
    p = np.array(chances) / sum(chances)
    fitted = FittedDepth(accepted=tuple(p.tolist()), drafted=float(p @ np.arange(7)))
    return {"learned": {6: fitted}}


CHANCES = st.lists(st.floats(0.01, 1.0), min_size=7, max_size=7).map(measured)
ALIKE = st.one_of(
    st.builds(ConstantAcceptance, tokens=st.floats(1.0, 8.0)),
    st.builds(GeometricAcceptance, alpha=st.floats(0.0, 1.0)),
    st.just(load_acceptance("tlt-qwen2.5-32b")),
    st.builds(
        lambda few, many: MeasuredAcceptance(
            bands=(BatchBand(max_batch=2, drafters_by_depth=few), BatchBand(max_batch=None, drafters_by_depth=many))
        ),
        CHANCES,
        CHANCES,
    ),
)
SIBLINGS = st.builds(
    SiblingAcceptance, alone=st.floats(0.0, 0.5), most=st.floats(0.5, 1.0), exponent=st.floats(0.2, 2.0)
)
OWN = st.builds(
    lambda logit, drift: CurveAcceptance(names=("ngram", "learned"), keep_logits=(logit,), drift=drift),
    st.floats(-2.0, 2.0),
    st.floats(0.0, 1.0),
)
ACCEPTANCES = st.one_of(ALIKE, SIBLINGS, OWN, st.builds(FreshAcceptance, base=st.one_of(ALIKE, SIBLINGS)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that `simulate` and `Scenario.of` take."""

    trace: Trace
    costs: CostModel
    acceptance: Acceptance
    placement: str
    mode: str
    spot: dict[str, float] | None

    @property
    def settings(self):
        return {"costs": self.costs, "acceptance": self.acceptance, "placement": self.placement, "mode": self.mode}

    def simulate(self, policy):
        return simulate(self.trace, policy, spot=self.spot, record_iterations=True, **self.settings)

    def scenario(self):
        return Scenario.of(self.trace, **self.settings)


@st.composite
def cases(draw, acceptances=ACCEPTANCES, modes=("fluid",)):
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    trace = of_lengths(lengths, workers=draw(st.integers(1, 3)), prompt_tokens=draw(st.sampled_from([1, 20, 100])))
    group = draw(st.integers(1, 4))
    names = {"prompt_id": [f"p{i // group}" for i in range(len(lengths))], "sample": np.arange(len(lengths)) % group}
    trace = trace.replace(workload=trace.workload.assign(**names), outcomes=trace.outcomes.assign(**names))
    return Case(
        trace=trace,
        costs=draw(cost_models()),
        acceptance=draw(acceptances),
        placement=draw(st.sampled_from([p for p in PLACEMENTS if p != "recorded"])),
        mode=draw(st.sampled_from(modes)),
        spot=draw(st.sampled_from([None, {"start_s": 0.0, "yield_s": 0.5}])),
    )


def spans_and_iterations_add_up(case, policy, result):
    trace, rollout = result.trace, result.rollouts[0]
    close = max(1.0, rollout.makespan_s) * 1e-9
    for worker, end_s in enumerate(rollout.worker_end_s):
        spans = trace.spans[trace.spans["lane"] == f"worker {worker}"].sort_values("t_start", kind="stable")
        starts, ends = spans["t_start"].to_numpy(), (spans["t_start"] + spans["duration"]).to_numpy()
        assert starts[1:] == pytest.approx(ends[:-1], abs=close)
        # A trainer that takes long to yield holds its worker beyond the rollout.
        assert ends[-1] >= rollout.makespan_s - close
        rows = trace.iterations[trace.iterations["worker"] == worker]
        outside_s = case.costs.outside_s if len(rows) else 0.0
        assert rows["duration"].sum() + outside_s == pytest.approx(end_s, abs=close)
        assert (rows["duration"] >= 0).all()
    columns = [log.columns for log in rollout.logs]
    busy = [
        case.costs.outside_s * (len(c.seconds) > 0) + float((c.seconds + c.prefill_s + c.switch_s).sum())
        for c in columns
    ]
    assert busy == pytest.approx(rollout.worker_end_s, abs=close)
    made, wanted = sum(float(c.tokens.sum()) for c in columns), rollout.requests.lengths.sum()
    deepest = max(strategy.draft_depth for strategy in policy.strategies)
    assert wanted - 1e-3 <= made < wanted + (deepest + 1) * len(rollout.requests)
    if not deepest:
        assert made == pytest.approx(wanted)
    assert trace.iterations["num_generated"].sum() == pytest.approx(made, abs=len(rollout.logs))
    prefilled = sum(float(log.columns.prefill_tokens.sum()) for log in rollout.logs)
    if case.costs.kv_capacity_tokens is None:
        assert prefilled == pytest.approx(rollout.requests.prompts.sum())


def is_the_same(one, other):
    for name in ("outcomes", "spans", "iterations", "decisions"):
        first, second = one.table(name), other.table(name)
        assert first.equals(second), name


@HALF
@given(cases(modes=("fluid", "sampled")), POLICIES)
def test_any_scenario_is_bounded_adds_up_and_repeats(case, policy):
    result = case.simulate(policy)
    assert_above_its_bounds(result)
    spans_and_iterations_add_up(case, policy, result)
    is_the_same(result.trace, case.simulate(policy).trace)


def asked_every_time(policy):
    """A memoryless policy that does not say so: no closed form applies, it is asked again and again."""

    def build(rng):
        selector = policy.build(rng)
        selector.memoryless = False
        return selector

    return with_terms(policy, selector=CustomSpec.holding(build))


@FEW
@given(cases(ALIKE), st.builds(Policy, selector=MEMORYLESS))
def test_closed_form_is_engine_asked_again_and_again(case, policy):
    scenario = case.scenario()
    # A choice for a block of iterations holds at once, as that of a memoryless policy does.
    blocks = replace(scenario, decision_block=2)
    (quick,), (slow,) = scenario.rollouts(policy), blocks.rollouts(asked_every_time(policy))
    assert quick.finish_s == pytest.approx(slow.finish_s, rel=1e-9)
    assert quick.first_token_s == pytest.approx(slow.first_token_s, rel=1e-9)


COSTS = with_terms(workloads.COSTS, prefill_per_token_s=1e-6, far_token_s=1e-5)
CHAIN = load_policy("learned:4")
TABLE = table_of((1, Strategy.chain("learned", 6)), (4, Strategy.chain("learned", 2)), (9, NO_SPECULATION))
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=24)


@HALF
@given(LENGTHS, st.sampled_from(TERMS), st.floats(1e-5, 1e-2), st.sampled_from([load_policy("none"), CHAIN, TABLE]))
def test_no_cost_term_makes_a_rollout_faster(lengths, term, more, policy):
    trace = of_lengths(lengths, workers=2)
    dearer = COSTS.model_copy(update={term: getattr(COSTS, term) + more})
    cheap, dear = (simulate(trace, policy, costs=c, acceptance="geometric:0.6").makespan_s for c in (COSTS, dearer))
    assert dear >= cheap


def test_every_cost_term_counts_where_everything_happens():
    trace = of_lengths([9] * 130 + [10, 300, 40, 5, 80, 12, 7, 9, 11, 30, 22, 6], workers=1)
    base = simulate(trace, TABLE, costs=COSTS, acceptance="geometric:0.6").makespan_s
    for term in TERMS:
        dearer = COSTS.model_copy(update={term: getattr(COSTS, term) + 1e-3})
        assert simulate(trace, TABLE, costs=dearer, acceptance="geometric:0.6").makespan_s > base, term


@pytest.mark.parametrize("policy", [CHAIN, TABLE], ids=["chain", "table"])
def test_fluid_is_the_mean_of_sampled_runs(policy):
    trace = log_normal(prompts=32, rl_steps=1, median=1500, sigma=0.8, cap=8192, workers=4)
    options = {"costs": COSTS, "acceptance": "geometric:0.7"}
    fluid = simulate(trace, policy, **options).makespan_s
    sampled = [simulate(trace, policy, mode="sampled", seed=seed, **options).makespan_s for seed in range(8)]
    assert fluid == pytest.approx(np.mean(sampled), rel=0.01)


@HALF
@given(LENGTHS, st.integers(1, 4))
def test_three_ways_to_simulate_plain_decoding_agree(lengths, workers):
    scenario = Scenario.of(of_lengths(lengths, workers=workers), costs=COSTS)
    step, queues = scenario.steps[0], scenario.queues[0]
    expected = pytest.approx(scenario.rollouts(load_policy("none"))[0].makespan_s, rel=1e-9)
    assert per_iteration_makespan_s(step, queues, COSTS) == expected
    assert closed_form_makespan_s(step, queues, COSTS) == expected
