"""The worker coordinator: who trains when, and that hanging, dying and late trainers cannot confuse it."""

import math
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tltlab.coordination.machine import (
    CoordinatorConfig,
    CoordinatorState,
    Kill,
    Phase,
    Released,
    RolloutEnded,
    RolloutStarted,
    StopTraining,
    Tick,
    Train,
    TrainerFreed,
    TrainerGone,
    TrainerReady,
    WorkerIdle,
    advance,
    wakeup_s,
)


class Coordinator:
    """The machine with its state kept, for tests that tell a story: all trainers are ready, and RL step 0 generates."""

    def __init__(self, workers=4, **config):
        self.state = CoordinatorState(config=CoordinatorConfig(**config))
        for worker in range(workers):
            self.tell(TrainerReady(worker=worker))
        self.tell(RolloutStarted(rl_step=0))

    def tell(self, event, now=0.0):
        self.state, commands = advance(self.state, event, now)
        return list(commands)

    def idle(self, *workers):
        return [command for worker in workers for command in self.tell(WorkerIdle(worker=worker))]


def said(commands):
    """The commands in their order, each kind with its workers."""
    kinds = {StopTraining: "stop", Train: "train", Kill: "kill", Released: "released"}
    groups = groupby(commands, key=lambda command: kinds[type(command)])
    return ", ".join(" ".join([kind, *(str(c.worker) for c in those if kind != "released")]) for kind, those in groups)


def idle(*workers):
    return lambda coordinator: coordinator.idle(*workers)


def tell(event, now=0.0):
    return lambda coordinator: coordinator.tell(event, now)


def freed(worker):
    return tell(TrainerFreed(worker=worker))


END, NEXT, TICK, GONE = RolloutEnded(rl_step=0), RolloutStarted(rl_step=1), Tick(), TrainerGone(worker=1)
STOPPED = [idle(0), (tell(END, 10.0), "stop 0")]
ENDED = [idle(0), (freed(0), "")]
PAIR = {"min_idle_workers": 2}

STORIES = {
    "two idle workers open training": (PAIR, [(idle(3), ""), (idle(1), "train 1 3")]),
    "the group learns of a new member": ({}, [(idle(2), "train 2"), (idle(0), "train 2 0")]),
    "late joining can be switched off": ({"late_join": False}, [idle(2), (idle(0), "")]),
    "a largest size": ({"max_members": 2, "min_idle_workers": 3}, [(idle(0, 1, 2), "train 0 1")]),
    "released again when asked again": ({}, [(tell(END), "released"), (tell(END), "released")]),
    "all are done": (PAIR, [idle(0, 1), (tell(END), "stop 0 1"), (freed(0), ""), (freed(1), "released")]),
    "an end that is not announced": ({"workers": 3}, [idle(0, 1), (idle(2), "stop 0 1")]),
    "nor does training open then": ({"workers": 2, "min_idle_workers": 2}, [(idle(0, 1), "")]),
    "freed twice": ({}, [*STOPPED, (freed(0), "released"), (freed(0), "")]),
    "idle twice": ({}, [(idle(0), "train 0"), (idle(0), "")]),
    "ready twice, which frees no device": ({}, [idle(0), tell(TrainerReady(worker=0)), (tell(END), "stop 0")]),
    "it does not yield": ({}, [*STOPPED, (tell(TICK, 14.9), ""), (tell(TICK, 15.0), "kill 0, released")]),
    "it yields too late": ({}, [*STOPPED, tell(TICK, 15.0), (freed(0), ""), (tell(TrainerReady(worker=0)), "")]),
    "a member ends by itself": ({}, [idle(1, 0, 2), (freed(0), "train 1 2")]),
    "the leader ends by itself": ({}, [idle(0, 1), (freed(0), "stop 1"), (freed(1), "train 1")]),
    "one dies": ({}, [idle(0, 1), (tell(GONE), "stop 0"), (tell(GONE), ""), (freed(0), "train 0")]),
    "its next process joins": ({}, [idle(0, 1), tell(GONE), freed(0), (tell(TrainerReady(worker=1)), "train 0 1")]),
    "a busy one's trainer dies": ({}, [(tell(GONE), ""), (idle(1), ""), (tell(TrainerReady(worker=1)), "train 1")]),
    "a trainer that ended is not asked again": ({}, [*ENDED, (idle(0), "")]),
    "but in the next rollout": ({}, [*ENDED, tell(END), tell(NEXT), (idle(0), "train 0")]),
    "an older start": ({}, [tell(END), (tell(RolloutStarted(rl_step=0)), ""), (idle(0), "")]),
    "an older end": ({}, [tell(END), tell(NEXT), (tell(END), ""), (idle(0), "train 0")]),
    "the next rollout takes devices back": ({}, [idle(0, 1), (tell(NEXT), "stop 0 1")]),
}  # fmt: skip


@pytest.mark.parametrize(("config", "story"), STORIES.values(), ids=STORIES)
def test_each_event_brings_its_commands(config, story):
    coordinator = Coordinator(**config)
    for step in story:
        act, expected = step if isinstance(step, tuple) else (step, None)
        commands = said(act(coordinator))
        assert expected in (None, commands)


def test_orders_tell_group_term_and_which_is_newest():
    coordinator = Coordinator(yield_timeout_s=3.0)
    (alone,) = coordinator.idle(2)
    first, second = coordinator.idle(0)
    assert alone.number < first.number == second.number
    assert (second.term, second.leader, second.members, second.rl_step) == (1, 2, (2, 0), 0)
    assert wakeup_s(coordinator.state) == math.inf
    (stop,) = coordinator.tell(TrainerGone(worker=2), now=10.0)
    assert stop.number > second.number
    assert wakeup_s(coordinator.state) == 13.0
    (again,) = coordinator.tell(TrainerFreed(worker=0), now=11.0)
    assert (again.number > stop.number, again.term, again.members) == (True, 2, (0,))
    assert wakeup_s(coordinator.state) == math.inf


class Trainer:
    """A trainer's process: its newest order, the call to train that it executes, and the term that it trains."""

    def __init__(self, worker):
        self.worker, self.alive, self.order, self.call, self.held = worker, True, None, None, None

    def hears(self, order):
        if self.order is None or order.number > self.order.number:
            self.order = order


WORKERS = st.integers(0, 4)


class Faults(RuleBasedStateMachine):
    """Five workers whose trainers hang, end by themselves and die, and calls that overtake one another."""

    @initialize(min_idle=st.integers(1, 3), max_members=st.sampled_from([None, 1, 2, 4]), late_join=st.booleans())
    def begin(self, min_idle, max_members, late_join):
        self.config = CoordinatorConfig(
            min_idle_workers=min_idle, max_members=max_members, late_join=late_join, yield_timeout_s=4.0
        )
        self.state = CoordinatorState(config=self.config)
        self.now, self.rl_step, self.ended_s, self.released = 0.0, -1, None, True
        self.calls, self.idle, self.called = [], set(), set()
        self.leaders, self.groups = {}, {}
        self.trainers = [Trainer(worker) for worker in range(5)]
        for worker in range(5):
            self.tell(TrainerReady(worker=worker))
        self.rollout_starts()

    def tell(self, event):
        before = self.state
        self.state, commands = advance(self.state, event, self.now)
        if isinstance(event, RolloutEnded):
            assert set(before.members) <= {command.worker for command in commands if isinstance(command, StopTraining)}
        for command in commands:
            match command:
                case Released():
                    assert command.rl_step == self.rl_step
                    assert not [t.worker for t in self.trainers if t.alive and t.call], "released while training"
                    self.released = True
                case Kill():
                    self.trainers[command.worker].alive = False
                case _:
                    trainer = self.trainers[command.worker]
                    if isinstance(command, Train):
                        assert self.leaders.setdefault(command.term, command.leader) == command.leader
                        group = (command.term, command.members)
                        assert self.groups.setdefault(command.number, group) == group
                    # A trainer is called once a term, and told of changes meanwhile.
                    trains = isinstance(command, Train) and (command.worker, command.term) not in self.called
                    if trains:
                        assert trainer.call is None or not trainer.alive, "asked to train while it does"
                        self.called.add((command.worker, command.term))
                        trainer.call = command.term
                    self.calls.append((trainer, command, trains))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def call_arrives(self, data):
        trainer, order, trains = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        if not trainer.alive:
            return
        trainer.hears(order)
        if trains:
            newest = trainer.order
            if isinstance(newest, Train) and newest.term == order.term:
                trainer.held = order.term
            else:
                self.leaves(trainer)

    def leaves(self, trainer):
        trainer.held = trainer.call = None
        self.tell(TrainerFreed(worker=trainer.worker))

    @precondition(lambda self: self.calls)
    @rule()
    def calls_arrive(self):
        while self.calls:
            trainer, order, trains = self.calls.pop(0)
            if trainer.alive:
                trainer.hears(order)
                if trains and isinstance(trainer.order, Train):
                    trainer.held = order.term
                elif trains:
                    self.leaves(trainer)

    @rule()
    def stopped_trainers_yield(self):
        for trainer in self.trainers:
            if trainer.alive and trainer.held and not isinstance(trainer.order, Train):
                self.leaves(trainer)

    @rule(worker=WORKERS)
    def trainer_ends_by_itself(self, worker):
        if self.trainers[worker].alive and self.trainers[worker].held:
            self.leaves(self.trainers[worker])

    @rule(worker=WORKERS, noticed=st.booleans())
    def trainer_dies(self, worker, noticed):
        self.trainers[worker].alive = False
        if noticed:
            self.tell(TrainerGone(worker=worker))

    @rule(worker=WORKERS)
    def trainer_is_replaced(self, worker):
        if not self.trainers[worker].alive:
            self.trainers[worker] = Trainer(worker)
            self.tell(TrainerGone(worker=worker))
            self.tell(TrainerReady(worker=worker))

    @precondition(lambda self: self.released)
    @rule()
    def rollout_starts(self):
        self.rl_step += 1
        self.released, self.ended_s, self.idle = False, None, set()
        self.tell(RolloutStarted(rl_step=self.rl_step))

    @rule()
    def rollout_ends(self):
        self.ended_s = self.now if self.ended_s is None else self.ended_s
        self.workers_idle(set(range(5)))
        self.tell(RolloutEnded(rl_step=self.rl_step))

    @rule(workers=st.sets(WORKERS, min_size=1, max_size=4))
    def workers_idle(self, workers):
        for worker in sorted(workers):
            self.idle.add(worker)
            self.tell(WorkerIdle(worker=worker))

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def time_passes(self, seconds):
        until = self.now + seconds
        while wakeup_s(self.state) <= until:
            self.now = max(self.now, wakeup_s(self.state))
            self.tell(Tick())
            assert wakeup_s(self.state) > self.now, "a tick must do what was due"
        self.now = until

    @rule()
    def quiet(self):
        """Everything arrives, and what the coordinator believes is what is."""
        for _ in range(6):
            self.calls_arrive()
            self.stopped_trainers_yield()
            for trainer in self.trainers:
                if not trainer.alive:
                    self.tell(TrainerGone(worker=trainer.worker))
        for trainer in self.trainers:
            known = self.state.workers[trainer.worker]
            if not trainer.alive:
                assert known.phase is Phase.GONE
                continue
            assert known.phase is (Phase.TRAINING if trainer.held else Phase.FREE)
            if trainer.held:
                assert (trainer.held, trainer.order.members) == (self.state.term, self.state.members)
        invited = [
            index
            for index, worker in self.state.workers.items()
            if worker.phase is Phase.FREE and index in self.idle and not worker.declined
        ]
        if self.ended_s is not None:
            assert self.released
        elif len(self.idle) < 5 and not self.state.members:
            assert len(invited) < self.config.min_idle_workers, "enough idle workers, and nobody trains"

    @invariant()
    def members_are_the_training_workers(self):
        training = {i for i, w in self.state.workers.items() if w.phase is Phase.TRAINING}
        members = self.state.members
        assert set(members) == training
        assert len(members) == len(training) <= (self.config.max_members or 5)
        assert self.state.rolling_out or not members

    @invariant()
    def nobody_waits_longer_than_the_bound(self):
        if self.ended_s is not None and not self.released:
            assert self.now <= self.ended_s + self.config.yield_timeout_s

    def teardown(self):
        """The next rollout trains again."""
        if not hasattr(self, "state"):
            return
        self.rollout_ends()
        self.quiet()
        for worker in range(5):
            self.trainer_is_replaced(worker)
        self.rollout_starts()
        self.workers_idle({0, 1, 2, 4})
        self.quiet()
        trains = len(self.state.members)
        assert trains == min(4, self.config.max_members or 4) or not self.config.late_join
        assert trains >= min(self.config.min_idle_workers, self.config.max_members or 4)


TestFaults = Faults.TestCase
TestFaults.settings = settings(stateful_step_count=40)
