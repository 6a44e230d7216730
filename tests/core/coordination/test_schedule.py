"""When drafters are trained, which drop of their acceptance counts, and what the record says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.coordination.schedule import Attempt, ScheduleConfig, TrainingSchedule
from tltlab.state import DrafterState

TRAINED = DrafterState(updates=1)


def gated():
    """A schedule whose last training took a second of a rollout of 10 s."""
    schedule = TrainingSchedule(ScheduleConfig(kind="gated"), pretrained=True)
    schedule.attempted(Attempt(rl_step=0, delay_s=1.0))
    return schedule


def done(schedule, rl_step, length, drafts):
    schedule.rollout_done(rl_step, length, drafts=drafts, rollout_s=30.0 / length, tokens=1000)


@pytest.mark.parametrize(
    ("rollouts", "trains"),
    [
        pytest.param([(3.0, 5000), (1.5, 3)], False, id="few drafts prove no drop"),
        pytest.param([(3.0, 5000), (6.0, 3), (3.0, 5000)], False, id="and set no record"),
        pytest.param([(3.0, 5000), (2.5, 20)], False, id="nor do they"),
        pytest.param([*[(3.0, 5000)] * 5, *[(2.5, 20)] * 29], True, id="many rollouts of few prove one together"),
        pytest.param([(3.0, 4000), (1.2, 4000)], True, id="a drop"),
    ],
)
def test_a_drop_must_be_proved(rollouts, trains):
    schedule = gated()
    for rl_step, (length, drafts) in enumerate(rollouts):
        done(schedule, rl_step, length, drafts)
    assert schedule.decide(len(rollouts), TRAINED).train == trains


def test_a_distrusted_drafter_is_trained_unless_never():
    for kind, trains in (("never", False), ("always", True), ("every", True), ("gated", True)):
        schedule = TrainingSchedule(ScheduleConfig(kind=kind), pretrained=True)  # type: ignore[arg-type]
        assert schedule.decide(0, TRAINED, trusted=False).train is trains, kind


def test_rl_steps_count_from_the_last_training():
    schedule = TrainingSchedule(ScheduleConfig(kind="every", every=3), pretrained=True)
    assert [schedule.decide(step, TRAINED).train for step in range(6)] == [False, False, False, True, True, True]
    schedule.trained(5, updates=0)
    assert schedule.decide(6, TRAINED).train, "no idle time, no training: it is still due"
    schedule.trained(6, updates=1)
    assert not schedule.decide(7, TRAINED).train


def test_a_rollout_done_again_replaces_the_first():
    schedule = gated()
    for rl_step, length in ((0, 3.0), (1, 1.2), (1, 3.0)):
        done(schedule, rl_step, length, 4000)
    assert not schedule.decide(2, TRAINED).train
    assert len(schedule.record) == 2


@given(
    st.lists(st.tuples(st.floats(1, 9), st.integers(0, 5000), st.booleans()), max_size=30),
    st.integers(0, 30),
    st.sampled_from(["never", "always", "every", "gated"]),
)
def test_a_schedule_continues_from_its_state(rollouts, split, kind):
    config = ScheduleConfig(kind=kind, every=3)  # type: ignore[arg-type]

    def follow(schedule, steps):
        decisions = []
        for rl_step in steps:
            length, drafts, may_train = rollouts[rl_step]
            decisions.append(schedule.decide(rl_step, DrafterState(updates=len(schedule.trainings))))
            done(schedule, rl_step, length, drafts)
            if may_train and decisions[-1].train:
                schedule.attempted(Attempt(rl_step=rl_step, delay_s=1.0, candidate=length))
                schedule.trained(rl_step, updates=drafts)
        return decisions

    split = min(split, len(rollouts))
    whole, first, second = (TrainingSchedule(config) for _ in range(3))
    expected = follow(whole, range(len(rollouts)))
    before = follow(first, range(split))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + follow(second, range(split, len(rollouts))) == expected
    assert second.state_dict() == whole.state_dict()
