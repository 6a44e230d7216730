"""One-way transfer of an engine's responses, with their hidden states, to the trainer next to it.

Not by Ray: under tensor parallelism the states are in a process of vLLM's own. A rollout never waits for its trainer: a
sequence that would have to wait is dropped and counted, and so is each one while no trainer listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import zmq

from .sequences import TrainingSequence

QUIET_MS = 100
"""Milliseconds without a message after which nothing counts as under way."""
MAX_WAITING = 256
"""Most messages in the queue; further ones are dropped."""


class _Sequence(msgspec.Struct, tag=True, frozen=True):
    """Header of a sequence's frames: int32 tokens, then hidden and auxiliary states in `dtype`."""

    key: tuple[int, str, int, int]
    first_position: int
    prompt_tokens: int
    dtype: str
    width: int
    aux_width: int


_decoder = msgspec.msgpack.Decoder(_Sequence)
_encode = msgspec.msgpack.Encoder().encode
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class SequenceSender:
    """The engine's end; safe to use from several threads. Pickled, it is another end of the same address."""

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
        frames: list[Any] = [_encode(header), _bytes(sequence.token_ids.to(torch.int32)), _bytes(hidden)]
        if aux is not None:
            frames.append(_bytes(aux.to(hidden.dtype)))
        with self._lock:
            try:
                self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
            except zmq.Again:
                self.dropped += 1

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class SequenceReceiver:
    """The trainer's end: `receive` passes sequences to `on_sequence` until `close`, which may come from any thread."""

    def __init__(self, endpoint: str, on_sequence: Callable[[TrainingSequence], None]) -> None:
        self.malformed = 0
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
                    self._deliver(self._socket.recv_multipart())
                    continue
                with self._silence:
                    self._silences += 1
                    self._silence.notify_all()
        finally:
            self._socket.close(linger=0)

    def _deliver(self, frames: list[bytes]) -> None:
        try:
            sequence = _sequence(_decoder.decode(frames[0]), frames)
        except (msgspec.DecodeError, ValueError, KeyError, IndexError, RuntimeError):
            self.malformed += 1
            return
        self._on_sequence(sequence)


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
