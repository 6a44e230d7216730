"""State machine that assigns idle workers to drafter training while others generate: TLT's worker coordinator.

`advance(state, event, now)` is the whole machine and does no I/O. The simulator steps it in virtual time, the runtime
through sockets. Workers go BUSY -> IDLE -> TRAINING -> STOPPING -> BUSY or IDLE; with `min_idle_workers` of them idle a
training period opens under a new term, the lowest of them leads it, later ones may join. A member that gets work leaves
the group; a leader that leaves, or any member that dies, ends the period, and a new one may open. The end of the
rollout, or no busy worker being left, stops training.

State is soft: it holds the last report of each worker, and repeated reports rebuild it after losses and restarts.

The end of a rollout is answered by `Released` at most `yield_timeout_s` after `advance` received it, whatever is lost
and whoever dies, if `Tick` comes at `wakeup_s`: a trainer that has not yielded by then is killed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Annotated, Any

from pydantic import Field

from tltlab.config import FrozenModel
from tltlab.records import frozen

from .messages import (
    Command,
    Event,
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

PositiveSeconds = Annotated[float, Field(gt=0)]


class CoordinatorConfig(FrozenModel):
    """When idle workers train, how many, and how long the others wait for them.

    `min_idle_workers` opens a period (1 in TLT's released code); `max_members` None: all idle ones; `late_join` lets
    workers that finish later into an open period. A worker ordered to stop is killed after `yield_timeout_s`: the bound
    on what the end of a rollout waits for training. `resend_s`: a command without acknowledgement is sent again.
    `gone_after_s`: silence after which a worker counts as gone, None where something else watches over the processes.
    """

    min_idle_workers: Annotated[int, Field(ge=1)] = 1
    max_members: Annotated[int, Field(ge=1)] | None = None
    late_join: bool = True
    yield_timeout_s: PositiveSeconds = 5.0
    resend_s: PositiveSeconds = 0.5
    gone_after_s: PositiveSeconds | None = None


class Phase(Enum):
    """Phase of a worker as the coordinator sees it; TRAINING from the moment that `Train` is sent."""

    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"
    STOPPING = "stopping"
    GONE = "gone"


@frozen
class WorkerState:
    """State of one worker by its last report.

    `seq` numbers its last report, `sent_seq` the last command to it, `unacked` that command until it is acknowledged;
    `joined_seq` is the command that made it a member, `stop_by_s` when a STOPPING one is killed. `declined`: its
    trainer ended by itself in this rollout, so it is not asked again before the next. `incarnation` as in its reports,
    -1 before the first.
    """

    phase: Phase
    busy: bool = True
    seq: int = -1
    incarnation: int = -1
    reported_s: float = 0.0
    sent_seq: int = 0
    sent_s: float = 0.0
    unacked: Train | StopTraining | None = None
    joined_seq: int = 0
    stop_by_s: float = math.inf
    declined: bool = False


@frozen
class Period:
    """An open training period; `members` are exactly the TRAINING workers, in rank order, the leader first."""

    term: int
    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.members[0]


@frozen
class CoordinatorState:
    """Whole state of the coordinator.

    `release_by_s`: when `Released` is due at the latest, infinity where it is not awaited. `term` and `seq` are the
    highest ones that the coordinator used or received in a report.
    """

    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    rl_step: int = -1
    rolling_out: bool = False
    release_by_s: float = math.inf
    term: int = 0
    seq: int = 0
    period: Period | None = None
    workers: Mapping[int, WorkerState] = field(default_factory=dict)


def advance(state: CoordinatorState, event: Event, now: float) -> tuple[CoordinatorState, tuple[Command, ...]]:
    """The next state, and the commands to send, in order. Never raises on old, doubled or unexpected messages.

    >>> state, _ = advance(CoordinatorState(), RolloutStarted(rl_step=0), 0.0)
    >>> state, _ = advance(state, WorkerReport(worker=0, seq=0, rl_step=0, busy=True), 0.0)
    >>> state, commands = advance(state, WorkerReport(worker=1, seq=0, rl_step=0, busy=False), 9.0)
    >>> commands
    (Train(worker=1, seq=1, term=1, group=1, rl_step=0, leader=1, members=(1,), incarnation=0),)
    """
    turn = _Turn(state, now)
    match event:
        case WorkerReport():
            turn.receive(event)
        case WorkerGone():
            turn.lose(event.worker)
        case RolloutStarted():
            turn.start(event.rl_step)
        case RolloutEnded():
            turn.end(event.rl_step)
        case Tick():
            turn.tick()
    turn.settle()
    return turn.result()


def wakeup_s(state: CoordinatorState) -> float:
    """When the next `Tick` is due if nothing else happens; infinity where nothing waits for time to pass."""
    config, due = state.config, math.inf
    for worker in state.workers.values():
        due = min(due, worker.stop_by_s)
        if worker.unacked is not None:
            due = min(due, worker.sent_s + config.resend_s)
        if config.gone_after_s is not None and worker.phase not in (Phase.GONE, Phase.STOPPING):
            due = min(due, worker.reported_s + config.gone_after_s)
    return due


class _Turn:
    """One event's work on a copy of the state."""

    def __init__(self, state: CoordinatorState, now: float) -> None:
        self.before, self.now, self.config = state, now, state.config
        self.rl_step, self.rolling_out, self.release_by_s = state.rl_step, state.rolling_out, state.release_by_s
        self.term, self.seq, self.period = state.term, state.seq, state.period
        self.workers = dict(state.workers)
        self.commands: list[Command] = []

    def result(self) -> tuple[CoordinatorState, tuple[Command, ...]]:
        state = replace(
            self.before,
            rl_step=self.rl_step,
            rolling_out=self.rolling_out,
            release_by_s=self.release_by_s,
            term=self.term,
            seq=self.seq,
            period=self.period,
            workers=self.workers,
        )
        return state, tuple(self.commands)

    def receive(self, report: WorkerReport) -> None:
        index = report.worker
        worker = self.workers.get(index, WorkerState(phase=Phase.BUSY))
        if report.seq <= worker.seq:
            return
        if report.incarnation > worker.incarnation >= 0:
            # The end of the previous process was not observed, but its training ended with it.
            self.lose(index)
            worker = self.workers[index]
        self.term, self.seq = max(self.term, report.term or 0), max(self.seq, report.acked)
        # A report from another RL step's rollout does not cover the requests of this RL step.
        busy = report.busy or report.rl_step != self.rl_step
        unacked = None if report.acked >= worker.sent_seq else worker.unacked
        self.workers[index] = replace(
            worker, seq=report.seq, incarnation=report.incarnation, reported_s=self.now, busy=busy, unacked=unacked
        )
        if self.period is not None and index in self.period.members:
            trains = report.term == self.period.term
            not_told_yet = report.term is None and report.acked < worker.joined_seq
            if not busy and (trains or not_told_yet):
                return
            self._leave(index)
            if not busy and report.term is None:
                self._update(index, declined=True)
        # A `Train` that is still under way could start it later: it is free only once the last command was handled.
        if report.term is None and report.acked >= worker.sent_seq:
            self._update(index, phase=Phase.BUSY if busy else Phase.IDLE, stop_by_s=math.inf)
        else:
            self.stop(index)

    def lose(self, index: int) -> None:
        if index not in self.workers:
            return
        self._update(index, phase=Phase.GONE, unacked=None, stop_by_s=math.inf)
        if self.period is not None and index in self.period.members:
            # A collective operation does not survive a lost member.
            self._close(spare=index)

    def start(self, rl_step: int) -> None:
        if rl_step <= self.rl_step:
            return
        self.rl_step, self.rolling_out, self.release_by_s = rl_step, True, math.inf
        self._close()
        for index, worker in self.workers.items():
            phase = Phase.BUSY if worker.phase is Phase.IDLE else worker.phase
            self._update(index, phase=phase, busy=True, declined=False)

    def end(self, rl_step: int) -> None:
        if rl_step >= self.rl_step:
            self.rl_step, self.rolling_out = rl_step, False
            self.release_by_s = min(self.release_by_s, self.now + self.config.yield_timeout_s)

    def tick(self) -> None:
        gone_after_s = math.inf if self.config.gone_after_s is None else self.config.gone_after_s
        for index in sorted(self.workers):
            worker = self.workers[index]
            if worker.phase is Phase.STOPPING:
                if self.now >= worker.stop_by_s:
                    self._kill(index)
                    continue
            elif worker.phase is not Phase.GONE and self.now >= worker.reported_s + gone_after_s:
                # Cut off is not dead: a silent member may train on.
                if worker.phase is Phase.TRAINING:
                    self._kill(index)
                else:
                    self.lose(index)
                continue
            if worker.unacked is not None and self.now >= worker.sent_s + self.config.resend_s:
                self.commands.append(worker.unacked)
                self._update(index, sent_s=self.now)

    def settle(self) -> None:
        """Whatever the event was, do what its outcome calls for: close, open or extend a period, release."""
        phases = [worker.phase for worker in self.workers.values()]
        others_generate = any(w.busy and w.phase is not Phase.GONE for w in self.workers.values())
        may_train = self.rolling_out and others_generate
        if not may_train:
            self._close()
        elif self.period is None:
            idle = self._invited()
            if Phase.STOPPING not in phases and len(idle) >= self.config.min_idle_workers:
                self.term += 1
                self._group(Period(term=self.term, members=tuple(idle[: self.config.max_members])))
        elif self.config.late_join:
            limit = self.config.max_members or len(self.workers)
            joining = self._invited()[: max(0, limit - len(self.period.members))]
            if joining:
                self._group(replace(self.period, members=(*self.period.members, *joining)))
        training = any(w.phase in (Phase.TRAINING, Phase.STOPPING) for w in self.workers.values())
        if math.isfinite(self.release_by_s) and not training:
            self.release_by_s = math.inf
            self.commands.append(Released(rl_step=self.rl_step))

    def stop(self, index: int) -> None:
        """Order a worker to stop; a worker that is already stopping keeps its deadline."""
        if self.workers[index].phase is not Phase.STOPPING:
            self._send(index, StopTraining(worker=index, seq=self._next_seq(), term=self.term))
            # A late worker does not delay a pending release.
            stop_by_s = min(self.now + self.config.yield_timeout_s, self.release_by_s)
            self._update(index, phase=Phase.STOPPING, stop_by_s=stop_by_s)

    def _invited(self) -> list[int]:
        return sorted(i for i, w in self.workers.items() if w.phase is Phase.IDLE and not w.declined)

    def _group(self, period: Period) -> None:
        """Open or update `period` and send `Train` to all its members; members that do not train yet join."""
        self.period = period
        group = self.seq + 1
        for index in period.members:
            seq = self._next_seq()
            command = Train(
                worker=index,
                seq=seq,
                term=period.term,
                group=group,
                rl_step=self.rl_step,
                leader=period.leader,
                members=period.members,
                incarnation=self.workers[index].incarnation,
            )
            joins = self.workers[index].phase is not Phase.TRAINING
            self._send(index, command)
            if joins:
                self._update(index, phase=Phase.TRAINING, joined_seq=seq)

    def _leave(self, index: int) -> None:
        """Take a living member out of the group; the caller sees to what it does next."""
        assert self.period is not None
        if index == self.period.leader:
            self._close(spare=index)
        else:
            self._group(replace(self.period, members=tuple(m for m in self.period.members if m != index)))

    def _close(self, spare: int | None = None) -> None:
        """End the open period, if any, and order all members but `spare` to stop."""
        period, self.period = self.period, None
        for index in period.members if period is not None else ():
            if index != spare:
                self.stop(index)

    def _kill(self, index: int) -> None:
        seq = self._next_seq()
        self.commands.append(Kill(worker=index, seq=seq, term=self.term))
        self._update(index, sent_seq=seq)
        self.lose(index)

    def _send(self, index: int, command: Train | StopTraining) -> None:
        self.commands.append(command)
        self._update(index, sent_seq=command.seq, sent_s=self.now, unacked=command)

    def _next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def _update(self, index: int, **changes: Any) -> None:
        self.workers[index] = replace(self.workers[index], **changes)
