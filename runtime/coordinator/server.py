"""The worker coordinator as a server.

The coordinator is `tltlab.coordination.machine` behind a ZeroMQ ROUTER, in a thread of the driver.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tltlab.coordination.machine import CoordinatorConfig, CoordinatorState, Phase, WorkerState, advance, wakeup_s
from tltlab.coordination.messages import Command, Event, Kill, Released, RolloutEnded, RolloutStarted, Tick, WorkerGone
from tltlab.errors import RunError

from .keys import ServerKeys, check_endpoint
from .thread import SocketThread, identity, prepare
from .wire import decode_report, encode

_LATE_S = 30.0
"""Seconds that a live thread may be late before the driver gives it up."""

log = logging.getLogger(__name__)


class CoordinatorServer(SocketThread):
    """Decides which idle ones of workers 0 to `num_workers` - 1 train, and stops them when the rollout ends.

    `endpoint`: the address for workers, afterwards `.endpoint`; see `keys.check_endpoint`. `on_kill(worker)` kills the
    process of that worker's trainer and returns when it is dead; it runs in this thread and blocks it.

    The rollout never waits for a trainer: `rollout_ended` returns at most `yield_timeout_s` after the call, plus the
    time of `on_kill`, for any lost messages.

    ConfigError on an address that is not allowed, RunError where it cannot be bound.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        endpoint: str,
        num_workers: int,
        on_kill: Callable[[int], None],
        keys: ServerKeys | None = None,
    ) -> None:
        super().__init__("worker coordinator")
        check_endpoint(endpoint, keys)
        self.endpoint = endpoint
        self.config, self.num_workers = config, num_workers
        self._keys, self._on_kill = keys, on_kill
        self._events: deque[Event] = deque()
        self._released: int | None = None
        now, above = time.perf_counter(), time.time_ns() // 1_000_000
        workers = {worker: WorkerState(phase=Phase.BUSY, reported_s=now) for worker in range(num_workers)}
        # Above all numbers of an earlier coordinator.
        self._state = CoordinatorState(config=config, term=above, seq=above, workers=workers)
        self._start()

    def rollout_started(self, rl_step: int) -> None:
        """Note that RL step `rl_step` generates; every worker counts as busy until it reports otherwise."""
        self._tell(RolloutStarted(rl_step=rl_step))

    def rollout_ended(self, rl_step: int) -> float:
        """Take all devices back; return the seconds waited until no trainer holds one any more.

        RunError where the coordinator's thread has failed, before or meanwhile.
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
        """Note that the process of this worker's trainer has ended. Call it before another one starts in its place."""
        self._tell(WorkerGone(worker=worker))

    @property
    def term(self) -> int:
        """The term of the newest training period."""
        return self._state.term

    def trains(self, worker: int) -> bool:
        """Return True if this worker's trainer was ordered to train, and has not yielded since."""
        return self._state.workers[worker].phase in (Phase.TRAINING, Phase.STOPPING)

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
        while self._events:
            self._advance(self._events.popleft())
        while (due_s := wakeup_s(self._state)) <= time.perf_counter():
            self._advance(Tick())
        return due_s - time.perf_counter()

    def _process(self, frames: Sequence[zmq.Frame]) -> None:
        report = decode_report(frames[1].bytes) if len(frames) == 2 else None
        if report is None or report.worker >= self.num_workers or frames[0].bytes != identity(report.worker):
            return
        if self._keys is None or frames[1].get("User-Id") == self._keys.workers[report.worker].decode():
            self._advance(report)

    def _advance(self, event: Event) -> None:
        self._state, commands = advance(self._state, event, time.perf_counter())
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
