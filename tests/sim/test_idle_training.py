"""Spot training beside a rollout: fake workers in a bare SimPy environment, checked against a clock that ticks."""

from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.policies.simple import NoSpeculation
from tltlab.sim.engine.batch import FluidBatch
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.idle_training import SimulatedSpotTrainer
from tltlab.sim.scenario import Scenario
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.schema import SPAN_KINDS, Manifest
from tltlab.traces.trace import Trace

SIMPLE = SpotTraining(
    padded_samples_per_s=4, packed=False, samples_per_update=8, sample_tokens=100, scaling_efficiency=1,
    start_s=5, join_s=1, checkpoint_every=10, checkpoint_s=0.5, carried_share=0,
)  # fmt: skip
"""An update of one worker takes 2 s, a cycle of ten with its checkpoint 20.5 s."""


def changed(**fields):
    return SpotTraining(**(SIMPLE.model_dump() | fields))


def rollout(spot, ends_s):
    """One rollout of workers that have nothing left at the given times."""
    env = simpy.Environment()
    spot.attach(env, len(ends_s))

    def worker(index, end_s):
        yield env.timeout(end_s)
        spot.worker_idle(index, env.now)

    workers = [env.process(worker(index, end_s)) for index, end_s in enumerate(ends_s)]
    env.run(until=env.all_of(workers))
    spot.rollout_ended(env.now)
    return spot.result


def started(spot, workers=3):
    """A rollout that a test drives by hand, with worker 0 idle at 10 s."""
    spot.attach(SimpleNamespace(now=0.0), workers)
    spot.worker_idle(0, 10.0)
    return spot


def test_one_idle_worker_trains_from_its_set_up_to_the_end_of_the_rollout():
    result = rollout(SimulatedSpotTrainer(changed(checkpoint_every=None)), [10.0, 60.0])
    assert result.trained.updates == (60 - 10 - 5) * 4 // 8
    assert result.trained.tokens == 22 * 800
    assert (result.idle_worker_s, result.held_worker_s, result.trained_worker_s) == (50.0, 50.0, 45.0)
    assert result.used_share == 0.9
    assert result.release_delay_s == 0.0
    assert result.interference_s == (0.0, 0.0)


def test_workers_train_and_checkpoints_are_written_on_their_own_lanes():
    result = rollout(SimulatedSpotTrainer(SIMPLE), [10.0, 20.0, 60.0])
    spans = [(s.lane, s.kind, s.start_s, s.end_s) for s in result.spans]
    # From 21 s on an update takes 1 s; two were done by 20 s, with half of the third.
    assert spans == [
        ("worker 0", "spot_train", 10.0, 60.0),
        ("worker 1", "spot_train", 20.0, 60.0),
        ("drafter", "checkpoint", 28.5, 29.0),
        ("drafter", "checkpoint", 39.0, 39.5),
        ("drafter", "checkpoint", 49.5, 50.0),
        ("drafter", "checkpoint", 60.0, 60.5),
    ]
    assert result.trained.checkpoints == 4
    assert {s.kind for s in result.spans} <= set(SPAN_KINDS)


def test_the_threshold_of_idle_workers_delays_the_training():
    spot = SimulatedSpotTrainer(changed(checkpoint_every=None), CoordinatorConfig(min_idle_workers=2))
    result = rollout(spot, [10.0, 30.0, 60.0])
    assert result.trained.updates == 60 - 30 - 5
    assert (result.idle_worker_s, result.held_worker_s) == (80.0, 60.0)


def test_a_rollout_that_ends_for_all_at_once_trains_nothing_and_the_drafter_ages():
    spot = SimulatedSpotTrainer(SIMPLE)
    assert rollout(spot, [10.0, 60.0]).drafter.age == 0
    done = spot.drafter.updates
    result = rollout(spot, [60.0, 60.0])
    assert (result.trained.updates, result.used_share, result.spans, result.num_periods) == (0, 0.0, (), 0)
    assert (result.drafter.age, result.drafter.updates) == (1, done)
    assert rollout(spot, [10.0, 60.0]).drafter.updates == 2 * done


def test_workers_without_a_share_of_the_rollout_have_no_data_before_others_finish():
    result = rollout(SimulatedSpotTrainer(changed(checkpoint_every=None)), [0.0, 20.0, 40.0])
    assert result.data_wait_s == 20.0 - 5.0
    assert result.trained.updates == 19, "two workers, behind the pause for the second's joining"


def test_responses_of_the_rollout_before_are_data_from_the_start():
    spot = SimulatedSpotTrainer(changed(checkpoint_every=None, carried_share=0.5))
    rollout(spot, [10.0, 60.0])
    assert rollout(spot, [0.0, 40.0]).trained.updates == 17


def test_max_epochs_counts_the_tokens_that_have_finished_and_those_carried_over():
    spot = SimulatedSpotTrainer(changed(max_epochs=1, carried_share=0.5))
    spot.attach(SimpleNamespace(now=0.0), 2)
    spot.responses_finished([1000.0, 600.0], 10.0)
    spot.worker_idle(0, 10.0)
    spot.responses_finished([200.0], 50.0)
    spot.worker_idle(1, 100.0)
    spot.rollout_ended(100.0)
    assert spot.result.trained.updates == 2, "1,800 tokens, 800 an update"
    assert spot.result.data_wait_s == 100 - 10 - 5 - 4
    spot.attach(SimpleNamespace(now=0.0), 2)
    spot.worker_idle(0, 10.0)
    spot.worker_idle(1, 100.0)
    spot.rollout_ended(100.0)
    assert spot.result.trained.updates == 2, "the longest two of three, 1,600 tokens, were carried over"


def test_a_second_period_does_not_get_the_first_ones_data_again():
    spot = SimulatedSpotTrainer(changed(max_epochs=1))
    spot.attach(SimpleNamespace(now=0.0), 3)
    spot.responses_finished([1600.0], 10.0)
    spot.worker_idle(0, 10.0)
    spot.worker_busy(0, 40.0)
    spot.worker_idle(1, 50.0)
    spot.worker_idle(2, 90.0)
    spot.worker_idle(0, 90.0)
    spot.rollout_ended(90.0)
    assert (spot.result.num_periods, spot.result.trained.updates) == (2, 2)


def test_max_epochs_without_lengths_is_refused():
    with pytest.raises(ConfigError, match="lengths of finished responses"):
        rollout(SimulatedSpotTrainer(changed(max_epochs=1)), [10.0, 60.0])


def test_a_trainer_that_finishes_its_update_keeps_the_rl_step_waiting_for_it():
    result = rollout(SimulatedSpotTrainer(changed(on_stop="finish", checkpoint_every=None)), [10.0, 60.5])
    assert result.trained.updates == 23
    assert result.release_delay_s == 0.5
    assert result.interference_s == (0.5, 0.0)
    assert result.spans[0].end_s == 61.0
    assert result.held_worker_s == 50.5


def test_a_trainer_that_does_not_yield_in_time_is_killed_and_loses_what_was_not_saved():
    spot = SimulatedSpotTrainer(changed(yield_s=9.0), CoordinatorConfig(yield_timeout_s=3.0))
    result = rollout(spot, [10.0, 60.0])
    assert result.release_delay_s == 3.0
    assert (result.trained.updates, result.trained.updates_lost) == (20, 2)
    assert result.drafter.updates == 20
    assert result.spans[-1].kind == "checkpoint"
    assert max(s.end_s for s in result.spans) == 63.0


def test_yielding_exactly_at_the_bound_is_in_time():
    result = rollout(SimulatedSpotTrainer(changed(yield_s=3.0), CoordinatorConfig(yield_timeout_s=3.0)), [10.0, 60.0])
    assert (result.release_delay_s, result.trained.updates_lost) == (3.0, 0)


def test_a_member_that_gets_work_waits_for_its_trainer_and_the_group_goes_on_without_it():
    spot = started(SimulatedSpotTrainer(changed(checkpoint_every=None, yield_s=0.25)))
    spot.worker_idle(1, 20.0)
    assert spot.worker_busy(1, 30.0) == 0.25
    spot.worker_idle(2, 50.0)
    spot.worker_idle(1, 60.0)
    spot.rollout_ended(60.0)
    result = spot.result
    # 2.5 updates by 20 s, 9 by 30 s with two, then a pause of 1 s and 9.5 more; two again from 51 s on.
    assert result.trained.updates == 30
    assert result.num_periods == 1
    assert result.interference_s == (0.25, 0.25, 0.25)
    assert [(s.lane, s.start_s, s.end_s) for s in result.spans if s.lane == "worker 1"] == [("worker 1", 20.0, 30.25)]


def test_a_leader_that_gets_work_ends_the_period_and_the_others_open_the_next():
    spot = started(SimulatedSpotTrainer(changed(checkpoint_every=None)))
    spot.worker_idle(1, 20.0)
    assert spot.worker_busy(0, 30.0) == 0.0
    spot.worker_idle(2, 50.0)
    spot.worker_idle(0, 60.0)
    spot.rollout_ended(60.0)
    result = spot.result
    # The first period: 2.5 + 9 updates; the second: 7.5 alone from 35 s, then 9 with worker 2 from 51 s.
    assert (result.num_periods, result.trained.updates, result.trained.checkpoints) == (2, 11 + 16, 2)
    assert {s.detail for s in result.spans if s.lane == "worker 1"} == {"term 1", "term 2"}


def test_a_member_that_dies_takes_the_unsaved_updates_with_it():
    spot = started(SimulatedSpotTrainer(SIMPLE))
    spot.worker_idle(1, 12.0)
    spot.worker_gone(1, 30.0)
    spot.worker_idle(2, 60.0)
    spot.rollout_ended(60.0)
    result = spot.result
    # Fourteen by 30 s with two workers and one checkpoint; afterwards worker 0 alone: 12.
    assert result.num_periods == 2
    assert (result.trained.updates, result.trained.updates_lost) == (10 + 12, 4)
    assert result.interference_s == (0.0, 0.0, 0.0)


def test_the_same_rollout_gives_the_same_result():
    ends_s = np.random.default_rng(0).lognormal(3, 1, 16).tolist()
    first, second = (rollout(SimulatedSpotTrainer(SpotTraining(start_s=0.5)), ends_s) for _ in range(2))
    assert first == second
    assert first.trained.updates > 0


EIGHTHS = st.integers(0, 400).map(lambda n: n / 8)


def ticking(model, config, ends_s):
    """The slow oracle: sixteenths of a second one after the other, exact; returns updates and seconds held."""
    end_s = max(ends_s)
    updates = since = 0
    share = pause = Fraction(0)
    idle, members, held = [], set(), Fraction(0)
    tick = Fraction(1, 16)
    for now in (k * tick for k in range(int(end_s * 16))):
        room = config.max_members or len(ends_s)
        for worker in (w for w, at in enumerate(ends_s) if at == now):
            idle.append(worker)
            if not members and len(idle) >= config.min_idle_workers:
                members, pause = set(sorted(idle)[:room]), Fraction(model.start_s)
            elif members and config.late_join and len(members) < room:
                members.add(next(w for w in sorted(idle) if w not in members))
                pause = max(pause, Fraction(model.join_s))
        held += tick * len(members)
        has_data = any(0 < at <= now for at in ends_s)
        if pause > 0:
            pause -= tick
        elif members and since == model.checkpoint_every:
            share += tick / Fraction(model.checkpoint_s)
            if share == 1:
                since, share = 0, Fraction(0)
        elif members and (has_data or share > 0):
            share += tick / Fraction(model.update_s(len(members)))
            assert share <= 1, "a tick that is too coarse to see an update end"
            if share == 1:
                updates, since, share = updates + 1, since + 1, Fraction(0)
    return updates, held


@settings(max_examples=100, deadline=None)
@given(
    ends_s=st.lists(EIGHTHS, min_size=2, max_size=4),
    min_idle=st.integers(1, 2),
    max_members=st.sampled_from([None, 1, 2, 4]),
    late_join=st.booleans(),
    start_s=st.sampled_from([0.0, 0.125, 5.0]),
    every=st.sampled_from([None, 1, 4]),
)
def test_updates_are_those_of_a_clock_that_ticks(ends_s, min_idle, max_members, late_join, start_s, every):
    # A third of 2 s, which is what three members at full efficiency need for an update, is hit by no tick.
    efficiency = 1 if max_members in (1, 2) else 0
    model = changed(start_s=start_s, checkpoint_every=every, scaling_efficiency=efficiency)
    config = CoordinatorConfig(min_idle_workers=min_idle, max_members=max_members, late_join=late_join)
    result = rollout(SimulatedSpotTrainer(model, config), ends_s)
    assert (result.trained.updates, result.held_worker_s) == ticking(model, config, ends_s)


@settings(max_examples=60, deadline=None)
@given(
    ends_s=st.lists(st.floats(0.01, 500), min_size=1, max_size=12),
    yield_s=st.sampled_from([0.0, 0.3]),
    on_stop=st.sampled_from(["abandon", "finish"]),
)
def test_time_is_neither_made_nor_lost(ends_s, yield_s, on_stop):
    model = SpotTraining(start_s=2.0, yield_s=yield_s, on_stop=on_stop, checkpoint_every=20)
    result = rollout(SimulatedSpotTrainer(model), ends_s)
    assert result.idle_worker_s == pytest.approx(sum(max(ends_s) - at for at in ends_s))
    assert result.trained_worker_s <= result.held_worker_s + 1e-6
    assert result.held_worker_s <= result.idle_worker_s + 1e-6
    assert result.trained.updates_lost == 0
    checkpoints = [s for s in result.spans if s.kind == "checkpoint"]
    assert len(checkpoints) == result.trained.checkpoints
    assert 0 <= result.release_delay_s <= yield_s + model.update_s(1) + 1e-9
    for lane in {s.lane for s in result.spans}:
        own = [s for s in result.spans if s.lane == lane]
        assert all(s.end_s > s.start_s for s in own)
        assert all(after.start_s >= before.end_s - 1e-9 for before, after in pairwise(own))


def test_the_engine_trains_on_its_idle_workers_and_the_rollout_does_not_change():
    tokens = np.random.default_rng(0).lognormal(5, 1, 64).astype(int) + 1
    key = pd.DataFrame({"rl_step": np.arange(64) // 32, "prompt_id": np.arange(64).astype(str), "sample": 0, "turn": 0})
    work = key.assign(epoch=0, prompt_tokens=20, max_response_tokens=5000, policy_version=0)
    tables = {"workload": work, "outcomes": key.assign(response_tokens=tokens, finish_reason="stop")}
    trace = Trace.from_tables(Manifest(kind="synthetic", num_workers=4), tables)
    scenario = Scenario.of(trace, costs="cpu-small")

    def run(**idle_use):
        engine = RolloutSimulator(
            costs=scenario.costs,
            selectors=[NoSpeculation() for _ in range(4)],
            **idle_use,
        ).prepare(Regimes((NO_SPECULATION,), scenario.costs, None), FluidBatch)
        return [engine.rollout(step, queues) for step, queues in zip(scenario.steps, scenario.queues, strict=True)]

    spot = SimulatedSpotTrainer(changed(start_s=0.1, join_s=0.1, padded_samples_per_s=100))
    alone, beside = run(), run(idle_use=spot)
    assert [r.finish_s.tolist() for r in alone] == [r.finish_s.tolist() for r in beside]
    last = beside[-1]
    assert spot.result.idle_worker_s == pytest.approx(sum(last.makespan_s - end_s for end_s in last.worker_end_s))
    assert spot.drafter.updates > spot.result.trained.updates > 0
