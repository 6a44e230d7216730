"""The worker coordinator behind a ZeroMQ ROUTER, and each worker's agent behind a DEALER, both in threads."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tltlab.coordination.agent import Hold, Order, WorkerAgent
from tltlab.coordination.machine import CoordinatorConfig, CoordinatorState, Phase, WorkerState, advance, wakeup_s
from tltlab.coordination.messages import (
    Command,
    Event,
    Kill,
    Released,
    RolloutEnded,
    RolloutStarted,
    Tick,
    WorkerGone,
    WorkerReport,
)
from tltlab.errors import RunError

from .keys import ClientKeys, ServerKeys, check_endpoint
from .wire import MAX_BYTES, decode_command, decode_report, encode

_AT_ONCE = 256
"""Messages processed before timers are checked again."""

_LINGER_MS = 200

_CLOSE_S = 10.0
"""Most seconds for a thread to end."""

_LATE_S = 30.0
"""Seconds that a live thread may be late before the driver gives it up."""

log = logging.getLogger(__name__)


class SocketThread(ABC):
    """Runs `_open`, then `_turn` and `_process` as they are due, in a daemon thread, until `close`.

    Subclasses guard state shared with callers by `_changed`. An exception in the thread ends it, and `_check` raises it
    as RunError.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._cleanup = contextlib.ExitStack()
        self._failure: BaseException | None = None
        self._closing = self._over = False
        self._opened = threading.Event()
        self._woken, self._bell = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._bell, False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """Return the socket, bound or connected; further resources go to `_cleanup`."""

    @abstractmethod
    def _turn(self) -> float:
        """Do all work that is due; return the seconds until more is due."""

    @abstractmethod
    def _process(self, frames: Sequence[zmq.Frame]) -> None:
        """Process a message; an invalid one is dropped."""

    def close(self) -> None:
        """End the thread and free the address. May be called again. A thread that hangs is abandoned."""
        self._closing = True
        self._wake()
        self._thread.join(_CLOSE_S)

    def _start(self) -> None:
        self._thread.start()
        self._opened.wait()
        self._check()

    def _check(self) -> None:
        """Raise RunError if the thread has failed, or was closed."""
        if isinstance(self._failure, RunError):
            raise RunError(*self._failure.args) from self._failure
        if self._failure is not None:
            raise RunError(f"the {self._thread.name} failed: {self._failure!r}") from self._failure
        if self._closing:
            raise RunError(f"the {self._thread.name} was closed")

    def _wake(self) -> None:
        # A full pipe wakes it as well.
        with self._changed, contextlib.suppress(BlockingIOError):
            if not self._over:
                os.write(self._bell, b"!")

    def _send(self, *frames: bytes) -> None:
        """Send, or drop a message that cannot be sent at once: every message is repeated until it is answered."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._open(context)
            self._opened.set()
            self._serve()
        except BaseException as failure:
            self._failure = failure
        finally:
            self._cleanup.close()
            context.destroy(linger=_LINGER_MS)
            with self._changed:
                self._over = True
                os.close(self._woken)
                os.close(self._bell)
                self._changed.notify_all()
            self._opened.set()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._closing:
            wait_s = self._turn()
            ready = dict(poller.poll(None if math.isinf(wait_s) else max(0, math.ceil(wait_s * 1000))))
            if self._woken in ready:
                os.read(self._woken, 4096)
            for _ in range(_AT_ONCE if self._socket in ready else 0):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._process(frames)


def prepare(socket: zmq.Socket[bytes]) -> None:
    """Set options of both ends: bounded messages, and broken connections detected within seconds."""
    socket.setsockopt(zmq.MAXMSGSIZE, 4 * MAX_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def identity(worker: int) -> bytes:
    """The name of a worker's socket, the same for each of its processes."""
    return b"worker-%d" % worker


class CoordinatorClient(SocketThread):
    """For the process that trains on worker `worker`: reports and receives orders while the caller trains.

    Without a coordinator, at the start or later, it waits: until then the order is to hold. Reconnects by itself. All
    methods may be called from any thread; they raise RunError where the link has failed or was closed.

    A trainer's loop::

        order = client.wait_for_order(1.0)
        if isinstance(order, Train) and client.trainer(order.term):
            while client.order == order:
                ...  # one optimizer step
            client.trainer(None)  # or join the changed group, if only `group` differs
    """

    def __init__(self, endpoint: str, worker: int, keys: ClientKeys | None = None, *, heartbeat_s: float = 1.0) -> None:
        super().__init__(f"link of worker {worker} to the coordinator")
        check_endpoint(endpoint, keys)
        self.endpoint, self.worker, self._keys = endpoint, worker, keys
        self._agent = WorkerAgent(worker=worker, first_seq=time.time_ns() // 1_000_000, heartbeat_s=heartbeat_s)
        self._outbox: deque[WorkerReport] = deque()
        self.order_since = time.perf_counter()
        """Time of the newest order's arrival."""
        self._start()

    @property
    def order(self) -> Order:
        """The trainer's present order: `Hold` or `Train`."""
        with self._changed:
            self._check()
            return self._agent.order

    def wait_for_order(self, timeout_s: float) -> Order:
        """Return the order once it is not `Hold`, or after `timeout_s`."""

        def ready() -> bool:
            return self._agent.order != Hold() or self._failure is not None or self._closing

        with self._changed:
            self._changed.wait_for(ready, timeout_s)
            self._check()
            return self._agent.order

    def requests(self, rl_step: int, busy: bool) -> None:
        """Report if this worker's engine has requests of RL step `rl_step` left; a busy worker does not train."""
        with self._changed:
            self._report(self._agent.requests(rl_step, busy, time.perf_counter()))

    def trainer(self, term: int | None) -> bool:
        """Take the device for `term`, or release it; return True on success.

        False where the order has changed in the meantime: the device must not be used.
        """
        with self._changed:
            self._report(self._agent.trainer(term, time.perf_counter()))
            return self._agent.held == term

    def failed(self) -> None:
        """Report that the trainer broke or cannot follow its order; its device is free. See `WorkerAgent.failed`."""
        with self._changed:
            self._report(self._agent.failed(time.perf_counter()))

    def _report(self, reports: Sequence[WorkerReport]) -> None:
        self._check()
        self._outbox.extend(reports)
        self._changed.notify_all()
        self._wake()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        prepare(socket)
        socket.setsockopt(zmq.IDENTITY, identity(self.worker))
        # Reports to an absent coordinator are soon outdated.
        socket.setsockopt(zmq.SNDHWM, 8)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
            socket.curve_serverkey = self._keys.server
        socket.connect(self.endpoint)
        return socket

    def _turn(self) -> float:
        now = time.perf_counter()
        with self._changed:
            self._outbox.extend(self._agent.tick(now))
            reports = list(self._outbox)
            self._outbox.clear()
            due_s = self._agent.wakeup_s
        for report in reports:
            self._send(encode(report))
        return due_s - now

    def _process(self, frames: Sequence[zmq.Frame]) -> None:
        command = decode_command(frames[0].bytes) if len(frames) == 1 else None
        if command is None or command.worker != self.worker:
            return
        with self._changed:
            now, before = time.perf_counter(), self._agent.order
            self._outbox.extend(self._agent.receive(command, now))
            if self._agent.order != before:
                self.order_since = now
            self._changed.notify_all()


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
