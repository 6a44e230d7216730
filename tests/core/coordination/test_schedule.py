"""When drafters are trained, played with drafters that drift slowly, fast or not at all; and what the record says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.coordination.schedule import Decision, ScheduleConfig, TrainingSchedule
from tltlab.state import DrafterState

TRAINED = DrafterState(updates=1)


class Drafter:
    """One whose accepted length falls by the share `drift` per RL step and comes back to `best` by training.

    A rollout's mean is that of `drafts` geometric lengths, times a lognormal factor for its prompts.
    """

    def __init__(self, drift, *, best=3.0, drafts=3000, prompts=0.0, seed=0):
        self.drift, self.best, self.drafts, self.prompts = drift, best, drafts, prompts
        self.rng = np.random.default_rng(seed)
        self.age = 0

    def rollout(self):
        self.age += 1
        mean = max(self.best * (1 - self.drift) ** self.age * math.exp(self.rng.normal(0, self.prompts)), 1.01)
        return float(self.rng.geometric(1 / mean, self.drafts).mean())


def play(schedule, drafter, rl_steps, first=0):
    """The RL steps in which the drafter was trained."""
    trained = []
    for rl_step in range(first, first + rl_steps):
        train = schedule.decide(rl_step, TRAINED).train
        schedule.rollout_done(rl_step, drafter.rollout(), drafts=drafter.drafts)
        if train:
            trained.append(rl_step)
            schedule.trained(rl_step, updates=100)
            drafter.age = 0
    return trained


def dropping(drop=0.03):
    return TrainingSchedule(ScheduleConfig(kind="acceptance-drops", drop=drop), pretrained=True)


def test_by_default_training_waits_for_acceptance_to_drop():
    schedule = TrainingSchedule(ScheduleConfig(kind="acceptance-drops"))
    assert schedule.decide(0, DrafterState()) == Decision(train=True, reason="the drafter was never trained")
    schedule.rollout_done(0, None, drafts=0)
    schedule.trained(0, updates=50)
    assert schedule.decide(1, TRAINED).train, "what the first training brought is not known yet"
    schedule.rollout_done(1, 3.0, drafts=5000)
    assert schedule.decide(2, TRAINED).reason == "the accepted length is 3.00, at best 3.00"
    schedule.rollout_done(2, 2.5, drafts=5000)
    assert schedule.decide(3, TRAINED) == Decision(
        train=True, reason="the accepted length fell from 3.00 to 2.50 (RL step 2)"
    )
    schedule.trained(3, updates=50)
    assert schedule.decide(4, TRAINED).reason == "nothing was drafted since the last training"


@pytest.mark.parametrize(
    ("rollouts", "trains"),
    [
        pytest.param([(3.0, 5000), (1.5, 3)], False, id="few drafts prove no drop"),
        pytest.param([(3.0, 5000), (6.0, 3), (3.0, 5000)], False, id="and set no record"),
        pytest.param([(3.0, 5000), (2.5, 20)], False, id="nor do they"),
        pytest.param([(3.0, 5000), *[(2.5, 20)] * 29], True, id="many rollouts of few prove one together"),
        pytest.param([(3.0, 4000), (1.2, 4000)], True, id="a drop"),
    ],
)
def test_a_drop_must_be_proved(rollouts, trains):
    schedule = dropping()
    for rl_step, (length, drafts) in enumerate(rollouts):
        schedule.rollout_done(rl_step, length, drafts=drafts)
    assert schedule.decide(len(rollouts), TRAINED).train == trains


def test_drafters_that_do_not_drift_are_seldom_trained():
    """In 100 RL steps, over runs without and with a noise of 4 % between rollouts."""
    trainings = [
        len(play(dropping(), Drafter(0.0, prompts=prompts, seed=seed), 100))
        for prompts in (0.0, 0.04)
        for seed in range(4)
    ]
    assert np.mean(trainings) <= 3.0


@pytest.mark.parametrize(("drift", "fewest", "most"), [(0.005, 5, 40), (0.03, 30, 75)])
def test_faster_drafter_drifts_oftener_it_is_trained(drift, fewest, most):
    trainings = [len(play(dropping(), Drafter(drift, seed=seed), 150)) for seed in range(5)]
    assert fewest <= min(trainings)
    assert max(trainings) <= most


def test_it_keeps_a_drifting_drafter_near_its_best():
    schedule = dropping()
    play(schedule, Drafter(0.02), 100)
    kept = [row.accept_length for row in schedule.record[20:] if row.accept_length]
    assert np.mean(kept) > 0.93 * 3.0 > 2 * 3.0 * 0.98**100


def test_training_continues_while_it_still_raises_acceptance():
    schedule = TrainingSchedule(ScheduleConfig(kind="acceptance-drops"))
    reasons = []
    for rl_step, length in enumerate((1.0, 1.8, 2.6, 2.62, 2.61, 2.62)):
        decision = schedule.decide(rl_step, DrafterState(updates=rl_step))
        schedule.rollout_done(rl_step, length, drafts=5000)
        if decision.train:
            schedule.trained(rl_step, updates=10)
        reasons.append(decision.reason)
    assert schedule.trainings == [0, 1, 2, 3]
    assert reasons[2].endswith("raised the accepted length from 1.00 to 1.80")
    assert reasons[4] == "nothing was drafted since the last training"


def test_a_distrusted_drafter_is_trained_unless_never():
    for kind, trains in (("never", False), ("always", True), ("every", True), ("acceptance-drops", True)):
        schedule = TrainingSchedule(ScheduleConfig(kind=kind), pretrained=True)  # type: ignore[arg-type]
        assert schedule.decide(0, TRAINED, trusted=False).train is trains, kind


def test_rl_steps_count_from_the_last_training():
    schedule = TrainingSchedule(ScheduleConfig(kind="every", every=3), pretrained=True)
    assert play(schedule, Drafter(0.0), 10) == [3, 6, 9]
    schedule = TrainingSchedule(ScheduleConfig(kind="every", every=3), pretrained=True)
    assert [schedule.decide(step, TRAINED).train for step in range(6)] == [False, False, False, True, True, True]
    schedule.trained(5, updates=0)
    assert schedule.decide(6, TRAINED).train, "no idle time, no training: it is still due"
    schedule.trained(6, updates=1)
    assert not schedule.decide(7, TRAINED).train


def test_the_order_within_an_rl_step_is_free():
    def told(trained_first):
        schedule = TrainingSchedule(ScheduleConfig(kind="acceptance-drops"))
        for rl_step, length in enumerate((2.0, 3.0, 2.9, 2.7)):
            if trained_first and rl_step == 1:
                schedule.trained(1, updates=5)
            schedule.rollout_done(rl_step, length, drafts=4000)
            if not trained_first and rl_step == 1:
                schedule.trained(1, updates=5)
        return schedule

    first, last = told(True), told(False)
    assert first.state_dict() == last.state_dict()
    assert [row.training for row in first.record] == [0, 0, 1, 1]
    assert first.decide(4, TRAINED) == last.decide(4, TRAINED)


def test_a_rollout_done_again_replaces_the_first():
    schedule = dropping()
    schedule.rollout_done(0, 3.0, drafts=4000)
    schedule.rollout_done(1, 1.2, drafts=4000)
    schedule.rollout_done(1, 3.0, drafts=4000)
    assert not schedule.decide(2, TRAINED).train
    assert len(schedule.record) == 2


@given(
    st.lists(st.tuples(st.floats(1, 9), st.integers(0, 5000), st.booleans()), max_size=30),
    st.integers(0, 30),
    st.sampled_from(["never", "always", "every", "acceptance-drops"]),
)
def test_a_schedule_continues_from_its_state(rollouts, split, kind):
    config = ScheduleConfig(kind=kind, every=3)  # type: ignore[arg-type]

    def follow(schedule, steps):
        decisions = []
        for rl_step in steps:
            length, drafts, may_train = rollouts[rl_step]
            decisions.append(schedule.decide(rl_step, DrafterState(updates=len(schedule.trainings))))
            schedule.rollout_done(rl_step, length, drafts=drafts)
            if may_train and decisions[-1].train:
                schedule.trained(rl_step, updates=drafts)
        return decisions

    split = min(split, len(rollouts))
    whole, first, second = (TrainingSchedule(config) for _ in range(3))
    expected = follow(whole, range(len(rollouts)))
    before = follow(first, range(split))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + follow(second, range(split, len(rollouts))) == expected
    assert second.state_dict() == whole.state_dict()
