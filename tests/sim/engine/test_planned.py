"""Rollouts with a planner: what it is asked, what it may do, and that nothing is lost or gained by it."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tltlab
from tests.sim.workloads import FEW, FREE, ONE_SECOND, TINY, with_terms
from tests.traces_of_lengths import of_lengths
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.planning.composition import SharedBuffer
from tltlab.planning.planners import BufferPlanner
from tltlab.planning.rollout import Gather, Hold, Move, RolloutPlanner, Shape
from tltlab.sim import simulate

QUARTER = with_terms(ONE_SECOND, base_s=0.25)
BY_BATCH = with_terms(FREE, per_request_s=1.0)
"""An iteration takes a second for each request."""
ONE = Shape(engines=1, gpus=4)
MACHINE = {"gpus": "8xH100", "model": "Qwen2.5-7B"}


class Scripted(RolloutPlanner):
    """Does what a function of the state says, and remembers the states that it was asked in."""

    def __init__(self, rule=lambda state: []):
        self.rule, self.states = rule, []

    def plan(self, state):
        if (state.prompt_tokens == 20.0).all():
            return []  # the example of the contract's check
        self.states.append(state)
        return self.rule(state)

    def __deepcopy__(self, memo):
        return self


def planned(lengths, rule, costs=ONE_SECOND, *, workers=4, fast=None, **settings):
    shapes = {} if fast is None else {Shape(engines=1, gpus=workers): fast}
    planner = Scripted(rule)
    trace = of_lengths(lengths, workers=workers)
    return simulate(trace, costs=costs, planner=planner, shapes=shapes, **settings), planner.states


def lanes_of(trace):
    """The spans of each lane, of which none begins before the one before it ends."""
    for _, lane in trace.spans.sort_values("t_start").groupby("lane"):
        ends = (lane["t_start"] + lane["duration"]).to_numpy()
        assert (lane["t_start"].to_numpy()[1:] >= ends[:-1] - 1e-6).all()
        yield lane


def gather_last(state):
    return [Gather(shape=ONE, queues=())] if len(state) == 1 and state.active != ONE else []


@pytest.mark.parametrize("mode", ["fluid", "sampled"])
@pytest.mark.parametrize("policy", ["none", "ngram:4@8", "adaptive"])
def test_a_planner_that_does_nothing_changes_nothing(policy, mode):
    alone = simulate(TINY, policy, mode=mode, **MACHINE)
    asked = simulate(TINY, policy, mode=mode, planner=Scripted(), **MACHINE)
    for one, other in zip(alone.rollouts, asked.rollouts, strict=True):
        np.testing.assert_allclose(other.finish_s, one.finish_s, rtol=1e-13)
        np.testing.assert_allclose(other.first_token_s, one.first_token_s, rtol=1e-13)
    if policy != "none":
        assert asked.mean_accept_length == pytest.approx(alone.mean_accept_length, rel=1e-12)
    assert asked.summary["bubble_fraction"] == pytest.approx(alone.summary["bubble_fraction"], abs=1e-12)


def test_the_last_response_continues_on_an_engine_of_all_gpus():
    result, states = planned([10, 10, 10, 100], gather_last, fast=QUARTER, gather_s=0.5, record_iterations=True)
    rollout = result.rollouts[0]
    # Ten seconds, half a second for the switch, and ninety tokens of a quarter.
    assert rollout.finish_s.tolist() == [10.0, 10.0, 10.0, 33.0]
    assert rollout.worker_end_s == [33.0] * 4
    assert [len(state) for state in states] == [4, 3, 2, 1]
    assert states[-1].generated_tokens.tolist() == [10.0]
    assert states[-1].worker.tolist() == [3]
    assert states[-1].ended == {(0, f"p{i}", 0, 0): tokens for i, tokens in enumerate([10, 10, 10, 100])}
    assert result.summary["bubble_fraction"] == pytest.approx(0.0, abs=1e-12)
    # It is in all lanes of its engine, whose iterations are there once.
    trace = result.trace
    for lane in lanes_of(trace):
        after = lane[lane["t_start"] >= 10.0]
        assert after["kind"].tolist() == ["move", "decode"]
        assert after["duration"].tolist() == [0.5, 22.5]
    assert trace.iterations["num_generated"].sum() == 130
    assert trace.outcomes["worker"].tolist() == [0, 1, 2, 0]


def test_a_moved_request_has_its_prompt_and_tokens_prefilled_again():
    costs = with_terms(ONE_SECOND, prefill_per_token_s=0.01)
    key = (0, "p1", 0, 0)
    rule = lambda state: [Move(key=key, worker=0)] if len(state) == 1 else []  # noqa: E731
    result, _ = planned([10, 30], rule, costs, workers=2, placement="round_robin")
    # Both prompts of 128 tokens, 10 iterations; then 128 + 10 tokens once more, and 20 iterations.
    assert result.rollouts[0].finish_s.tolist() == pytest.approx([11.28, 12.66 + 20.0])
    assert result.summary["prefilled_tokens"] == 128 + 128 + 138


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda state: [Move(key=state.keys[0], worker=4)], "worker 4"),
        (lambda state: [Gather(shape=Shape(engines=2, gpus=2), queues=())], "2x2"),
        (lambda state: ["move them"], "move them"),
    ],
)
def test_a_planner_that_is_wrong_is_named_once_and_the_rollout_goes_on(rule, words, capsys):
    result, _ = planned([10, 10, 10, 40], rule, fast=QUARTER)
    told = capsys.readouterr().err
    assert result.rollouts[0].finish_s.tolist() == [10.0, 10.0, 10.0, 40.0]
    assert told.count("Scripted") == 1
    assert words in told


@FEW
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["none", "ngram:4@8", "adaptive"]), st.sampled_from(["fluid", "sampled"])
)
def test_whatever_a_planner_does_every_response_gets_its_tokens_once(seed, policy, mode):
    rng = np.random.default_rng(seed)

    def rule(state):
        actions = []
        for i in rng.permutation(len(state))[: int(rng.integers(3))].tolist():
            actions.append(Move(key=state.keys[i], worker=int(rng.integers(state.active.engines))))
        for i in np.flatnonzero(state.generated_tokens == 0).tolist():
            if rng.random() < 0.1 and all(action.key != state.keys[i] for action in actions):
                actions.append(Hold(key=state.keys[i]))
        if rng.random() < 0.05:
            shapes = [shape for shape in state.engines if shape != state.active]
            actions.append(Gather(shape=shapes[int(rng.integers(len(shapes)))], queues=()))
        return actions

    lengths = (1 + rng.geometric(1 / 60, 24)).tolist()
    settings = {"seed": int(seed % 1000), "mode": mode, "record_iterations": True, **MACHINE}
    result = simulate(of_lengths(lengths, workers=8), policy, planner=Scripted(rule), **settings)
    rollout, trace = result.rollouts[0], result.trace
    assert trace.outcomes["response_tokens"].tolist() == lengths
    assert (rollout.finish_s > 0).all()
    assert (rollout.first_token_s <= rollout.finish_s).all()
    assert rollout.makespan_s == pytest.approx(rollout.finish_s.max())
    if mode == "fluid":
        assert rollout.makespan_s >= result.bounds_s()[0, 0] * (1 - 1e-9)
    generated = trace.iterations["num_generated"].sum()
    assert generated >= sum(lengths) - (mode == "fluid") * len(lengths)
    if policy == "none":
        assert generated == sum(lengths)
    assert len(list(lanes_of(trace))) >= 8


def test_gathering_pays_in_the_tail_and_no_shipped_planner_loses_more_than_a_hundredth():
    stay = simulate(TINY, "none", **MACHINE).makespan_s
    for planner in ("gather", "rebalance", "clairvoyant"):
        assert simulate(TINY, "none", planner=planner, **MACHINE).makespan_s <= 1.01 * stay
    long = of_lengths([100] * 31 + [8000], workers=8)
    alone, gathered = (simulate(long, "none", planner=name, **MACHINE).makespan_s for name in ("stay", "clairvoyant"))
    assert gathered < 0.7 * alone


def test_requests_move_from_the_engine_that_ends_last_to_one_that_has_none():
    history = pd.DataFrame({"response_tokens": [10] * 4 + [400] * 4})
    trace = of_lengths(history["response_tokens"].tolist(), workers=2, prompt_tokens=1)
    alone, moved = (simulate(trace, "none", costs=BY_BATCH, planner=name).makespan_s for name in ("stay", "rebalance"))
    assert alone == 1600.0
    assert moved < 0.75 * alone


def test_seers_buffer_is_a_planner_too():
    trace = log_normal(prompts=8, group_size=8, rl_steps=2, median=120, cap=600, workers=4)
    costs = with_terms(FREE, base_s=0.01, per_request_s=1e-4)
    for room, chunk in ((None, 300), (4000, 300), (2500, 600)):
        how = {"costs": with_terms(costs, kv_capacity_tokens=room), "workers": 4}
        fed = simulate(trace, "none", admission=SharedBuffer(chunk_tokens=chunk), **how)
        asked = simulate(trace, "none", planner=BufferPlanner(chunk_tokens=chunk), **how)
        assert asked.makespan_s == pytest.approx(fed.makespan_s, rel=0.01 if room else 1e-12)
    few = {"costs": with_terms(costs, max_num_seqs=2), "workers": 4}
    begun = simulate(trace, "none", planner=BufferPlanner(), **few)
    assert begun.makespan_s < 0.95 * simulate(trace, "none", **few).makespan_s


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"planner": "gathr"}, "gather"),
        ({"planner": "gather", "shapes": "2x8", **MACHINE}, "GPUs"),
        ({"planner": "gather", "shapes": "1x8", **MACHINE}, "28 heads"),
        ({"planner": "gather", "shapes": "two", **MACHINE}, "two"),
        ({"planner": "gather", "shapes": "1x8", "costs": "cpu-small"}, "no costs"),
        ({"planner": "gather", "shapes": {Shape(engines=3, gpus=3): ONE_SECOND}, "costs": ONE_SECOND}, "divide"),
        ({"planner": "gather", "gather_s": float("nan")}, "gather"),
        ({"planner": "gather", "costs": "cpu-small"}, "no other shape"),
        ({"planner": "clairvoyant", "gpus": "1xH100", "model": "Qwen2.5-0.5B"}, "no other shape"),
        ({"planner": "rebalance", "spot": "tlt"}, "idle workers"),
    ],
)
def test_what_cannot_be_planned_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        simulate(TINY, **settings)


def test_weights_of_two_shapes_must_fit_beside_each_other():
    settings = {"planner": "gather", "gpus": "8xH100", "model": "Qwen2.5-32B", "tp": 1}
    with pytest.raises(ConfigError, match="GiB"):
        tltlab.simulate(TINY, shapes="4x2", **settings)
