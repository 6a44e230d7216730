"""The gate before a drafter's service and training: what is judged, what it costs, and when it pays."""

import json
import math
from dataclasses import replace

import pytest

from tltlab.coordination.schedule import (
    CONTROL_EVERY,
    Attempt,
    RolloutDrift,
    ScheduleConfig,
    TrainingSchedule,
    above_end,
    loss_and_gain,
    paid,
    tokens_per_draft,
    training_cost,
    worth_training,
)
from tltlab.state import DrafterState


def rollouts(num, trained, *, slowdown=0.0, lengths=3.0):
    """Rollouts of 1,000 tokens that take 10 s, longer by `slowdown` where workers trained."""
    return [
        RolloutDrift(rl_step=t, rollout_s=10.0 * (1.0 + slowdown * (t in trained)), tokens=1000, accept_length=lengths)
        for t in range(num)
    ]


def attempts(*steps, candidate=3.0, served=3.0, delay_s=0.0):
    return [Attempt(rl_step=t, delay_s=delay_s, candidate=candidate, served=served) for t in steps]


def test_only_a_better_drafter_goes_into_service():
    assert tokens_per_draft([0.5, 0.5, 0.5]) == 1.875
    assert tokens_per_draft([]) == 1.0
    assert Attempt(rl_step=0, candidate=2.01, served=2.0).better
    assert not Attempt(rl_step=0, candidate=2.0, served=2.0).better
    assert not Attempt(rl_step=0).better, "what nobody judged does not serve"
    gated, always = (TrainingSchedule(ScheduleConfig(kind=kind), pretrained=True) for kind in ("gated", "always"))  # type: ignore[arg-type]
    worse = Attempt(rl_step=0, candidate=1.5, served=2.0)
    assert (gated.serves(worse), always.serves(worse)) == (False, True)
    assert TrainingSchedule(ScheduleConfig(kind="gated")).serves(worse), "what was never trained gives way"


def test_a_slowdown_needs_rollouts_with_and_without_training():
    trained = set(range(0, 20, 2))
    cost = training_cost(rollouts(20, trained, slowdown=0.3), attempts(*sorted(trained)))
    assert cost.slowdown == pytest.approx(0.3, abs=0.02)
    assert cost.seconds == pytest.approx(cost.slowdown * cost.rollout_s)
    same = training_cost(rollouts(20, trained), attempts(*sorted(trained)))
    assert same.seconds == pytest.approx(0.0, abs=1e-6)
    only_trained = training_cost(rollouts(20, set(range(20)), slowdown=0.3), attempts(*range(20)))
    assert only_trained.slowdown == pytest.approx(0.0, abs=1e-6), "without a control nothing is known"


def test_wait_for_trainers_is_delay_and_no_slowdown():
    rows = [RolloutDrift(rl_step=t, rollout_s=10.0 + 2.0 * (t % 2), tokens=1000, accept_length=3.0) for t in range(20)]
    cost = training_cost(rows, attempts(*range(1, 20, 2), delay_s=2.0))
    assert cost.delay_s == 2.0
    assert cost.slowdown == pytest.approx(0.0, abs=1e-6)


def test_what_drifts_is_loss_what_stays_is_gain():
    drifting = [Attempt(rl_step=t, candidate=3.0, served=3.0 * math.exp(-0.05)) for t in range(30)]
    loss, gain = loss_and_gain(drifting, 0)
    assert loss == pytest.approx(0.05, abs=0.006)
    assert gain == pytest.approx(0.0, abs=0.006)
    learning = [Attempt(rl_step=t, candidate=2.0 * 1.05 ** (t + 1), served=2.0 * 1.05**t) for t in range(30)]
    loss, gain = loss_and_gain(learning, 0)
    assert loss == 0.0
    assert gain == pytest.approx(math.log(1.05), abs=0.006)
    assert loss_and_gain(attempts(*range(30)), 0) == (0.0, 0.0)
    assert loss_and_gain([Attempt(rl_step=3)], 0) == (0.0, 0.0)


def test_training_waits_until_losses_reach_its_price():
    """A loss of 2 % a step in 7 s of speculation, at a price of 2 s: the lot size is the root of 2 * 2 / 0.14."""
    before = [Attempt(rl_step=t, delay_s=2.0, candidate=3.0, served=3.0 * math.exp(-0.12)) for t in range(0, 60, 6)]
    aged = [math.exp(-0.02 * ((t - 1) % 6 + 1 if t <= 54 else t - 54)) for t in range(80)]
    rows = [
        RolloutDrift(rl_step=t, rollout_s=10.0 / kept**0.7, tokens=1000, accept_length=3.0 * kept)
        for t, kept in enumerate(aged)
    ]
    trains = [worth_training(54 + age, rows[: 54 + age], before, 0.0)[0] for age in range(1, 12)]
    loss, _ = loss_and_gain(before, 0)
    cost = training_cost(rows[:55], before)
    lot = math.sqrt(2 * cost.seconds / (loss * cost.elasticity * cost.rollout_s))
    # What comes of the next rollout is not known yet, so it may be a step late.
    assert math.floor(lot) <= 1 + trains.index(True) <= math.ceil(lot) + 1
    assert all(trains[trains.index(True) :])


def test_training_that_brings_nothing_pauses():
    schedule = TrainingSchedule(ScheduleConfig(kind="gated"), pretrained=True)
    trained = []
    for t in range(300):
        if schedule.decide(t, DrafterState(updates=1)).train:
            trained.append(t)
            schedule.attempted(Attempt(rl_step=t, delay_s=1.0, candidate=3.0, served=3.0))
        schedule.rollout_done(t, 3.0, drafts=3000, rollout_s=10.0, tokens=1000)
    assert trained[0] == 0
    assert 2 <= len(trained) <= 10, "9 of 3000 s at 1 s each, but for the first"
    again = TrainingSchedule(ScheduleConfig(kind="gated"), pretrained=True)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert again.decide(300, DrafterState(updates=1)) == schedule.decide(300, DrafterState(updates=1))


def test_after_many_trained_rollouts_one_goes_without():
    n = CONTROL_EVERY
    rows, before = rollouts(n, set(range(n))), attempts(*range(n), candidate=3.3)
    assert worth_training(n, rows, before, 0.0) == (False, "a rollout without training, to see what training takes")
    assert worth_training(n + 1, [*rows, *rollouts(n + 1, set())[n:]], before, 0.0)[0]


def test_quickly_lost_gains_do_not_pay():
    before = [Attempt(rl_step=t, delay_s=2.0, candidate=3.0, served=2.7) for t in range(0, 60, 6)]
    lost = rollouts(60, set(), lengths=2.7)
    lasts = [replace(row, accept_length=2.7 if row.rl_step % 6 == 0 else 3.0) for row in lost]
    assert not paid(lost, before, training_cost(lost, before))
    assert paid(lasts, before, training_cost(lasts, before))
    assert worth_training(60, lost, before, 0.1) == (
        False, "a training takes 2 s, and what the last ones brought was lost again too soon",
    )  # fmt: skip
    jumped = [*lost[:58], *(replace(row, accept_length=1.5, rollout_s=15.0) for row in lost[58:])]
    assert worth_training(60, jumped, before, 0.5)[0], "but the policy has jumped"
    often = attempts(*range(0, 20, 2), candidate=3.0, served=2.7, delay_s=2.0)
    assert paid(lost, often, training_cost(lost, often)), "there is too little between them to tell"


def test_what_surely_fell_is_trained_at_once():
    before = attempts(0, delay_s=1.0)
    rows = rollouts(10, set())
    assert not worth_training(10, rows, before, 0.0)[0]
    fell = [*rows[:8], *(replace(row, accept_length=2.4, rollout_s=11.7) for row in rows[8:])]
    assert worth_training(10, fell, before, 0.2)[0]


def test_a_loss_is_worth_what_it_lasts():
    """A period in which lengths fall in one step is worth that step, however long they stay down afterwards."""
    before = attempts(0, delay_s=3.0)
    lengths = [3.0, 3.0, *([2.0] * 20)]
    rows = [replace(row, accept_length=length) for row, length in zip(rollouts(22, set()), lengths, strict=True)]
    assert above_end(rows, before) == pytest.approx(math.log(1.5))
    assert above_end(rows[:4], before) == math.inf, "too few to tell"
    assert not worth_training(22, rows, before, 1 / 3)[0]
