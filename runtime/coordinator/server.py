"""The worker coordinator at work, and its record of who trained when.

It is `tltlab.coordination.machine` behind a ZeroMQ ROUTER, in a thread of the driver.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tltlab.coordination.machine import (
    CoordinatorConfig,
    CoordinatorState,
    Phase,
    WorkerState,
    advance,
    restarted,
    wakeup_s,
)
from tltlab.coordination.messages import (
    Command,
    Event,
    Kill,
    Released,
    RolloutEnded,
    RolloutStarted,
    Tick,
    WorkerGone,
)
from tltlab.errors import ConfigError, RunError

from .keys import ServerKeys, check_endpoint, private_endpoint
from .thread import SocketThread, identity, prepare
from .wire import decode_report, encode

NUM_PERIODS = 10_000
"""How many of the newest a log keeps."""

_LATE_S = 30.0
"""How late a thread that is alive may be before the driver gives it up."""

log = logging.getLogger(__name__)


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

    @property
    def is_over(self) -> bool:
        return self.record.end_s is not None and all(member.free_s is not None for member in self.record.members)

    def follow(self, in_period: tuple[int, ...], state: CoordinatorState, now: float) -> None:
        members = []
        for member in self.record.members:
            if member.stop_s is None and member.worker not in in_period:
                member = replace(member, stop_s=now)
            yields = state.workers[member.worker].phase is Phase.STOPPING
            if member.stop_s is not None and member.free_s is None and not yields:
                member = replace(member, free_s=now)
            members.append(member)
        training = {member.worker for member in members if member.stop_s is None}
        members += [Membership(worker=worker, start_s=now) for worker in in_period if worker not in training]
        self.record = replace(self.record, members=tuple(members))


class PeriodLog:
    """Keeps a record of each training period."""

    def __init__(self) -> None:
        self._periods: deque[_Period] = deque(maxlen=NUM_PERIODS)
        self._followed: list[_Period] = []

    def periods(self) -> list[PeriodRecord]:
        """The newest training periods, in order of their terms."""
        return [period.record for period in self._periods]

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
            members = new.members if new is not None and new.term == period.record.term else ()
            period.follow(members, after, now)
        self._followed = [period for period in self._followed if not period.is_over]


class CoordinatorServer(SocketThread):
    """Decides which idle ones of workers 0 to `num_workers` - 1 train, and has them yield when the rollout ends.

    `endpoint`: where workers find it, `.endpoint` then; None for an address that only this user can reach; see
    `keys.check_endpoint`. `on_kill(worker)` ends the process of that worker's trainer by force and returns
    when it is dead; it runs in this thread and holds everything else up. `take_over`: an earlier coordinator died, and
    nobody knows who trains: all are stopped first, and those that do not answer in time are killed; give it the
    `.endpoint` of the dead one.

    The rollout never waits for a trainer: `rollout_ended` returns at most `yield_timeout_s` after the call, plus the
    time of `on_kill`, whatever messages were lost.

    Raises ConfigError on an address that is not allowed, RunError where it cannot be bound.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        endpoint: str | None,
        num_workers: int,
        on_kill: Callable[[int], None],
        keys: ServerKeys | None = None,
        *,
        take_over: bool = False,
    ) -> None:
        super().__init__("worker coordinator")
        self.endpoint = endpoint or private_endpoint()
        check_endpoint(self.endpoint, keys)
        if keys is not None and len(keys.workers) != num_workers:
            raise ConfigError(f"{len(keys.workers)} workers' keys for {num_workers} workers: make_keys({num_workers})")
        self.config, self.num_workers = config, num_workers
        self._keys, self._on_kill = keys, on_kill
        self._events: deque[Event] = deque()
        self._log = PeriodLog()
        self._released: int | None = None
        self._first: tuple[Command, ...] = ()
        now, above = time.perf_counter(), time.time_ns() // 1_000_000
        if take_over:
            self._state, self._first = restarted(config, range(num_workers), now, above=above)
        else:
            workers = {worker: WorkerState(phase=Phase.BUSY, heard_s=now) for worker in range(num_workers)}
            self._state = CoordinatorState(config=config, term=above, seq=above, workers=workers)
        self._start()

    def rollout_started(self, rl_step: int) -> None:
        """RL step `rl_step` generates; every worker counts as busy until it says otherwise."""
        self._tell(RolloutStarted(rl_step=rl_step))

    def rollout_ended(self, rl_step: int) -> float:
        """Take all devices back; returns the seconds waited until no trainer holds one any more.

        Raises RunError where the coordinator's thread has failed, before or meanwhile: start another with `take_over`,
        and ask it.
        """
        started = time.perf_counter()
        with self._changed:
            self._released = None
        self._tell(RolloutEnded(rl_step=rl_step))
        give_up_s = started + self.config.yield_timeout_s + _LATE_S
        with self._changed:
            while self._released != rl_step:
                self._check()
                now = time.perf_counter()
                if now >= give_up_s:
                    raise RunError(f"the coordinator did not release rollout {rl_step} in {now - started:.1f} s")
                self._changed.wait(give_up_s - now)
        return time.perf_counter() - started

    def worker_gone(self, worker: int) -> None:
        """The process of this worker's trainer has ended. Tell it before another one starts in its place."""
        self._tell(WorkerGone(worker=worker))

    def periods(self) -> list[PeriodRecord]:
        """The newest training periods."""
        with self._changed:
            return self._log.periods()

    def _tell(self, event: Event) -> None:
        self._check()
        self._events.append(event)
        self._wake()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.ROUTER)
        prepare(socket)
        # A worker's new process has its old one's name.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            authenticator = ThreadAuthenticator(context)
            authenticator.start()
            self._cleanup.callback(authenticator.stop)
            workers = self._keys.workers
            provider = SimpleNamespace(callback=lambda domain, key: key in workers)
            authenticator.configure_curve_callback(credentials_provider=provider)
            socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
            socket.curve_server = True
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            raise RunError(f"cannot listen at {self.endpoint}: {error.strerror}") from error
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket

    def _turn(self) -> float:
        first, self._first = self._first, ()
        self._carry_out(first)
        while self._events:
            self._advance(self._events.popleft())
        while (due_s := wakeup_s(self._state)) <= time.perf_counter():
            self._advance(Tick())
        return due_s - time.perf_counter()

    def _hear(self, frames: Sequence[zmq.Frame]) -> None:
        report = decode_report(frames[1].bytes) if len(frames) == 2 else None
        if report is None or report.worker >= self.num_workers or frames[0].bytes != identity(report.worker):
            return
        if self._keys is None or frames[1].get("User-Id") == self._keys.workers[report.worker].decode():
            self._advance(report)

    def _advance(self, event: Event) -> None:
        now, before = time.perf_counter(), self._state
        self._state, commands = advance(before, event, now)
        with self._changed:
            self._log.add(now, before, self._state)
        self._carry_out(commands)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Released():
                    with self._changed:
                        self._released = command.rl_step
                        self._changed.notify_all()
                case Kill():
                    log.warning("worker %d did not stop training in time: its trainer is killed", command.worker)
                    self._on_kill(command.worker)
                case _:
                    self._send(identity(command.worker), encode(command))
