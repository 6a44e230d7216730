"""The worker coordinator: who trains when, and that lost, doubled and late messages cannot confuse it."""

import math
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import ValidationError

from tests.refused import refused
from tltlab.coordination.agent import Hold, WorkerAgent
from tltlab.coordination.machine import CoordinatorConfig, CoordinatorState, Phase, advance, wakeup_s
from tltlab.coordination.messages import (
    Kill,
    Released,
    RolloutEnded,
    RolloutStarted,
    StopTraining,
    Tick,
    Train,
    WorkerGone,
    WorkerReport,
)


class Coordinator:
    """The machine with its state kept, for tests that tell a story; `say` numbers the reports."""

    def __init__(self, workers=4, **config):
        self.state = CoordinatorState(config=CoordinatorConfig(**config))
        self.seq = 0
        self.tell(RolloutStarted(rl_step=0))
        for worker in range(workers):
            self.send(worker, busy=True)

    def tell(self, event, now=0.0):
        self.state, self.last = advance(self.state, event, now)
        return list(self.last)

    def send(self, worker, *, busy=False, term=None, acked=None, now=0.0, rl_step=0, incarnation=0):
        self.seq += 1
        known = self.state.workers.get(worker)
        acked = (known.sent_seq if known else 0) if acked is None else acked
        report = WorkerReport(
            worker=worker, seq=self.seq, rl_step=rl_step, busy=busy, term=term, acked=acked, incarnation=incarnation
        )
        return self.tell(report, now)

    def idle(self, *workers, now=0.0):
        return [command for worker in workers for command in self.send(worker, now=now)]

    def phase(self, worker):
        return self.state.workers[worker].phase

    @property
    def members(self):
        return self.state.period.members if self.state.period else ()


def told(commands, kind):
    return [command.worker for command in commands if isinstance(command, kind)]


def said(commands):
    """The commands in their order, each kind with its workers."""
    kinds = {StopTraining: "stop", Train: "train", Kill: "kill", Released: "released"}
    groups = groupby(commands, key=lambda command: kinds[type(command)])
    return ", ".join(" ".join([kind, *(str(c.worker) for c in those if kind != "released")]) for kind, those in groups)


def test_ranks_leader_and_term_survive_member_changes():
    coordinator = Coordinator()
    coordinator.idle(2)
    assert {c.term for c in coordinator.idle(0)} == {1}
    assert coordinator.members == (2, 0)
    coordinator.send(0, busy=True, term=1)
    assert (coordinator.members, coordinator.state.period.term) == ((2,), 1)
    coordinator.tell(WorkerGone(worker=2))
    (command,) = coordinator.idle(0)
    assert (command.term, command.leader, command.members) == (2, 0, (0,))
    assert coordinator.phase(2) is Phase.GONE


def idle(*workers, **report):
    return lambda coordinator: [command for w in workers for command in coordinator.send(w, **report)]


def busy(worker, **report):
    return lambda coordinator: coordinator.send(worker, busy=True, **report)


def tell(event, now=0.0):
    return lambda coordinator: coordinator.tell(event, now)


END, NEXT, TICK = RolloutEnded(rl_step=0), RolloutStarted(rl_step=1), Tick()
OLD, NEW = (WorkerReport(worker=0, seq=seq, rl_step=0, busy=False) for seq in (0, 99))
STOPPED = [idle(0), (tell(END, 10.0), "stop 0")]
ENDED = [idle(0), idle(0, term=1), idle(0)]
PAIR, SILENT = {"min_idle_workers": 2}, {"workers": 2, "gone_after_s": 4.0}

STORIES = {
    "two idle workers open training": (PAIR, [(idle(3), ""), (idle(1), "train 1 3")]),
    "the group learns of a new member": ({}, [(idle(2), "train 2"), (idle(0), "train 2 0")]),
    "late joining can be switched off": ({"late_join": False}, [idle(2), (idle(0), "")]),
    "a largest size": ({"max_members": 2, "min_idle_workers": 3}, [(idle(0, 1, 2), "train 0 1")]),
    "released again when asked again": ({}, [(tell(END), "released"), (tell(END), "released")]),
    "all are done": (PAIR, [idle(0, 1), (tell(END), "stop 0 1"), (idle(0), ""), (idle(1), "released")]),
    "an end that is not announced": ({"workers": 3}, [idle(0, 1), (idle(2), "stop 0 1")]),
    "nor does training open then": ({"workers": 2, "min_idle_workers": 2}, [(idle(0, 1), "")]),
    "a stop heard is no free device": ({}, [*STOPPED, (idle(0, term=1), ""), (idle(0), "released")]),
    "a free device, a stop not heard": ({}, [*STOPPED, (idle(0, acked=0), ""), (idle(0), "released")]),
    "it does not yield": ({}, [*STOPPED, (tell(TICK, 14.9), "stop 0"), (tell(TICK, 15.0), "kill 0, released")]),
    "one turns up late": ({}, [*STOPPED, idle(7, term=1, now=12.0), (tell(TICK, 15.0), "kill 0 7, released")]),
    "a member gets work": ({}, [idle(1, 0, 2), (busy(0, term=1), "train 1 2, stop 0")]),
    "the leader gets work": ({}, [idle(0, 1), (busy(0, term=1), "stop 1 0"), (idle(1), ""), (busy(0), "train 1")]),
    "one dies": ({}, [idle(0, 1), (tell(WorkerGone(worker=1)), "stop 0"), (idle(0), "train 0")]),
    "a trainer that ended is not asked again": ({}, [idle(0), idle(0, term=1), (idle(0), "")]),
    "but in the next rollout": ({}, [*ENDED, tell(END), tell(NEXT), (idle(0, rl_step=1), "train 0")]),
    "doubled and older reports": ({}, [(tell(OLD), ""), (tell(NEW), "train 0"), (tell(NEW), "")]),
    "a report from the last rollout": ({}, [tell(END), tell(NEXT), (idle(0), "")]),
    "an older start": ({}, [tell(END), (tell(RolloutStarted(rl_step=0)), "")]),
    "an older end": ({}, [tell(END), tell(NEXT), (tell(END), ""), (idle(0, rl_step=1), "train 0")]),
    "the next rollout takes devices back": ({}, [idle(0, 1), (tell(NEXT), "stop 0 1")]),
    "training of an older term": ({}, [(idle(2, term=-5), "stop 2")]),
    "a silent member is killed": (SILENT, [idle(0), busy(1, now=3.0), (tell(TICK, 5.0), "kill 0")]),
    "a silent busy worker is written off": (SILENT, [idle(0, now=9.0), (tell(TICK, 9.1), "stop 0")]),
}


@pytest.mark.parametrize(("config", "story"), STORIES.values(), ids=STORIES)
def test_each_event_brings_its_commands(config, story):
    coordinator = Coordinator(**config)
    for step in story:
        act, expected = step if isinstance(step, tuple) else (step, None)
        commands = said(act(coordinator))
        assert expected in (None, commands)


def test_it_wakes_for_what_is_due():
    coordinator = Coordinator(workers=2, yield_timeout_s=3.0, gone_after_s=4.0)
    coordinator.idle(0, now=1.0)
    assert wakeup_s(coordinator.state) == 1.5
    coordinator = Coordinator(yield_timeout_s=3.0)
    coordinator.idle(0)
    coordinator.tell(END, now=10.0)
    coordinator.send(0, term=1, now=10.5)
    assert wakeup_s(coordinator.state) == 13.0
    coordinator.tell(Tick(), now=13.0)
    assert coordinator.phase(0) is Phase.GONE
    coordinator.send(0, busy=True, now=14.0)
    assert coordinator.phase(0) is Phase.BUSY


def test_a_process_replaced_unnoticed_ends_the_period():
    coordinator = Coordinator()
    coordinator.idle(0, 1)
    coordinator.send(0, term=1)
    coordinator.send(1, term=1)
    commands = coordinator.send(1, acked=0, incarnation=50)
    assert told(commands, StopTraining) == [0, 1]
    assert coordinator.idle(0) == []
    command = coordinator.send(1, incarnation=50)[0]
    assert (command.term, command.members) == (2, (0, 1))
    assert [c.incarnation for c in coordinator.last] == [0, 50]


def test_each_composition_of_the_group_is_numbered():
    coordinator = Coordinator()
    (alone,) = coordinator.idle(2)
    first, second = coordinator.idle(0)
    assert alone.group < first.group == second.group
    assert coordinator.tell(Tick(), now=1.0) == [second, first], "repeated, not renumbered"


def test_an_order_is_repeated_until_acknowledged():
    coordinator = Coordinator(resend_s=0.5)
    (train,) = coordinator.idle(0)
    coordinator.send(0, acked=0, now=0.2)
    assert coordinator.members == (0,), "not heard is not refused"
    assert coordinator.tell(Tick(), now=0.4) == []
    assert coordinator.tell(Tick(), now=0.5) == [train]
    coordinator.send(0, term=1, now=0.6)
    assert coordinator.tell(Tick(), now=9.0) == []
    assert wakeup_s(coordinator.state) == math.inf


def test_a_seen_term_is_never_reused():
    coordinator = Coordinator()
    coordinator.send(2, term=41)
    coordinator.send(2)
    assert coordinator.state.period.term == 42


@pytest.mark.parametrize(
    "bad",
    [{"min_idle_workers": 0}, {"max_members": 0}, {"yield_timeout_s": 0}, {"resend_s": -1}, {"gone_after_s": 0},
     {"yield_timeout_s": math.nan}, {"leader": 3}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(bad):
    with refused(ValidationError, naming=tuple(bad)):
        CoordinatorConfig(**bad)


class Process:
    """A worker's process: its agent, and a trainer that looks at its order at one time and acts on it at another."""

    def __init__(self, index, first_seq):
        self.index, self.alive, self.looked = index, True, Hold()
        self.agent = WorkerAgent(worker=index, first_seq=first_seq)

    def trainer_acts(self, now):
        return self.agent.trainer(self.looked.term if isinstance(self.looked, Train) else None, now)

    @property
    def may_train(self):
        return self.alive and (self.agent.held is not None or isinstance(self.agent.order, Train))


WORKERS = st.integers(0, 4)


class Faults(RuleBasedStateMachine):
    """Five workers behind a network that loses, doubles, delays and reorders; workers die and are replaced."""

    @initialize(
        min_idle=st.integers(1, 3),
        max_members=st.sampled_from([None, 1, 2, 4]),
        late_join=st.booleans(),
        gone_after_s=st.sampled_from([None, 6.0]),
    )
    def begin(self, min_idle, max_members, late_join, gone_after_s):
        self.config = CoordinatorConfig(
            min_idle_workers=min_idle, max_members=max_members, late_join=late_join, gone_after_s=gone_after_s,
            yield_timeout_s=4.0, resend_s=1.0,
        )  # fmt: skip
        self.workers = [Process(i, first_seq=1) for i in range(5)]
        self.state = CoordinatorState(config=self.config)
        self.now, self.rl_step, self.ended_s, self.released = 0.0, -1, None, True
        self.to_coordinator, self.to_workers = [], []
        self.leaders, self.groups = {}, {}
        self.heard_term = dict.fromkeys(range(5), 0)
        self.rollout_starts()

    def tell(self, event):
        before = self.state
        self.state, commands = advance(self.state, event, self.now)
        if isinstance(event, RolloutEnded) and before.period is not None:
            assert set(before.period.members) <= set(told(commands, StopTraining))
        self.carry_out(commands)

    def carry_out(self, commands):
        for command in commands:
            if isinstance(command, Released):
                assert command.rl_step == self.rl_step
                assert not [w.index for w in self.workers if w.may_train], "released while training"
                self.released = True
                continue
            if isinstance(command, Kill):
                self.workers[command.worker].alive = False
                continue
            self.to_workers.append(command)

    def deliver(self, command):
        worker = self.workers[command.worker]
        if not worker.alive:
            return
        before = worker.agent.order
        self.to_coordinator += worker.agent.receive(command, self.now)
        order = worker.agent.order
        if isinstance(order, Train) and order is not before:
            assert order.term >= self.heard_term[worker.index], "an order of an older term was obeyed"
            assert self.leaders.setdefault(order.term, order.leader) == order.leader == order.members[0]
            assert self.groups.setdefault(order.group, (order.term, order.members)) == (order.term, order.members)
        self.heard_term[worker.index] = max(self.heard_term[worker.index], command.term)

    @precondition(lambda self: self.released)
    @rule()
    def rollout_starts(self):
        self.rl_step += 1
        self.released, self.ended_s = False, None
        for worker in self.workers:
            if worker.alive:
                assert worker.agent.held is None
                self.to_coordinator += worker.agent.requests(self.rl_step, True, self.now)
        self.tell(RolloutStarted(rl_step=self.rl_step))

    @rule()
    def rollout_ends(self):
        self.ended_s = self.now if self.ended_s is None else self.ended_s
        self.requests_done(set(range(5)))
        self.tell(RolloutEnded(rl_step=self.rl_step))

    @precondition(lambda self: self.ended_s is None)
    @rule(workers=st.sets(WORKERS, min_size=1, max_size=4))
    def requests_done(self, workers):
        for worker in sorted(workers):
            if self.workers[worker].alive:
                self.to_coordinator += self.workers[worker].agent.requests(self.rl_step, False, self.now)

    @precondition(lambda self: self.ended_s is None)
    @rule(worker=WORKERS)
    def requests_arrive(self, worker):
        if self.workers[worker].alive:
            self.to_coordinator += self.workers[worker].agent.requests(self.rl_step, True, self.now)

    @rule(worker=WORKERS)
    def heartbeat(self, worker):
        if self.workers[worker].alive:
            self.to_coordinator += self.workers[worker].agent.tick(self.workers[worker].agent.wakeup_s)

    @rule(workers=st.sets(WORKERS, min_size=2, max_size=4), flow=st.booleans(), take=st.booleans())
    def rollout_goes_its_way(self, workers, flow, take):
        """What mostly happens, so that faults meet groups at work."""
        if self.released:
            self.rollout_starts()
        if self.ended_s is None:
            self.requests_done(workers)
        if flow:
            self.messages_flow()
        for worker in range(5):
            self.trainer_looks_at_its_order(worker)
            if take:
                self.trainer_acts_on_what_it_saw(worker)

    @precondition(lambda self: any(worker.may_train for worker in self.workers))
    @rule(which=st.integers(0, 4), fault=st.sampled_from(["replaced", "dies", "fails", "gets work"]))
    def member_is_struck(self, which, fault):
        members = [worker.index for worker in self.workers if worker.may_train]
        member = members[which % len(members)]
        self.trainer_looks_at_its_order(member)
        match fault:
            case "replaced":
                self.worker_is_replaced(member, at_once=True)
            case "dies":
                self.worker_dies(member, noticed=False)
            case "fails":
                self.trainer_fails(member)
            case "gets work" if self.ended_s is None:
                self.requests_arrive(member)
        self.trainer_acts_on_what_it_saw(member)

    @precondition(lambda self: told(self.to_workers, Train))
    @rule(which=st.integers(0, 9), replaced=st.booleans())
    def order_comes_late(self, which, replaced):
        orders = [command for command in self.to_workers if isinstance(command, Train)]
        order = orders[which % len(orders)]
        self.worker_is_replaced(order.worker, at_once=replaced)
        while self.to_coordinator:
            self.tell(self.to_coordinator.pop(0))
        self.deliver(order)

    @rule(worker=WORKERS)
    def trainer_looks_at_its_order(self, worker):
        self.workers[worker].looked = self.workers[worker].agent.order

    @rule(worker=WORKERS)
    def trainer_acts_on_what_it_saw(self, worker):
        if self.workers[worker].alive:
            self.to_coordinator += self.workers[worker].trainer_acts(self.now)

    @rule(worker=WORKERS)
    def trainer_fails(self, worker):
        if self.workers[worker].alive:
            self.to_coordinator += self.workers[worker].agent.failed(self.now)

    @rule(worker=WORKERS, noticed=st.booleans())
    def worker_dies(self, worker, noticed):
        self.workers[worker].alive = False
        if noticed:
            self.tell(WorkerGone(worker=worker))

    @rule(worker=WORKERS, at_once=st.booleans())
    def worker_is_replaced(self, worker, at_once):
        if at_once or not self.workers[worker].alive:
            self.workers[worker] = Process(worker, first_seq=self.workers[worker].agent.incarnation + 1_000_000)
            self.to_coordinator += self.workers[worker].agent.requests(self.rl_step, False, self.now)

    @precondition(lambda self: self.to_coordinator)
    @rule(data=st.data(), lost=st.booleans(), doubled=st.booleans())
    def report_arrives(self, data, lost, doubled):
        at = data.draw(st.integers(0, len(self.to_coordinator) - 1))
        report = self.to_coordinator[at] if doubled else self.to_coordinator.pop(at)
        if not lost:
            self.tell(report)

    @precondition(lambda self: self.to_workers)
    @rule(data=st.data(), lost=st.booleans(), doubled=st.booleans())
    def command_arrives(self, data, lost, doubled):
        at = data.draw(st.integers(0, len(self.to_workers) - 1))
        command = self.to_workers[at] if doubled else self.to_workers.pop(at)
        if not lost:
            self.deliver(command)

    @precondition(lambda self: self.to_coordinator or self.to_workers)
    @rule()
    def messages_flow(self):
        for _ in range(2000):
            if not self.to_coordinator and not self.to_workers:
                return
            if self.to_coordinator:
                self.tell(self.to_coordinator.pop(0))
            else:
                self.deliver(self.to_workers.pop(0))
        pytest.fail("the coordinator and the workers never run out of things to say")

    @precondition(lambda self: self.to_coordinator)
    @rule()
    def reports_flow(self):
        """The coordinator hears everything, its commands stay under way."""
        while self.to_coordinator:
            self.tell(self.to_coordinator.pop(0))

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
        """Messages flow again: everybody repeats itself, and what the coordinator believes is what is."""
        for _ in range(6):
            for worker in self.workers:
                self.trainer_looks_at_its_order(worker.index)
                self.trainer_acts_on_what_it_saw(worker.index)
                self.heartbeat(worker.index)
                if not worker.alive:
                    self.tell(WorkerGone(worker=worker.index))
            self.messages_flow()
            self.time_passes(1.0)
        self.check_agreement()

    def check_agreement(self):
        period, known = self.state.period, self.state.workers
        for worker in self.workers:
            phase = known[worker.index].phase if worker.index in known else Phase.GONE
            if not worker.alive:
                assert phase is Phase.GONE
                continue
            if worker.may_train:
                assert period is not None
                assert (worker.agent.held, worker.agent.order.leader) == (period.term, period.leader)
                assert worker.agent.order.members == period.members
            report = worker.agent.tick(worker.agent.wakeup_s)[0]
            generating = report.busy or report.rl_step != self.rl_step
            expected = Phase.TRAINING if worker.may_train else Phase.BUSY if generating else Phase.IDLE
            assert phase is expected
        if self.ended_s is not None:
            assert self.released
            return
        invited = [w for w in known.values() if w.phase is Phase.IDLE and not w.declined]
        if any(w.phase is Phase.BUSY for w in known.values()) and period is None:
            assert len(invited) < self.config.min_idle_workers, "enough idle workers, and nobody trains"

    @invariant()
    def members_are_the_training_workers(self):
        training = {i for i, w in self.state.workers.items() if w.phase is Phase.TRAINING}
        members = self.state.period.members if self.state.period else ()
        assert set(members) == training
        assert len(members) == len(training) <= (self.config.max_members or 5)
        assert self.state.rolling_out or not members

    @invariant()
    def nobody_waits_longer_than_the_bound(self):
        if self.ended_s is not None and not self.released:
            assert self.now <= self.ended_s + self.config.yield_timeout_s

    def teardown(self):
        if hasattr(self, "state"):
            self.quiet()
            self.the_next_rollout_trains_again()

    def the_next_rollout_trains_again(self):
        self.rollout_ends()
        self.quiet()
        assert self.released
        for worker in self.workers:
            self.worker_is_replaced(worker.index, at_once=False)
        self.rollout_starts()
        self.requests_done({0, 1, 2, 4})
        self.quiet()
        trains = [w.index for w in self.workers if w.agent.held is not None]
        assert len(trains) == min(4, self.config.max_members or 4) or not self.config.late_join
        assert len(trains) >= min(self.config.min_idle_workers, self.config.max_members or 4)


TestFaults = Faults.TestCase
TestFaults.settings = settings(stateful_step_count=40)
