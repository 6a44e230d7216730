"""Who trained when, as the coordinator saw it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from tltlab.coordination.machine import CoordinatorState, Phase

NUM_PERIODS = 10_000
"""How many of the newest a log keeps."""


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
    """A training period, with all who ever were in it, in the order of joining; `end_s` None while it is open.

    Times are on `time.perf_counter`.
    """

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


class PeriodLog:
    """Keeps a record of each training period."""

    def __init__(self) -> None:
        self._periods: deque[_Period] = deque(maxlen=NUM_PERIODS)
        self._followed: list[_Period] = []

    def periods(self) -> list[PeriodRecord]:
        """The newest training periods, in order of their terms."""
        return [replace(period.record, members=tuple(period.members)) for period in self._periods]

    def add(self, now: float, before: CoordinatorState, after: CoordinatorState) -> None:
        """What an event made of the coordinator."""
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
