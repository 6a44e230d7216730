"""A worker's link to the coordinator: `tltlab.coordination.agent.WorkerAgent` behind a ZeroMQ DEALER, in a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import zmq

from tltlab.coordination.agent import Hold, Order, WorkerAgent
from tltlab.coordination.messages import WorkerReport

from .keys import ClientKeys, check_endpoint
from .thread import SocketThread, identity, prepare
from .wire import decode_command, encode


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
