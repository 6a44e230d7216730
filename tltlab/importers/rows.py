"""Records of files: JSON Lines, JSON, CSV or Parquet, packed or not, each with its place in the file for faults."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tltlab.config import shown
from tltlab.errors import TraceError
from tltlab.files import MOST_JSON_BYTES, open_input, parse_json
from tltlab.traces.storage import MOST_ROWS, check_parquet

PACKED = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip")
TABLES = (".csv", ".tsv", ".tab")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", *TABLES)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record: its fields, and where it stands ("line 3", "row 0")."""

    file: str
    place: str
    fields: Mapping[str, Any]


def ending(path: Path) -> str:
    """Return what a file's name says it is, ".jsonl" for `1.jsonl.gz`: the last ending that is not one of PACKED.

    >>> ending(Path("v1.2/lengths.CSV.zst")), ending(Path("run"))
    ('.csv', '')
    """
    return next((suffix for suffix in map(str.lower, path.suffixes[::-1]) if suffix not in PACKED), "")


def stem(path: Path) -> str:
    """Return a file's name without `ending` and what says how it is packed."""
    name = path.name
    while (suffix := Path(name).suffix) and (suffix.lower() in PACKED or suffix.lower() in RECORDS):
        name = name[: -len(suffix)]
    return name


def open_unpacked(path: Path) -> BinaryIO:
    """Open a file, unpacked where its first bytes are those of gzip, zstd, bz2, xz, lz4 or zip. Raises OSError.

    What is read later raises OSError too; the way back, `seek(0)`, unpacks anew.
    """
    file = open_input(path)
    head = file.peek(6)[:6]
    if head.startswith(b"PK\x03\x04"):
        return _zip_member(file)
    return file if (how := _packing(head)) is None else io.BufferedReader(_Unpacked(file, how))


def _packing(head: bytes) -> str | None:
    signs = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x04\x22\x4d\x18": "lz4"}
    return next((how for sign, how in signs.items() if head.startswith(sign)), None)


def _zip_member(file: IO[bytes]) -> BinaryIO:
    try:
        archive = zipfile.ZipFile(file)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) == 1:
            return io.BufferedReader(archive.open(names[0]))  # type: ignore[arg-type]
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise OSError(f"it cannot be unpacked: {error}") from error
    raise OSError(
        f"it is an archive of {len(names)} files, as Excel, torch.save and numpy.savez write: save it as CSV, JSON or "
        "Parquet"
    )


class _Unpacked(io.RawIOBase):
    """What is in a packed file."""

    def __init__(self, file: IO[bytes], how: str) -> None:
        self._file, self._how, self._at = file, how, 0
        self._open()

    def _open(self) -> None:
        openers: dict[str, Callable[[Any], Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
        arrow = partial(pa.input_stream, compression=self._how)
        self._stream = openers.get(self._how, arrow)(self._file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        if (offset, whence) == (0, 0):
            self._file.seek(0)
            self._at = 0
            self._open()
        elif (offset, whence) not in ((self._at, 0), (0, 1)):
            raise OSError("a packed file is read from its start")
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # each way of packing has errors of its own
            raise OSError(f"it cannot be unpacked: {error}") from error
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def rows_of(path: Path) -> Iterator[Row]:
    """The records of a file, in order, one in memory at a time where the format allows.

    A Parquet file; a CSV with a header, whose cells are numbers where they look like it; JSON Lines; a JSON list of
    objects; one JSON object; or a JSON table, `{"columns": [...], "data": [[...], ...]}`, whose rows are the records.
    Blank lines are skipped. Raises TraceError.
    """
    if ending(path) == ".parquet":
        yield from _parquet_rows(path)
        return
    if ending(path) in TABLES:
        frame = table_of(path)
        for line, *cells in frame.itertuples():
            fields = dict(zip(frame.columns, map(_cell, cells), strict=True))
            yield Row(file=str(path), place=f"line {line}", fields=fields)
        return
    try:
        with io.TextIOWrapper(open_unpacked(path), encoding="utf-8-sig") as file:
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
        if number > MOST_ROWS:
            raise TraceError(f"{path}: more than {MOST_ROWS:,} lines, the most that are read")
        if not line:
            return
        yield number, line


def table_of(path: Path, most_bytes: int | None = None) -> pd.DataFrame:
    """Return a CSV's cells as text, indexed by line; c0, c1, ... are columns without a header. Raises TraceError.

    With `most_bytes` only lines in so many bytes at its start are read, where these can be understood without the rest.

    Between cells is a comma; where the first line has none, a semicolon, a tab or a bar if it has that.
    """
    try:
        with open_unpacked(path) as file:
            data = file.read(most_bytes or MOST_JSON_BYTES + 1)
        if most_bytes is not None and len(data) == most_bytes:
            data = data[: data.rfind(b"\n") + 1]
            if not data or data.count(b'"') % 2:
                return table_of(path)
        if len(data) > MOST_JSON_BYTES:
            raise OSError(f"it has more than {MOST_JSON_BYTES >> 20} MiB, the most that is read")
        if (lines := data.count(b"\n")) > MOST_ROWS:
            raise OSError(f"it has {lines:,} lines, and at most {MOST_ROWS:,} are read")
        frame = _csv(data, ",")
        first = str(frame.iloc[0, 0]) if frame.shape[1] == 1 else ""
        if separator := next((mark for mark in ";\t|" if mark in first), None):
            frame = _csv(data, separator)
    except pd.errors.EmptyDataError as error:
        raise TraceError(f"{path}: empty; wanted one response length per line") from error
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: not a CSV of response lengths: {error}") from error
    frame = pd.DataFrame({name: cells.str.strip() for name, cells in frame.items()})
    frame.index = frame.index + 1
    frame = frame[(frame != "").any(axis=1)]
    if len(frame) and pd.to_numeric(frame.iloc[0], errors="coerce").isna().all():
        frame.columns = pd.Index(frame.iloc[0].astype(object))
        frame = frame.iloc[1:]
    else:
        frame.columns = pd.Index([f"c{i}" for i in range(frame.shape[1])])
    return frame


def _csv(data: bytes, separator: str) -> pd.DataFrame:
    return pd.read_csv(
        io.BytesIO(data), header=None, dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig",
        sep=separator,
    )  # fmt: skip


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


@contextmanager
def _unpacked_parquet(path: Path) -> Iterator[Path]:
    """The checked file itself, or within the block a copy of what is packed in it."""
    if path.suffix.lower() not in PACKED:
        check_parquet(path)
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="tltlab-", suffix=".parquet") as copy, open_unpacked(path) as file:
        remaining = MOST_JSON_BYTES
        while block := file.read(1 << 20):
            if (remaining := remaining - len(block)) < 0:
                raise OSError(f"it has more than {MOST_JSON_BYTES >> 20} MiB, the most that is read")
            copy.write(block)
        copy.flush()
        check_parquet(Path(copy.name))
        yield Path(copy.name)


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with _unpacked_parquet(path) as place, pq.ParquetFile(place) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    yield Row(file=str(path), place=f"row {number}", fields=fields)
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a readable Parquet file: {error}") from error
