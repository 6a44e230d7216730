"""What must hold of every simulation, whatever the lengths and costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator import closed_form_makespan_s, per_iteration_makespan_s
from tltlab.costs.base import LinearCosts
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import FixedSpec, TableRow, TableSpec
from tltlab.sim import simulate
from tltlab.sim.scenario import Scenario
from tltlab.strategy import NO_SPECULATION, Strategy

from ...traces_of_lengths import of_lengths
from .. import workloads
from ..workloads import HALF

COSTS = workloads.COSTS.model_copy(update={"prefill_per_token_s": 1e-6, "far_token_s": 1e-5})
CHAIN = Policy(selector=FixedSpec(strategy=Strategy.chain("learned", 4)))
TABLE = Policy(
    selector=TableSpec(
        rows=(
            TableRow(min_batch=1, strategy=Strategy.chain("learned", 6)),
            TableRow(min_batch=4, strategy=Strategy.chain("learned", 2)),
            TableRow(min_batch=9, strategy=NO_SPECULATION),
        )
    )
)
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=24)
TERMS = [name for name in LinearCosts.model_fields if name.endswith("_s")]


@HALF
@given(LENGTHS, st.integers(1, 4), st.sampled_from([load_policy("none"), CHAIN, TABLE]))
def test_work_is_conserved(lengths: list[int], workers: int, policy: Policy):
    result = simulate(of_lengths(lengths, workers=workers), policy, costs=COSTS, acceptance="geometric:0.6")
    columns = [log.columns for log in result.rollouts[0].logs]
    made = sum(float(c.tokens.sum()) for c in columns)
    most = 5 if policy is CHAIN else 7
    assert sum(lengths) - 1e-6 <= made < sum(lengths) + most * len(lengths)
    if policy.strategies == (NO_SPECULATION,):
        assert made == pytest.approx(sum(lengths))
    busy = [float((c.seconds + c.prefill_s + c.switch_s).sum()) for c in columns]
    assert busy == pytest.approx(result.rollouts[0].worker_end_s)
    assert result.makespan_s == pytest.approx(max(busy))


@HALF
@given(LENGTHS, st.sampled_from(TERMS), st.floats(1e-5, 1e-2), st.sampled_from([load_policy("none"), CHAIN, TABLE]))
def test_no_cost_term_makes_a_rollout_faster(lengths: list[int], term: str, more: float, policy: Policy):
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
def test_fluid_is_within_a_percent_of_the_mean_of_sampled_runs(policy: Policy):
    trace = log_normal(prompts=32, rl_steps=1, median=1500, sigma=0.8, cap=8192, workers=4)
    options = {"costs": COSTS, "acceptance": "geometric:0.7"}
    fluid = simulate(trace, policy, **options).makespan_s
    sampled = [simulate(trace, policy, mode="sampled", seed=seed, **options).makespan_s for seed in range(8)]
    assert fluid == pytest.approx(np.mean(sampled), rel=0.01)


@HALF
@given(LENGTHS, st.integers(1, 4))
def test_three_ways_to_simulate_plain_decoding_agree(lengths: list[int], workers: int):
    scenario = Scenario.of(of_lengths(lengths, workers=workers), costs=COSTS)
    step, queues = scenario.steps[0], scenario.queues[0]
    expected = pytest.approx(scenario.rollouts(load_policy("none"))[0].makespan_s, rel=1e-9)
    assert per_iteration_makespan_s(step, queues, COSTS) == expected
    assert closed_form_makespan_s(step, queues, COSTS) == expected


def test_a_worker_without_a_request_is_idle_throughout():
    result = simulate(of_lengths([50], workers=3), "none", costs=COSTS)
    assert result.rollouts[0].worker_end_s[1:] == [0.0, 0.0]
    assert result.summary["bubble_fraction"] == pytest.approx(2 / 3)


def test_a_switch_into_speculation_is_paid_once():
    trace = of_lengths([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120], workers=1)
    slow = COSTS.model_copy(update={"switch_s": 3.0})
    how = {"acceptance": "geometric:0.6", "record_iterations": True}
    quick, paid = (simulate(trace, TABLE, costs=c, **how) for c in (COSTS, slow))
    iterations = paid.trace.iterations
    assert iterations is not None
    before = int((iterations["drafter"] != "none").argmax())
    # Until then no drafter is loaded, and plain decoding pays nothing for one.
    assert 0 < before < len(iterations)
    assert paid.makespan_s == pytest.approx(quick.makespan_s + 3.0 - before * COSTS.need("sd_idle_s"))
    spans = paid.trace.spans
    assert spans is not None
    assert spans.loc[spans["kind"] == "switch", "duration"].tolist() == [3.0]
