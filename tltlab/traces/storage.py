"""One table of a trace, in memory or in Parquet files, and the rows of some RL steps of it; and writing such files."""

from __future__ import annotations

import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tltlab.arrays import Ints
from tltlab.errors import ConfigError, InputError, TraceError
from tltlab.files import LOCK, Hashing, fsync_tree, new_folder, sha256_of
from tltlab.records import frozen

from .schema import MANIFEST_FILE, TABLES, Contents, is_trace
from .validate import TablePart, check_columns, conform

MOST_ROWS = 1 << 24
"""Most rows of a table that is read as a whole, or of a row group of one that is not."""
GROUP_BYTES = 8 << 20
"""A row group holds rows of at least this many bytes in memory: small RL steps share one, since every row group costs
memory in the footer of the file."""
_ROWS_AT_ONCE = 1 << 14
"""Rows per batch when scanning `rl_step`."""
_STEPS = 2**31
"""RL steps are smaller."""
_STRING_BYTES = 16
"""Bytes of one string in memory: its offset and about a dozen characters."""


def check_parquet(path: Path) -> None:
    """OSError for a Parquet file of more rows, or values in a column, than are read at once, or that is none."""
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    with pq.ParquetFile(path) as file:
        most = file.metadata.num_rows
        # Others have as many values as rows.
        lists = {n: column.path for n, column in enumerate(file.schema) if column.max_repetition_level}
        for i in range(file.metadata.num_row_groups if lists and most <= MOST_ROWS else 0):
            # Asked for a column whose metadata are damaged Arrow ends the process, but not where it is to read it.
            next(file.iter_batches(1, row_groups=[i], columns=[*lists.values()]), None)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if most <= MOST_ROWS:
            most = max([most, *(sum(group.column(n).num_values for group in groups) for n in lists)])
    if most > MOST_ROWS:
        raise OSError(errno.EFBIG, f"it has {most:,} rows, and at most {MOST_ROWS:,} are read", str(path))


class TraceTable(ABC):
    """The rows of some RL steps of a table.

    `rl_steps` are the RL steps that have rows, ascending, `rows_per_step` how many rows each of them has. `row_bytes`
    is the memory that a row will take, about: 0 where it is in memory already.
    """

    rl_steps: Ints
    rows_per_step: Ints
    row_bytes: float = 0.0

    @property
    def num_rows(self) -> int:
        return int(self.rows_per_step.sum())

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        """The rows of some RL steps, sorted (stably) by RL step (None: all)."""
        return self.part(rl_steps).table

    @abstractmethod
    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        """The conformed rows of some RL steps (None: all), in the order in which they were written."""

    @abstractmethod
    def select(self, rl_steps: Sequence[int]) -> Self: ...


class MemoryTable(TraceTable):
    """A conformed table in memory."""

    def __init__(self, name: str, table: pa.Table):
        steps = table["rl_step"].to_numpy()
        if (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            table, steps = table.take(order), steps[order]
        self.name = name
        self._table = table
        self.rl_steps, starts = np.unique(steps, return_index=True)
        self._bounds = np.append(starts, len(steps))
        self.rows_per_step = np.diff(self._bounds)

    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        if rl_steps is None:
            return TablePart.of(self.name, self._table, self.name)
        at = np.flatnonzero(np.isin(self.rl_steps, rl_steps))
        # RL steps that lie side by side are one slice: a column keeps few chunks.
        runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []
        bounds = [(self._bounds[run[0]], self._bounds[run[-1] + 1]) for run in runs]
        table = pa.concat_tables([self._table[:0], *(self._table[start:end] for start, end in bounds)])
        return TablePart.of(self.name, table, self.name)

    def select(self, rl_steps: Sequence[int]) -> MemoryTable:
        return MemoryTable(self.name, self.load(rl_steps))


@frozen
class _File:
    """A Parquet file; `bounds` are the first rows of its row groups and the number of its rows."""

    path: Path
    metadata: pq.FileMetaData
    bounds: Ints


_Index = Ints
"""Where the rows of a table are: rows of a file's number, a row group's in it, an RL step, and how many rows it has."""


class StoredTable(TraceTable):
    """A table in Parquet files, or the rows of some RL steps in it; only row groups that hold them are read.

    Any layout of row groups will do. Reading some RL steps takes the memory of their rows and of one row group.
    """

    def __init__(self, name: str, files: Sequence[_File], index: _Index, row_bytes: float):
        self.name, self.row_bytes = name, row_bytes
        self._files, self._index = files, index
        self.rl_steps, at = np.unique(index[:, 2], return_inverse=True)
        self.rows_per_step = np.bincount(at, index[:, 3], len(self.rl_steps)).astype(np.int64)

    @classmethod
    def open(cls, name: str, paths: Sequence[Path]) -> StoredTable:
        """The table in these files, one after the other. Raises TraceError for wrong columns and RL steps."""
        files, indexes, num_bytes = [], [np.zeros((0, 4), np.int64)], 0
        for number, path in enumerate(paths):
            file, index = _indexed(name, path)
            files.append(file)
            indexes.append(np.column_stack([np.full(len(index), number), index]))
            num_bytes += sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        index = np.concatenate(indexes)
        return cls(name, files, index, max(num_bytes / max(1, index[:, 3].sum()), _fixed_bytes(name)))

    def select(self, rl_steps: Sequence[int]) -> StoredTable:
        index = self._index[np.isin(self._index[:, 2], rl_steps)]
        return StoredTable(self.name, self._files, index, self.row_bytes)

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        return MemoryTable(self.name, self.part(rl_steps).table).load(None)

    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        index = self._index if rl_steps is None else self.select(rl_steps)._index
        parts = [self._rows(self._files[number], index[index[:, 0] == number]) for number in np.unique(index[:, 0])]
        return TablePart.joined(self.name, parts)

    def _rows(self, file: _File, index: _Index) -> TablePart:
        """The conformed rows of a file that are in the index."""
        groups, at = np.unique(index[:, 1], return_inverse=True)
        sizes = file.bounds[groups + 1] - file.bounds[groups]
        partly = np.bincount(at, index[:, 3]) < sizes
        borders = np.flatnonzero(partly[1:] | partly[:-1]) + 1
        tables, rows = [], []
        # The footer of a long trace is megabytes; it is parsed once.
        with _open(file.path, file.metadata) as parquet:
            for run in np.split(np.arange(len(groups)), borders):
                columns = [name for name in TABLES[self.name].names if name in parquet.schema_arrow.names]
                table = parquet.read_row_groups(groups[run].tolist(), columns=columns)
                number = np.concatenate([np.arange(*file.bounds[group : group + 2]) for group in groups[run]])
                if partly[run].any():
                    wanted = np.flatnonzero(np.isin(_rl_steps(self.name, file.path, table), index[:, 2]))
                    # A copy, not a slice: a slice would keep the whole row group.
                    table, number = table.take(wanted), number[wanted]
                tables.append(table)
                rows.append(number)
        source = (str(file.path), np.concatenate(rows))
        return conform(TablePart(name=self.name, table=pa.concat_tables(tables), sources=(source,)))


def _indexed(name: str, path: Path) -> tuple[_File, Ints]:
    """A file, and for each of its row groups and RL steps in it how many rows there are, [n, 3]."""
    with _open(path) as parquet:
        check_columns(name, str(path), parquet.schema_arrow)
        sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
        if max(sizes, default=0) > MOST_ROWS:
            raise TraceError(
                f"{path}: a row group has {max(sizes):,} rows, and at most {MOST_ROWS:,} are read at once: write one "
                "for each RL step"
            )
        bounds = np.cumsum([0, *sizes], dtype=np.int64)
        file = _File(path=path, metadata=parquet.metadata, bounds=bounds)
        found, counts, first = [np.arange(0)], [np.arange(0)], 0
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=["rl_step"]):
            steps = _rl_steps(name, path, pa.table(batch), first)
            group = np.searchsorted(bounds, np.arange(first, first + len(steps)), side="right") - 1
            of_batch, num = np.unique(group * _STEPS + steps, return_counts=True)
            found.append(of_batch)
            counts.append(num)
            first += len(steps)
        codes, at = np.unique(np.concatenate(found), return_inverse=True)
        num_rows = np.bincount(at, np.concatenate(counts), len(codes)).astype(np.int64)
        index = np.column_stack([codes // _STEPS, codes % _STEPS, num_rows])
        return file, index


@contextmanager
def _open(path: Path, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """A Parquet file of a table; what is damaged in it is a TraceError, also within the block."""
    try:
        if not path.is_file():
            raise OSError("it is no file")
        with pq.ParquetFile(path, metadata=metadata, page_checksum_verification=True) as parquet:
            yield parquet
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not a readable Parquet file (cut off, or damaged?): {error}") from error


class ReadTable(TraceTable):
    """A stored table, or some RL steps of it, whose rows are read together when one of them is first used."""

    def __init__(self, stored: StoredTable, memory: Callable[[], MemoryTable] | None = None):
        self.rl_steps, self.rows_per_step = stored.rl_steps, stored.rows_per_step
        self._stored = stored
        self._memory = memory or cache(lambda: MemoryTable(stored.name, stored.load(None)))

    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        chosen = self.rl_steps if rl_steps is None else np.intersect1d(self.rl_steps, rl_steps)
        return self._memory().part(chosen.tolist())

    def select(self, rl_steps: Sequence[int]) -> ReadTable:
        return ReadTable(self._stored.select(rl_steps), self._memory)


def damaged(folder: Path, contents: Contents) -> list[str]:
    """The parts of a trace that are there and not what was written; in a folder `NAME/` also those that are gone."""
    sums = contents.parts or {}
    files = chain.from_iterable(contents.files_of(folder, name).items() for name in TABLES)
    return [place for place, file in files if not _is_written(file, sums.get(place))]


def _is_written(file: Path, sha256: str | None) -> bool:
    try:
        return sha256 is None or sha256_of(file) == sha256
    except OSError:
        return False


def refuse_damaged(folder: Path, contents: Contents) -> None:
    """TraceError where a part is not the one that was written."""
    if places := damaged(folder, contents):
        raise TraceError(
            f"{folder / places[0]}: not what was written: damaged, and 'tltlab trace repair' saves the rest, or "
            f"changed by hand, and then remove 'parts' (or 'sums') and 'sha256' from {MANIFEST_FILE}"
        )


class TableWriter:
    """Writes rows of a table to a Parquet file; `num_rows` are those so far, `sha256` is that of the whole file.

    Rows wait until they make a row group of `group_bytes` of memory.
    """

    def __init__(self, file: pq.ParquetWriter, group_bytes: int):
        self.num_rows = 0
        self.sha256 = ""
        self._file, self._group_bytes = file, group_bytes
        self._waiting: list[pa.Table] = []

    def append(self, table: pa.Table) -> None:
        """Add rows of the table's schema. Raises OSError."""
        self._waiting.append(table)
        self.num_rows += len(table)
        if sum(waiting.nbytes for waiting in self._waiting) >= self._group_bytes:
            self.end_group()

    def end_group(self) -> None:
        """Write the rows that wait."""
        waiting, self._waiting = [table for table in self._waiting if len(table)], []
        if waiting:
            rows = pa.concat_tables(waiting)
            self._file.write_table(rows, row_group_size=len(rows))


@contextmanager
def table_writer(path: Path, name: str, group_bytes: int | None = None) -> Iterator[TableWriter]:
    """A writer for a file of a table, which is on the disk when the block ended well. Raises OSError.

    What repeats, such as prompt_id, is written once per row group. Row groups have at least GROUP_BYTES, with
    `group_bytes` 0 they are what was appended.
    """
    with open(path, "wb") as file:
        hashing = Hashing(file)
        # With page checksums a reader distinguishes a damaged file from strange data.
        with pq.ParquetWriter(hashing, TABLES[name], compression="zstd", write_page_checksum=True) as parquet:
            writer = TableWriter(parquet, GROUP_BYTES if group_bytes is None else group_bytes)
            yield writer
            writer.end_group()
        file.flush()
        os.fsync(file.fileno())
    writer.sha256 = hashing.hexdigest()


def write_tables(folder: Path, tables: Mapping[str, TraceTable]) -> dict[str, str]:
    """Write a file for each table, a row group for each RL step; their SHA-256 by place. Raises OSError."""
    parts = {}
    for name, table in tables.items():
        with table_writer(folder / f"{name}.parquet", name, 0) as writer:
            for rl_step in table.rl_steps.tolist():
                writer.append(table.load([rl_step]))
        parts[f"{name}.parquet"] = writer.sha256
    return parts


def is_unfinished(folder: Path) -> bool:
    """Return True if there is a recording that was not closed: in progress, or interrupted."""
    try:
        return Contents.read(folder).unfinished
    except TraceError:
        return False


def refuse_foreign_target(path: Path) -> None:
    """Raise ConfigError where writing a trace to `path` would destroy something that is no trace."""
    if path.is_dir():
        if any(path.iterdir()) and not is_trace(path):
            raise ConfigError(f"{path} is a folder with other things in it, not a trace; name another place")
    elif path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is a file; a trace is a folder, name another place")


@contextmanager
def new_trace_folder(path: Path, *, repairs: bool = False) -> Iterator[Path]:
    """A folder to fill; where the block ends well it takes the place of the trace at `path` in one move.

    Raises ConfigError where `path` is something that is no trace, or a recording that was not closed unless this
    `repairs` it; InputError where the disk refuses.
    """
    try:
        refuse_foreign_target(path)
        if not repairs and is_unfinished(path):
            raise ConfigError(
                f"{path}: a recording is there, in progress or interrupted; 'tltlab trace repair {path}' ends it, or "
                "name another place"
            )
        with new_folder(path, durable=True) as new:
            yield new
            carry_over(path, new)
    except OSError as error:
        raise InputError(f"cannot write the trace {path}: {error.strerror or error}") from error


def _fixed_bytes(name: str) -> float:
    """Bytes of a row in memory without its lists. File sizes do not show this, since repeated values are compressed."""
    widths = [
        field.type.bit_width / 8 if pa.types.is_primitive(field.type) else _STRING_BYTES for field in TABLES[name]
    ]
    return float(sum(widths))


def _rl_steps(name: str, path: Path, table: pa.Table, first: int = 0) -> Ints:
    """The RL step of every row; a fault in it is found here, before the rows are cut by RL step."""
    column = table["rl_step"]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    part = TablePart.of(name, pa.table({"rl_step": column}), str(path), first)
    if column.null_count:
        part.require(part.is_known("rl_step"), "rl_step", "got null, this column has no unknown values")
    steps = part.numpy("rl_step")
    part.require((steps >= 0) & (steps < _STEPS) & (steps == np.floor(steps)), "rl_step", "got {}, not an RL step")
    whole: Ints = steps.astype(np.int64)
    return whole


def frame_to_arrow(name: str, frame: pd.DataFrame) -> pa.Table:
    """A DataFrame as a table `name`, its columns those of the schema. Raises TraceError naming the column."""
    columns = {}
    for field in TABLES[name]:
        if field.name in frame.columns:
            try:
                # A frame without rows has whatever types its writer's library gives to nothing.
                values = frame[field.name] if len(frame) else pa.nulls(0, field.type)
                columns[field.name] = pa.array(values, from_pandas=True)
            except (pa.ArrowException, OverflowError) as error:
                raise TraceError(f"{name}: column {field.name}: {error}; it must be {field.type}") from error
    return pa.table(columns)


def carry_over(old: Path, new: Path) -> None:
    """Copy what is in an old trace folder and not of the format, such as a LICENSE or costs.json."""
    half_written = Path(MANIFEST_FILE).with_suffix(".tmp").name
    of_format = {MANIFEST_FILE, half_written, LOCK, *TABLES, *(f"{name}.parquet" for name in TABLES)}
    for item in sorted(old.iterdir()) if old.is_dir() else ():
        if item.name not in of_format:
            if item.is_dir() and not item.is_symlink():
                shutil.copytree(item, new / item.name, symlinks=True)
            else:
                shutil.copy2(item, new / item.name, follow_symlinks=False)
            fsync_tree(new / item.name)
