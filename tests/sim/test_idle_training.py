"""Spot training next to a rollout: checked against a clock that ticks."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.progress import SpotTraining
from tltlab.report.timeline import LOOKS
from tltlab.sim.idle_training import SimulatedSpotTrainer

SIMPLE = SpotTraining(
    samples_per_s=4, samples_per_update=8, sample_tokens=100, scaling_efficiency=1,
    start_s=5, join_s=1, checkpoint_every=10, checkpoint_s=0.5, carried_share=0,
)  # fmt: skip
"""An update of one worker takes 2 s, a cycle of ten with its checkpoint 20.5 s."""


def changed(**fields):
    return SpotTraining(**(SIMPLE.model_dump() | fields))


def rollout(spot, ends_s):
    """One rollout of workers that have nothing left at the given times."""
    spot.rollout_started(len(ends_s), 0.0)
    for worker in sorted(range(len(ends_s)), key=lambda w: ends_s[w]):
        spot.worker_idle(worker, ends_s[worker])
    spot.rollout_ended(max(ends_s))
    return spot.result


def held_s(result, end_s):
    """Worker-seconds in a training group up to the rollout's end."""
    return sum(min(s.end_s, end_s) - s.start_s for s in result.spans if s.kind == "spot_train")


def test_training_and_its_last_checkpoint_have_own_lanes():
    result = rollout(SimulatedSpotTrainer(SIMPLE), [10.0, 20.0, 60.0])
    spans = [(s.lane, s.kind, s.start_s, s.end_s) for s in result.spans]
    assert spans == [
        ("worker 0", "spot_train", 10.0, 60.0),
        ("worker 1", "spot_train", 20.0, 60.0),
        ("drafter", "checkpoint", 60.0, 60.5),
    ]
    # Two by 20 s with 0.44 of the third; from 21 s on one takes 1.05 s.
    assert result.trained.updates == math.floor(5 / 2.05 + 39 / 1.05)
    assert result.trained.checkpoints == 4
    assert {s.kind for s in result.spans} <= set(LOOKS)


def test_without_idle_time_the_drafter_ages():
    spot = SimulatedSpotTrainer(SIMPLE)
    assert rollout(spot, [10.0, 60.0]).drafter.age == 0
    done = spot.drafter.updates
    result = rollout(spot, [60.0, 60.0])
    assert (result.trained.updates, result.idle_worker_s, result.spans) == (0, 0.0, ())
    assert (result.drafter.age, result.drafter.updates) == (1, done)
    assert rollout(spot, [10.0, 60.0]).drafter.updates == 2 * done
    # Responses of the rollout before are data from the start, of which half are carried here.
    carried = SimulatedSpotTrainer(changed(checkpoint_every=None, carried_share=0.5))
    rollout(carried, [10.0, 60.0])
    assert rollout(carried, [0.0, 40.0]).trained.updates == 17


@pytest.mark.parametrize(
    ("fields", "ends_s", "delay_s", "updates", "lost", "end_s"),
    [
        pytest.param({"yield_s": 9.0}, [10.0, 60.0], 3.0, 20, 1, 63.0, id="killed, what was not saved is lost"),
        pytest.param({"yield_s": 3.0}, [10.0, 60.0], 3.0, 21, 0, 63.0, id="in time exactly at the bound"),
    ],
)
def test_the_rl_step_waits_until_trainers_have_yielded(fields, ends_s, delay_s, updates, lost, end_s):
    result = rollout(SimulatedSpotTrainer(changed(**fields), CoordinatorConfig(yield_timeout_s=3.0)), ends_s)
    assert result.release_delay_s == delay_s
    assert (result.trained.updates, result.trained.updates_lost, result.drafter.updates) == (updates, lost, updates)
    assert ("checkpoint" in {s.kind for s in result.spans}) == (not lost)
    assert max(s.end_s for s in result.spans if s.kind == "spot_train") == end_s


EIGHTHS = st.integers(0, 400).map(lambda n: n / 8)


def ticking(model, config, ends_s):
    """The slow oracle: sixteenths of a second one by one, exact; returns updates and seconds held."""
    end_s = max(ends_s)
    updates = 0
    share = pause = Fraction(0)
    bears = Fraction(model.checkpoint_s) / model.checkpoint_every if model.checkpoint_every else Fraction(0)
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
        elif members and has_data:
            share += tick / (Fraction(model.update_s(len(members))) + bears)
            if share >= 1:
                updates, share = updates + 1, share - 1
    return updates, held


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
    assert (result.trained.updates, held_s(result, max(ends_s))) == ticking(model, config, ends_s)


@given(
    ends_s=st.lists(st.floats(0.01, 500), min_size=1, max_size=12),
    yield_s=st.sampled_from([0.0, 0.3]),
)
def test_time_is_neither_made_nor_lost(ends_s, yield_s):
    model = SpotTraining(start_s=2.0, yield_s=yield_s, checkpoint_every=20)
    result = rollout(SimulatedSpotTrainer(model), ends_s)
    assert result.idle_worker_s == pytest.approx(sum(max(ends_s) - at for at in ends_s))
    assert result.trained_worker_s <= held_s(result, max(ends_s)) + 1e-6
    assert held_s(result, max(ends_s)) <= result.idle_worker_s + 1e-6
    assert result.trained.updates_lost == 0
    checkpoints = [s for s in result.spans if s.kind == "checkpoint"]
    assert len(checkpoints) == (result.trained.checkpoints > 0)
    assert 0 <= result.release_delay_s <= yield_s + 1e-9
    for lane in {s.lane for s in result.spans}:
        own = [s for s in result.spans if s.lane == lane]
        assert all(s.end_s > s.start_s for s in own)
        assert all(after.start_s >= before.end_s - 1e-9 for before, after in pairwise(own))
