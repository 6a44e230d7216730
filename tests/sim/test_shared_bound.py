"""The bound that weighs every path against all work: sound, at least as good as either, better where both matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.acceptance.load import GeometricAcceptance
from tltlab.bench.simulator import COSTS, example_table
from tltlab.costs.base import LinearCosts
from tltlab.importers.lengths import of_lengths
from tltlab.policies.policy import load_policy
from tltlab.sim.bounds import envelope, largest_batch, lower_bound_s, shared_bound_s
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.placement import PLACEMENTS
from tltlab.sim.scenario import Scenario
from tltlab.strategy import NO_SPECULATION

PER_REQUEST = LinearCosts(
    base_s=1.0, per_request_s=0.5, per_token_s=0.0, per_context_s=0.0, sd_base_s=0.0, sd_idle_s=0.0,
    draft_level_s=0.0, draft_level_per_request_s=0.0, prefill_per_token_s=0.0,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from(PLACEMENTS[:4]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_no_placement_and_no_policy_beats_it(
    lengths: list[int], workers: int, placement: str, speculates: bool, seats: int | None
) -> None:
    costs = COSTS.model_copy(update={"max_num_seqs": seats})
    policy = example_table() if speculates else load_policy("none")
    trace = of_lengths(lengths, workers=workers)
    scenario = Scenario.of(trace, costs=costs, acceptance="geometric:0.7", placement=placement)
    step = scenario.steps[0]
    regimes = Regimes(policy.strategies, costs, GeometricAcceptance(alpha=0.7))
    bound_s = shared_bound_s(step, regimes, costs, workers, largest_batch(step, costs))
    assert bound_s <= scenario.rollouts(policy)[0].makespan_s * (1 + 1e-9)
    model = GeometricAcceptance(alpha=0.7)
    older_s = lower_bound_s(step, regimes.up_to(len(lengths)), costs, workers, model, "fluid", 0)
    assert bound_s >= 0.999 * older_s if not speculates else bound_s > 0


def test_it_is_exact_where_one_worker_must_run_all_alike():
    trace = of_lengths([100] * 8, workers=1)
    scenario = Scenario.of(trace, costs=PER_REQUEST)
    makespan_s = scenario.rollouts(load_policy("none"))[0].makespan_s
    assert makespan_s == 100 * (1.0 + 0.5 * 8)
    assert scenario.bounds_s([NO_SPECULATION])[0] == pytest.approx(makespan_s)


def test_a_long_response_among_many_short_ones_needs_room_of_its_own():
    trace = of_lengths([1000] + [200] * 30, workers=2)
    scenario = Scenario.of(trace, costs=PER_REQUEST)
    step, regimes = scenario.steps[0], Regimes([NO_SPECULATION], PER_REQUEST, None)
    older_s = lower_bound_s(step, regimes.up_to(31), PER_REQUEST, 2, None, "fluid", 0)
    assert shared_bound_s(step, regimes, PER_REQUEST, 2, 31) > 1.1 * older_s


def test_an_envelope_leaves_out_what_lies_above_it():
    x, y = envelope(np.array([1.0, 2.0, 3.0, 4.0, 4.0]), np.array([1.0, 1.0, 4.0, 9.0, 8.0]))
    assert (x.tolist(), y.tolist()) == ([0.0, 2.0, 3.0, 4.0], [0.0, 1.0, 4.0, 8.0])
