"""The coordinator's messages as bytes: msgpack of tagged records, with a version.

What does not decode is nobody's message and is dropped: `tltlab.coordination` repeats what was lost.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from tltlab.coordination.messages import StopTraining, Train, WorkerReport

MAX_BYTES = 1 << 16
"""A longer message is not read; a `Train` of 1,000 members takes 5 kB."""

_VERSION = 1

T = TypeVar("T")

# Far above any clock in milliseconds, and far enough below 2 ** 64 that counting on from it still encodes.
Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class _Report(Struct, frozen=True, kw_only=True, tag="report", forbid_unknown_fields=True):
    version: Literal[1]
    worker: Number
    seq: Number
    rl_step: Annotated[int, Meta(ge=-1, le=1 << 53)]
    busy: bool
    term: Number | None
    acked: Number
    incarnation: Number


class _Train(Struct, frozen=True, kw_only=True, tag="train", forbid_unknown_fields=True):
    version: Literal[1]
    worker: Number
    seq: Number
    term: Number
    group: Number
    rl_step: Number
    leader: Number
    members: Annotated[tuple[Number, ...], Meta(min_length=1)]
    incarnation: Number


class _Stop(Struct, frozen=True, kw_only=True, tag="stop", forbid_unknown_fields=True):
    version: Literal[1]
    worker: Number
    seq: Number
    term: Number


_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(_Report)
_commands = msgspec.msgpack.Decoder(_Train | _Stop)


def encode(message: WorkerReport | Train | StopTraining) -> bytes:
    """The message as bytes, under this program's version.

    >>> decode_command(encode(StopTraining(worker=3, seq=17, term=2)))
    StopTraining(worker=3, seq=17, term=2)
    >>> decode_report(encode(StopTraining(worker=3, seq=17, term=2))) is None
    True
    """
    kind = {WorkerReport: _Report, Train: _Train, StopTraining: _Stop}[type(message)]
    fields = {name: getattr(message, name) for name in message.__slots__}
    return _encoder.encode(kind(version=_VERSION, **fields))


def decode_report(data: bytes) -> WorkerReport | None:
    """The report, or None where this is none: garbled, too long, of another kind or version."""
    found = _decode(_reports, data)
    return None if found is None else WorkerReport(**_fields(found))


def decode_command(data: bytes) -> Train | StopTraining | None:
    """The command, or None where this is none."""
    found = _decode(_commands, data)
    if found is None:
        return None
    return Train(**_fields(found)) if isinstance(found, _Train) else StopTraining(**_fields(found))


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T | None:
    if len(data) > MAX_BYTES:
        return None
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _fields(found: Struct) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__ if name != "version"}
