"""One-way transfer from an engine to the trainer next to it: the engine's status, and its responses.

A rollout never waits for its trainer: a message that would have to wait is dropped and counted, and so is everything
while no trainer listens. The status is repeated every `REPEAT_S`, so that a new trainer receives it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
import zmq

from .sequences import TrainingSequence

REPEAT_S = 0.2
QUIET_MS = 100
"""Milliseconds without a message after which nothing counts as under way; shorter than `REPEAT_S`."""
MAX_WAITING = 256
"""Most messages in the queue; further ones are dropped."""


class _Status(msgspec.Struct, tag=True, frozen=True):
    rl_step: int
    busy: bool
    rollout_s: float


class _Sequence(msgspec.Struct, tag=True, frozen=True):
    """Header of a sequence's frames: int32 tokens, then hidden and auxiliary states in `dtype`."""

    key: tuple[int, str, int, int]
    first_position: int
    prompt_tokens: int
    dtype: str
    width: int
    aux_width: int


_decoder = msgspec.msgpack.Decoder(_Status | _Sequence)
_encode = msgspec.msgpack.Encoder().encode
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class Feed(Protocol):
    """An engine's end of the connection to a trainer."""

    def status(self, rl_step: int, *, busy: bool) -> None:
        """Set the status: the engine has requests of `rl_step` from now on, or none any more."""


class NullFeed:
    """The end of an engine without a trainer."""

    def status(self, rl_step: int, *, busy: bool) -> None: ...


class SequenceSender:
    """An end for sequences alone; safe to use from several threads. Pickled, it is another end of the same address."""

    def __init__(self, endpoint: str) -> None:
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
        hidden, aux = sequence.hidden.contiguous(), sequence.aux
        header = _Sequence(
            key=sequence.key,
            first_position=sequence.first_position,
            prompt_tokens=sequence.prompt_tokens,
            dtype=str(hidden.dtype),
            width=hidden.shape[1],
            aux_width=0 if aux is None else aux.shape[1],
        )
        frames = [_encode(header), _bytes(sequence.token_ids.to(torch.int32)), _bytes(hidden)]
        with self._lock:
            self._send(frames if aux is None else [*frames, _bytes(aux.to(hidden.dtype))])

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    def _send(self, frames: list[Any]) -> None:
        """Call with the lock held: a status that overtakes a newer one would be taken for the newest."""
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.dropped += 1


class FeedSender(SequenceSender):
    """The engine's end; safe to use from several threads."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._rl_step, self._busy, self._began = -1, True, time.perf_counter()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="tltlab-feed")
        self._thread.start()

    def status(self, rl_step: int, *, busy: bool) -> None:
        with self._lock:
            if rl_step != self._rl_step:
                self._began = time.perf_counter()
            self._rl_step, self._busy = rl_step, busy
            self._send_status()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        super().close()

    def _send_status(self) -> None:
        since = time.perf_counter() - self._began
        self._send([_encode(_Status(rl_step=self._rl_step, busy=self._busy, rollout_s=since))])

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT_S):
            with self._lock:
                self._send_status()


class FeedReceiver:
    """The trainer's end: calls `on_status(rl_step, busy, rollout_s)` and `on_sequence(sequence)` from its own thread.

    `rollout_s` is the time since the rollout began. An exception in a callback ends the thread, and `check` raises it.
    """

    def __init__(
        self,
        endpoint: str,
        on_status: Callable[[int, bool, float], None],
        on_sequence: Callable[[TrainingSequence], None],
    ) -> None:
        self.malformed = 0
        self._failure: Exception | None = None
        self._on_status, self._on_sequence = on_status, on_sequence
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        self._socket.bind(endpoint)
        self._silence = threading.Condition()
        self._silences = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True, name="tltlab-feed")
        self._thread.start()

    def check(self) -> None:
        """Raise the exception that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def settle(self, timeout_s: float) -> bool:
        """Wait until all messages sent before this call are processed; return False on time-out."""
        # The first silence may have begun before the call.
        with self._silence:
            silences = self._silences
            return self._silence.wait_for(lambda: self._silences > silences + 1, timeout_s)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _receive(self) -> None:
        try:
            while not self._closed.is_set():
                if self._socket.poll(QUIET_MS):
                    self._deliver(self._socket.recv_multipart())
                    continue
                with self._silence:
                    self._silences += 1
                    self._silence.notify_all()
        except Exception as failure:  # raised again by `check`, in the trainer's own loop
            self._failure = failure

    def _deliver(self, frames: list[bytes]) -> None:
        try:
            message = _decoder.decode(frames[0])
            content = message if isinstance(message, _Status) else _sequence(message, frames)
        except (msgspec.DecodeError, ValueError, KeyError, IndexError, RuntimeError):
            self.malformed += 1
            return
        if isinstance(content, _Status):
            self._on_status(content.rl_step, content.busy, content.rollout_s)
        else:
            self._on_sequence(content)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes without a copy; bfloat16 has no NumPy type of its own."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _sequence(header: _Sequence, frames: list[bytes]) -> TrainingSequence:
    dtype = _DTYPES[header.dtype]
    token_ids = torch.frombuffer(bytearray(frames[1]), dtype=torch.int32)
    hidden = torch.frombuffer(bytearray(frames[2]), dtype=dtype).view(-1, header.width)
    aux = torch.frombuffer(bytearray(frames[3]), dtype=dtype).view(-1, header.aux_width) if header.aux_width else None
    if len(hidden) + 1 != len(token_ids) or (aux is not None and len(aux) != len(hidden)):
        raise ValueError("a sequence's frames do not fit together")
    return TrainingSequence(
        key=header.key,
        token_ids=token_ids,
        hidden=hidden,
        aux=aux,
        first_position=header.first_position,
        prompt_tokens=header.prompt_tokens,
    )
