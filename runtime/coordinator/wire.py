"""The coordinator's messages as bytes: msgpack of tagged records, with a version.

Data that do not decode are dropped: `tltlab.coordination` repeats lost messages.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from tltlab.coordination.messages import StopTraining, Train, WorkerReport

MAX_BYTES = 1 << 16
"""A longer message is not read; a `Train` of 1,000 members takes 5 kB."""

_VERSION = 1

# Far above any clock in milliseconds, and far enough below 2 ** 64 that increments still encode.
Number = Annotated[int, Meta(ge=0, le=1 << 53)]


def _struct(tag: str, message: type, **types: Any) -> Any:
    """Return the message's fields as sent: numbers unless `types` has another type."""
    names = [field.name for field in dataclasses.fields(message)]
    fields = [("version", Literal[1]), *((name, types.get(name, Number)) for name in names)]
    return msgspec.defstruct(tag, fields, tag=tag, frozen=True, kw_only=True, forbid_unknown_fields=True)


_STRUCTS = {
    WorkerReport: _struct(
        "report", WorkerReport, rl_step=Annotated[int, Meta(ge=-1, le=1 << 53)], busy=bool, term=Number | None
    ),
    Train: _struct("train", Train, members=Annotated[tuple[Number, ...], Meta(min_length=1)]),
    StopTraining: _struct("stop", StopTraining),
}
_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(_STRUCTS[WorkerReport])
_commands = msgspec.msgpack.Decoder(_STRUCTS[Train] | _STRUCTS[StopTraining])


def encode(message: WorkerReport | Train | StopTraining) -> bytes:
    """Return the message as bytes, under this program's version.

    >>> decode_command(encode(StopTraining(worker=3, seq=17, term=2)))
    StopTraining(worker=3, seq=17, term=2)
    >>> decode_report(encode(StopTraining(worker=3, seq=17, term=2))) is None
    True
    """
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return _encoder.encode(_STRUCTS[type(message)](version=_VERSION, **fields))


def decode_report(data: bytes) -> WorkerReport | None:
    """Return the report, or None for anything else: garbled, too long, of another kind or version."""
    return cast(WorkerReport | None, _decode(_reports, data))


def decode_command(data: bytes) -> Train | StopTraining | None:
    """Return the command, or None for anything else."""
    return cast(Train | StopTraining | None, _decode(_commands, data))


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    if len(data) > MAX_BYTES:
        return None
    try:
        struct = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    message = next(message for message, of_it in _STRUCTS.items() if type(struct) is of_it)
    return message(**{name: getattr(struct, name) for name in struct.__struct_fields__ if name != "version"})
