"""The records of a dump, JSON Lines, JSON or Parquet, each with its place in the file for faults."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pandas.io.common import get_handle, infer_compression  # type: ignore[import-not-found]

from tltlab.config import shown
from tltlab.errors import TraceError
from tltlab.files import MOST_JSON_BYTES, open_input, parse_json
from tltlab.traces.storage import MOST_ROWS, check_parquet

_MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record: its fields, and where it stands ("line 3", "row 0")."""

    file: str
    place: str
    fields: Mapping[str, Any]

    def fault(self, field: str, message: str) -> NoReturn:
        raise TraceError(f"{self.file}, {self.place}, field {field}: {message}")

    def find(self, names: Sequence[str]) -> str | None:
        """The first of some names that is a field with a value."""
        return next((name for name in names if self.fields.get(name) is not None), None)

    def require(self, names: Sequence[str], subject: str) -> str:
        """The first of some names that is a field; the fault lists what is there."""
        if (name := self.find(names)) is None:
            fields = ", ".join(map(str, self.fields))
            raise TraceError(
                f"{self.file}, {self.place}: no {subject}; wanted a field {' or '.join(names)}, there are: {fields}"
            )
        return name

    def whole(self, field: str, at_least: int = 0) -> int:
        """A whole number; 12.0 is one, true and "12" are none."""
        value = self.fields.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value <= _MOST:
            whole = int(value)
            if whole == value:
                return whole
        return self.fault(field, f"got {shown(value)}, wanted a whole number >= {at_least}")

    def number(self, field: str) -> float | None:
        """A finite number; None for null and NaN, which is how Python writes an unknown one; true is 1."""
        value = self.fields.get(field)
        if value is None or value != value:
            return None
        try:
            number = float(value) if isinstance(value, int | float) else math.inf
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fault(field, f"got {shown(value)}, wanted a number")
        return number

    def text(self, field: str) -> str:
        """A text, or the contents of a list of chat messages one after the other."""
        value = self.fields.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in value):
            return "\n".join(message["content"] for message in value)
        return self.fault(field, f"got {shown(value)}, wanted a text")


def rows_of(path: Path) -> Iterator[Row]:
    """The records of a dump file, in order, one in memory at a time where the format allows.

    A Parquet file; a CSV with a header, packed as its name says, whose cells are numbers where they look like it; JSON
    Lines; a JSON list of objects; one JSON object; or a JSON table, `{"columns": [...], "data": [[...], ...]}`, whose
    rows are the records.
    Blank lines are skipped. Raises TraceError.
    """
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    if ".csv" in path.suffixes:
        yield from _csv_rows(path)
        return
    try:
        with io.TextIOWrapper(open_input(path), encoding="utf-8-sig") as file:
            lines = ((n, line) for n, line in _lines(file, path) if line.strip())
            number, line = next(lines, (0, ""))
            if not line:
                raise TraceError(f"{path}: empty; wanted one JSON object per line")
            try:
                first = parse_json(line)
            except ValueError as error:
                file.seek(0)
                try:
                    first = parse_json(file.read(MOST_JSON_BYTES))
                except ValueError:
                    raise TraceError(f"{path}, line {number}: not JSON (cut off?): {error}") from error
            yield from _json_rows(path, f"line {number}", first)
            for number, line in lines:
                try:
                    value = parse_json(line)
                except ValueError as error:
                    raise TraceError(f"{path}, line {number}: not JSON (cut off?): {error}") from error
                yield from _json_rows(path, f"line {number}", value)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file and their numbers from 1 on. TraceError for one that is too long to be a record."""
    for number in count(1):
        line = file.readline(MOST_JSON_BYTES + 1)
        if len(line) > MOST_JSON_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MOST_JSON_BYTES >> 20} MiB, the most that is read")
        if not line:
            return
        yield number, line


def unpack(path: Path) -> bytes:
    """Return the content of a file, unpacked as its name says. OSError where that is more than may be read."""
    compression = infer_compression(path, "infer")
    try:
        with open_input(path) as file, get_handle(file, "rb", is_text=False, compression=compression) as handles:
            data: bytes = handles.handle.read(MOST_JSON_BYTES + 1)
    except OSError:
        raise
    except Exception as error:  # each way of packing has errors of its own
        raise OSError(f"it cannot be unpacked: {error}") from error
    if len(data) > MOST_JSON_BYTES:
        raise OSError(f"it has more than {MOST_JSON_BYTES >> 20} MiB, the most that is read")
    if (lines := data.count(b"\n")) > MOST_ROWS:
        raise OSError(f"it has {lines:,} lines, and at most {MOST_ROWS:,} are read")
    return data


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        binary = open_input(path) if path.suffix == ".csv" else io.BytesIO(unpack(path))
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(line for _, line in _lines(file, path))
            for cells in reader:
                fields = {name: _cell(cell) for name, cell in cells.items() if name is not None}
                yield Row(file=str(path), place=f"line {reader.line_num}", fields=fields)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _cell(text: str | None) -> str | float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def _json_rows(path: Path, place: str, value: Any) -> Iterator[Row]:
    if isinstance(value, dict) and isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        names = value["columns"]
        for number, cells in enumerate(value["data"]):
            if not isinstance(cells, list) or len(cells) != len(names):
                raise TraceError(f"{path}, {place}, data {number}: got {shown(cells)}, wanted {len(names)} cells")
            yield Row(file=str(path), place=f"row {number}", fields=dict(zip(names, cells, strict=True)))
    elif isinstance(value, dict):
        yield Row(file=str(path), place=place, fields=value)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _json_rows(path, f"{place}, item {number}", item)
    else:
        raise TraceError(f"{path}, {place}: got {shown(value)}, wanted a JSON object")


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        check_parquet(path)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    yield Row(file=str(path), place=f"row {number}", fields=fields)
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a readable Parquet file: {error}") from error
