"""State machine that assigns idle workers to drafter training while others generate: TLT's worker coordinator.

`advance(state, event, now)` is the whole machine and does no I/O. The simulator steps it in virtual time, the runtime
by calls of Ray actors, which arrive once or raise, and may overtake one another.

With `min_idle_workers` idle a training period opens under a new term, the lowest of them leads it, later ones may join.
A leader that ends by itself, or any member that dies, ends the period, and a new one may open. The end of the rollout,
or no busy worker being left, stops training.

The end of a rollout is answered by `Released` at most `yield_timeout_s` after `advance` received it, whoever hangs or
dies, if `Tick` comes at `wakeup_s`: a trainer that has not yielded by then is killed.
"""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Any

from pydantic import PositiveFloat

from tltlab.config import Count, FrozenModel
from tltlab.records import frozen


class CoordinatorConfig(FrozenModel):
    """Conditions for training on idle workers, their number, and the time that others wait for them.

    `min_idle_workers` opens a period (1 in TLT's released code); `max_members` None: all idle ones; `late_join` lets
    workers that finish later into an open period. A worker ordered to stop is killed after `yield_timeout_s`: the bound
    on what the end of a rollout waits for training. A trainer that trains and answers no call for `gone_after_s` is
    killed then, None: only when it has to stop.
    """

    min_idle_workers: Count = 1
    max_members: Count | None = None
    late_join: bool = True
    yield_timeout_s: PositiveFloat = 5.0
    gone_after_s: PositiveFloat | None = None


@frozen
class RolloutStarted:
    """RL step `rl_step` generates from now on: every worker is busy."""

    rl_step: int


@frozen
class WorkerIdle:
    """The worker has no request of this rollout left."""

    worker: int


@frozen
class RolloutEnded:
    """RL step `rl_step` needs all devices; `Released` answers it, and answers it again when it is repeated."""

    rl_step: int


@frozen
class TrainerReady:
    """The worker's trainer can train: it has started, at first or again after `TrainerGone`."""

    worker: int


@frozen
class TrainerFreed:
    """The trainer that was ordered to train has left its device: it was stopped, or ended by itself."""

    worker: int


@frozen
class TrainerGone:
    """The process of the worker's trainer has ended."""

    worker: int


@frozen
class Tick:
    """Time has passed; due at `wakeup_s`."""


Event = RolloutStarted | WorkerIdle | RolloutEnded | TrainerReady | TrainerFreed | TrainerGone | Tick


@frozen
class Train:
    """Be in this group: set it up, join it, or continue in it with other members from the next optimizer step on.

    `members` are in rank order, the leader first. `term` numbers the training period: a term has one leader, and a
    worker trains once in it. `number` grows from order to order, so that the newest is known even where it
    overtook another; all members of a group have the same, and no other group has.
    """

    worker: int
    number: int
    term: int
    rl_step: int
    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.members[0]


@frozen
class StopTraining:
    """Finish at most the optimizer step under way, save in the background and leave the device."""

    worker: int
    number: int


@frozen
class Kill:
    """End this worker's trainer by force, it did not yield in time; what it had not saved is lost."""

    worker: int


@frozen
class Released:
    """For the RL step's driver: its rollout has ended and no device trains the drafter."""

    rl_step: int


Command = Train | StopTraining | Kill | Released


class Phase(Enum):
    """Phase of a worker's trainer; TRAINING from the moment that `Train` is sent."""

    GONE = "gone"
    FREE = "free"
    TRAINING = "training"
    STOPPING = "stopping"


@frozen
class WorkerState:
    """State of one worker and its trainer.

    `stop_by_s`: when a STOPPING trainer is killed. `declined`: its trainer ended by itself in this rollout, so it is
    not asked again before the next.
    """

    busy: bool = True
    phase: Phase = Phase.GONE
    stop_by_s: float = math.inf
    declined: bool = False

    @property
    def holds(self) -> bool:
        """True if its trainer may use the device."""
        return self.phase in (Phase.TRAINING, Phase.STOPPING)


@frozen
class CoordinatorState:
    """Whole state of the coordinator.

    `term` is the newest one and `number` that of the newest order. `members` of the open training period, none without
    one, are exactly the TRAINING workers, in rank order. `ending`: `Released` is awaited.
    """

    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    rl_step: int = -1
    rolling_out: bool = False
    ending: bool = False
    term: int = 0
    number: int = 0
    members: tuple[int, ...] = ()
    workers: Mapping[int, WorkerState] = field(default_factory=dict)


def advance(state: CoordinatorState, event: Event, now: float) -> tuple[CoordinatorState, tuple[Command, ...]]:
    """The next state, and the commands to send, in order. Never raises on old, doubled or unexpected events.

    >>> state = CoordinatorState(workers={0: WorkerState()})
    >>> state, _ = advance(state, TrainerReady(worker=1), 0.0)
    >>> state, _ = advance(state, RolloutStarted(rl_step=0), 0.0)
    >>> state, commands = advance(state, WorkerIdle(worker=1), 9.0)
    >>> commands
    (Train(worker=1, number=1, term=1, rl_step=0, members=(1,)),)
    """
    turn = _Turn(state, now)
    match event:
        case RolloutStarted():
            turn.start(event.rl_step)
        case WorkerIdle():
            turn.update(event.worker, busy=False)
        case RolloutEnded():
            turn.end(event.rl_step)
        case TrainerReady() if turn.worker(event.worker).phase is Phase.GONE:
            turn.update(event.worker, phase=Phase.FREE)
        case TrainerFreed() if turn.worker(event.worker).holds:
            turn.free(event.worker)
        case TrainerGone():
            turn.lose(event.worker)
        case Tick():
            turn.tick()
    turn.settle()
    return turn.result(), tuple(turn.commands)


def wakeup_s(state: CoordinatorState) -> float:
    """Return the time of the next `Tick` if nothing else happens; infinity where nothing waits for time to pass."""
    return min((worker.stop_by_s for worker in state.workers.values()), default=math.inf)


class _Turn:
    """One event's work on a copy of the state."""

    def __init__(self, state: CoordinatorState, now: float):
        self.before, self.now, self.config = state, now, state.config
        self.rl_step, self.rolling_out, self.ending = state.rl_step, state.rolling_out, state.ending
        self.term, self.number, self.members = state.term, state.number, state.members
        self.workers = dict(state.workers)
        self.commands: list[Command] = []

    def result(self) -> CoordinatorState:
        return replace(
            self.before,
            rl_step=self.rl_step,
            rolling_out=self.rolling_out,
            ending=self.ending,
            term=self.term,
            number=self.number,
            members=self.members,
            workers=self.workers,
        )

    def worker(self, index: int) -> WorkerState:
        return self.workers.get(index, WorkerState())

    def update(self, index: int, **changes: Any) -> None:
        self.workers[index] = replace(self.worker(index), **changes)

    def start(self, rl_step: int) -> None:
        if rl_step <= self.rl_step:
            return
        self.rl_step, self.rolling_out, self.ending = rl_step, True, False
        self._close()
        for index in self.workers:
            self.update(index, busy=True, declined=False)

    def end(self, rl_step: int) -> None:
        if rl_step >= self.rl_step:
            self.rl_step, self.rolling_out, self.ending = rl_step, False, True

    def free(self, index: int) -> None:
        self.update(index, phase=Phase.FREE, stop_by_s=math.inf)
        if index in self.members:
            self.update(index, declined=True)
            rest = tuple(member for member in self.members if member != index)
            if index == self.members[0]:
                self._close(rest)
            else:
                self._group(rest)

    def lose(self, index: int) -> None:
        self.update(index, phase=Phase.GONE, stop_by_s=math.inf)
        if index in self.members:
            # A collective operation does not survive a lost member.
            self._close(tuple(member for member in self.members if member != index))

    def tick(self) -> None:
        for index in sorted(self.workers):
            if self.now >= self.workers[index].stop_by_s:
                self.commands.append(Kill(worker=index))
                self.lose(index)

    def settle(self) -> None:
        """Whatever the event was, do what its outcome calls for: close, open or extend a period, release."""
        workers = self.workers.values()
        idle = [
            index
            for index, worker in sorted(self.workers.items())
            if worker.phase is Phase.FREE and not worker.busy and not worker.declined
        ]
        if not (self.rolling_out and any(worker.busy for worker in workers)):
            self._close()
        elif not self.members:
            stopping = any(worker.phase is Phase.STOPPING for worker in workers)
            if not stopping and len(idle) >= self.config.min_idle_workers:
                self.term += 1
                self._group(tuple(idle[: self.config.max_members]))
        elif self.config.late_join:
            limit = self.config.max_members or len(self.workers)
            joining = idle[: max(0, limit - len(self.members))]
            if joining:
                self._group((*self.members, *joining))
        if self.ending and not any(worker.holds for worker in self.workers.values()):
            self.ending = False
            self.commands.append(Released(rl_step=self.rl_step))

    def _group(self, members: tuple[int, ...]) -> None:
        """Make these the members, and send `Train` to all of them."""
        self.members = members
        self.number += 1
        for index in members:
            self.commands.append(
                Train(worker=index, number=self.number, term=self.term, rl_step=self.rl_step, members=members)
            )
            self.update(index, phase=Phase.TRAINING)

    def _close(self, stopped: tuple[int, ...] | None = None) -> None:
        """End the open period, if any, and order its members, or those of `stopped`, to stop."""
        members, self.members = self.members, ()
        for index in members if stopped is None else stopped:
            self.number += 1
            self.commands.append(StopTraining(worker=index, number=self.number))
            self.update(index, phase=Phase.STOPPING, stop_by_s=self.now + self.config.yield_timeout_s)
