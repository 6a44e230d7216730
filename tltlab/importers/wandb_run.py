"""The history in `run-ID.wandb`, which W&B's offline runs leave; read without wandb, which need not be installed.

The file is a log as LevelDB writes them: blocks of 32 KiB with records, or pieces of them, each after its checksum (4
bytes), length (2) and type (1: whole, 2 to 4: first, middle and last piece). A record is a protobuf message `Record` of
wandb/proto/wandb_internal.proto: its field 2 is a row of the history, with items (1) of a key (1, or 2 in parts) and a
value in JSON (16), and a step (2) with a number (1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tltlab.errors import TraceError
from tltlab.files import open_input, parse_json

_MAGIC = b":W&B"
_BLOCK = 1 << 15
_HEADER = 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows that a run logged, its steps under `_step`; up to where the file of a killed run ends.

    Raises TraceError for another file, OSError.
    """
    for record in _records(path):
        for number, row in _fields(record):
            if number != 2 or not isinstance(row, bytes):
                continue
            logged: dict[str, Any] = {}
            for kind, part in _fields(row):
                if kind == 2 and isinstance(part, bytes):
                    logged.setdefault("_step", dict(_fields(part)).get(1, 0))
                elif kind == 1 and isinstance(part, bytes):
                    item = list(_fields(part))
                    parts = [name for n, name in item if n in (1, 2) and isinstance(name, bytes) and name]
                    values = [value for n, value in item if n == 16]
                    if parts and values:
                        logged[b".".join(parts).decode("utf-8", "replace")] = _value(values[-1])
            yield logged


def _records(path: Path) -> Iterator[bytes]:
    with open_input(path) as file:
        block = file.read(_BLOCK)
        if not block.startswith(_MAGIC):
            raise TraceError(f"{path}: not a run of W&B: it does not begin with {_MAGIC.decode()}")
        at, pieces = _HEADER, bytearray()
        while block:
            while at + _HEADER <= len(block):
                size, kind = int.from_bytes(block[at + 4 : at + 6], "little"), block[at + 6]
                piece = block[at + _HEADER : at + _HEADER + size]
                at += _HEADER + size
                if len(piece) < size or not _WHOLE <= kind <= _LAST:
                    return
                if kind in (_WHOLE, _FIRST):
                    pieces.clear()
                pieces += piece
                if kind in (_WHOLE, _LAST):
                    yield bytes(pieces)
            block, at = file.read(_BLOCK), 0


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protobuf message: whole numbers, or bytes of what has a length or a fixed size."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            return
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while at < len(message) and shift < 64:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            break
    return value, at


def _value(text: int | bytes) -> Any:
    """What JSON says; None for what is none."""
    try:
        return parse_json(text) if isinstance(text, bytes) else None
    except ValueError:
        return None
