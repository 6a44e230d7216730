"""One-way transfer of an engine's responses, with their hidden states, to the trainer next to it.

Not by Ray: under tensor parallelism the states are in a process of vLLM's own. A rollout never waits for its trainer: a
sequence that would have to wait is dropped and counted, and so is each one while no trainer listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from .sequences import TrainingSequence

QUIET_MS = 100
"""Milliseconds without a message after which nothing counts as under way."""
MAX_WAITING = 256
"""Most messages in the queue; further ones are dropped."""


class SequenceSender:
    """The engine's end; safe to use from several threads. Pickled, it is another end of the same address."""

    def __init__(self, endpoint: str):
        self.dropped = 0
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        # Queue nothing for an absent trainer: hidden states would pile up.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[SequenceSender], tuple[str]]:
        return SequenceSender, (self._endpoint,)

    def sequence(self, sequence: TrainingSequence) -> None:
        """Send a finished response; one without a state teaches nothing and is not sent."""
        if not sequence.num_rows:
            return
        with self._lock:
            try:
                # A view would be sent with all memory behind it.
                self._socket.send_pyobj(sequence.on_host(), zmq.NOBLOCK)
            except zmq.Again:
                self.dropped += 1


class SequenceReceiver:
    """The trainer's end: `receive` passes sequences to `on_sequence` until `close`, which may come from any thread.

    Messages are unpickled: the socket must be in a folder that is the user's alone.
    """

    def __init__(self, endpoint: str, on_sequence: Callable[[TrainingSequence], None]):
        self._on_sequence = on_sequence
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        self._socket.bind(endpoint)
        self._silence = threading.Condition()
        self._silences = 0
        self._closed = threading.Event()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all sequences sent before this call are processed; return False on time-out."""
        # The first silence may have begun before the call.
        with self._silence:
            silences = self._silences
            return self._silence.wait_for(lambda: self._silences > silences + 1, timeout_s)

    def close(self) -> None:
        self._closed.set()

    def receive(self) -> None:
        """Receive until `close`; an exception of `on_sequence` passes."""
        try:
            while not self._closed.is_set():
                if self._socket.poll(QUIET_MS):
                    self._on_sequence(self._socket.recv_pyobj())
                    continue
                with self._silence:
                    self._silences += 1
                    self._silence.notify_all()
        finally:
            self._socket.close(linger=0)
