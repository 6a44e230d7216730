"""A thread that owns a ZeroMQ socket, for the coordinator and for each worker's agent."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import zmq

from tltlab.errors import RunError

from .wire import MAX_BYTES

_AT_ONCE = 256
"""Messages processed before timers are checked again."""

_LINGER_MS = 200

_CLOSE_S = 10.0
"""Most seconds for a thread to end."""


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
