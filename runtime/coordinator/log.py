"""What a coordinator went through: its messages, and who trained when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tltlab.coordination.machine import CoordinatorState, Phase
from tltlab.coordination.messages import Command, Event, Tick, WorkerReport

NUM_RECORDS, NUM_PERIODS = 100_000, 10_000
"""How many of the newest a log keeps: a long run of many workers has millions of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """An event that the coordinator was told, or a command that it gave, `time_s` on `time.perf_counter`."""

    time_s: float
    message: Event | Command

    def row(self, origin_s: float = 0.0) -> dict[str, Any]:
        """The record as a row of names and plain values, its time in seconds after `origin_s`."""
        kind = type(self.message).__name__
        return {"time_s": self.time_s - origin_s, "message": kind, **asdict(self.message)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A worker's time in a training period: told to train, told to stop (or lost), device free (or its process ended).

    Times are None where that has not happened yet.
    """

    worker: int
    start_s: float
    stop_s: float | None = None
    free_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodRecord:
    """A training period, with all who ever were in it, in the order of joining; `end_s` None while it is open."""

    term: int
    rl_step: int
    leader: int
    start_s: float
    end_s: float | None = None
    members: tuple[Membership, ...] = ()


@dataclass(slots=True)
class _Period:
    record: PeriodRecord
    members: list[Membership] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.record.end_s is not None and all(member.free_s is not None for member in self.members)

    def follow(self, in_it: tuple[int, ...], state: CoordinatorState, now: float) -> None:
        for at, member in enumerate(self.members):
            if member.stop_s is None and member.worker not in in_it:
                member = replace(member, stop_s=now)
            if member.stop_s is not None and member.free_s is None:
                yields = state.workers[member.worker].phase is Phase.STOPPING
                member = replace(member, free_s=None if yields else now)
            self.members[at] = member
        here = {member.worker for member in self.members if member.stop_s is None}
        self.members += [Membership(worker=worker, start_s=now) for worker in in_it if worker not in here]


class CoordinatorLog:
    """Keeps a record of each message, but of ticks and of reports that repeat the worker's last."""

    def __init__(self) -> None:
        self._records: deque[LogRecord] = deque(maxlen=NUM_RECORDS)
        self._periods: deque[_Period] = deque(maxlen=NUM_PERIODS)
        self._followed: list[_Period] = []
        self._said: dict[int, tuple[object, ...]] = {}

    def records(self) -> list[LogRecord]:
        """The newest records, in order of time."""
        return list(self._records)

    def periods(self) -> list[PeriodRecord]:
        """The newest training periods, in order of their terms."""
        return [replace(period.record, members=tuple(period.members)) for period in self._periods]

    def add(
        self, now: float, event: Event, before: CoordinatorState, after: CoordinatorState, commands: Iterable[Command]
    ) -> None:
        """An event, what it made of the coordinator, and the commands that it called for."""
        if self._is_news(event):
            self._records.append(LogRecord(time_s=now, message=event))
        self._records.extend(LogRecord(time_s=now, message=command) for command in commands)
        old, new = before.period, after.period
        closed = old is not None and (new is None or new.term != old.term)
        if closed:
            self._periods[-1].record = replace(self._periods[-1].record, end_s=now)
        if new is not None and (old is None or closed):
            record = PeriodRecord(term=new.term, rl_step=after.rl_step, leader=new.leader, start_s=now)
            self._periods.append(_Period(record))
            self._followed.append(self._periods[-1])
        for period in self._followed:
            in_it = new.members if new is not None and new.term == period.record.term else ()
            period.follow(in_it, after, now)
        self._followed = [period for period in self._followed if not period.is_over]

    def _is_news(self, event: Event) -> bool:
        if not isinstance(event, WorkerReport):
            return not isinstance(event, Tick)
        said = (event.rl_step, event.busy, event.term, event.incarnation)
        if self._said.get(event.worker) == said:
            return False
        self._said[event.worker] = said
        return True
