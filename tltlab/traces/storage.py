"""One table of a trace, in memory, in a Parquet file or in a recording, and the rows of some RL steps of it."""

from __future__ import annotations

import errno
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tltlab.arrays import Ints
from tltlab.drafters.specs import DrafterTraits
from tltlab.errors import ConfigError, InputError, TraceError
from tltlab.files import (
    fsync_file,
    fsync_tree,
    new_folder,
    read_text,
    replace_durably,
    sha256_of,
    unsealed,
    write_durably,
)
from tltlab.records import frozen

from .schema import MANIFEST_FILE, SUFFIX, SUMS, TABLES, Manifest, is_trace
from .validate import TablePart, check_columns, conform

MOST_ROWS = 1 << 24
"""Most rows of a table that is read as a whole, or of a row group of one that is not."""
_STRING_BYTES = 16
"""Bytes of one string in memory: its offset and about a dozen characters."""
_ROWS_AT_ONCE = 1 << 14
"""Rows per batch when scanning `rl_step`."""


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

    `rl_steps` are the RL steps that have rows, ascending, `rows_per_step` how many rows each of them has.
    """

    rl_steps: Ints
    rows_per_step: Ints

    @property
    def num_rows(self) -> int:
        return int(self.rows_per_step.sum())

    @abstractmethod
    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        """The rows of some RL steps, sorted (stably) by RL step (None: all)."""

    @abstractmethod
    def select(self, rl_steps: Sequence[int]) -> Self: ...


class MemoryTable(TraceTable):
    """A conformed table in memory."""

    def __init__(self, table: pa.Table):
        steps = table["rl_step"].to_numpy()
        if (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            table, steps = table.take(order), steps[order]
        self._table = table
        self.rl_steps, self._bounds = _runs(steps)
        self.rows_per_step = np.diff(self._bounds)

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        if rl_steps is None:
            return self._table
        at = np.flatnonzero(np.isin(self.rl_steps, rl_steps))
        # RL steps that lie side by side are one slice: a column keeps few chunks.
        runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []
        bounds = [(self._bounds[run[0]], self._bounds[run[-1] + 1]) for run in runs]
        return pa.concat_tables([self._table[:0], *(self._table[start:end] for start, end in bounds)])

    def select(self, rl_steps: Sequence[int]) -> MemoryTable:
        return MemoryTable(self.load(rl_steps))


class StoredTable(TraceTable):
    """A table that is not in memory; `row_bytes` is what a row would take there, about."""

    name: str
    row_bytes: float

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        return MemoryTable(self.part(rl_steps).table).load(None)

    @abstractmethod
    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        """The conformed rows of some RL steps (None: all), in the order in which they were written."""


@frozen
class _Index:
    """Where the rows of a file are, without a number per row.

    Rows `bounds[i]` to `bounds[i + 1]` are of the RL step `rl_steps[i]`, which may come again later;
    `group_bounds` are the first rows of the row groups and the number of rows.
    """

    rl_steps: Ints
    bounds: Ints
    group_bounds: Ints
    row_bytes: float
    metadata: pq.FileMetaData


class FileTable(StoredTable):
    """A table in a Parquet file, or the rows of some RL steps in it; only row groups that hold them are read.

    Any layout of row groups will do. Reading some RL steps takes the memory of their rows and of one row group.
    """

    def __init__(self, name: str, path: Path, index: _Index | None = None, runs: Ints | None = None):
        """`runs` are the numbers of the index's runs of rows that count, None: all."""
        self.name, self.path = name, path
        self._index = self._read_index() if index is None else index
        self._run_numbers: Ints = np.arange(len(self._index.rl_steps)) if runs is None else runs
        counts = np.diff(self._index.bounds)[self._run_numbers]
        self.rl_steps, at = np.unique(self._index.rl_steps[self._run_numbers], return_inverse=True)
        self.rows_per_step = np.bincount(at, weights=counts, minlength=len(self.rl_steps)).astype(np.int64)
        self.row_bytes = self._index.row_bytes

    def select(self, rl_steps: Sequence[int]) -> FileTable:
        return FileTable(self.name, self.path, self._index, self._runs(rl_steps))

    def _runs(self, rl_steps: Sequence[int] | None) -> Ints:
        rl_step_of_run = self._index.rl_steps[self._run_numbers]
        return self._run_numbers if rl_steps is None else self._run_numbers[np.isin(rl_step_of_run, rl_steps)]

    def part(self, rl_steps: Sequence[int] | None) -> TablePart:
        runs = self._runs(rl_steps)
        rows = _ranges(self._index.bounds[runs], self._index.bounds[runs + 1])
        bounds = self._index.group_bounds
        cuts = np.searchsorted(rows, bounds)
        groups = np.flatnonzero(np.diff(cuts))
        partly = np.diff(cuts)[groups] < np.diff(bounds)[groups]
        borders = np.flatnonzero(partly[1:] | partly[:-1]) + 1
        tables = []
        # The footer of a long trace is megabytes; it is parsed once.
        with self._open(self._index.metadata) as file:
            for run, cut in zip(np.split(groups, borders), np.split(partly, borders), strict=True):
                table = self._read(file, TABLES[self.name].names, run.tolist())
                if cut.any():
                    # A copy, not a slice: a slice would keep the whole row group.
                    table = table.take(rows[cuts[run[0]] : cuts[run[0] + 1]] - bounds[run[0]])
                tables.append(table)
        return conform(TablePart(name=self.name, file=str(self.path), table=pa.concat_tables(tables), rows=rows))

    def _read_index(self) -> _Index:
        with self._open(None) as file:
            check_columns(self.name, str(self.path), file.schema_arrow)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            if (most := max((group.num_rows for group in groups), default=0)) > MOST_ROWS:
                raise TraceError(
                    f"{self.path}: a row group has {most:,} rows, and at most {MOST_ROWS:,} are read at once: write "
                    "one for each RL step"
                )
            bounds = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
            steps, starts = [np.arange(0)], [np.arange(0)]
            borders = np.flatnonzero(np.diff(bounds[1:] // _ROWS_AT_ONCE)) + 1
            for run in np.split(np.arange(len(groups)), borders) if groups else ():
                table, first = self._read(file, ["rl_step"], run.tolist()), bounds[run[0]]
                rows = np.arange(first, first + len(table))
                part = TablePart(name=self.name, file=str(self.path), table=table, rows=rows)
                run_steps, inner = _runs(_rl_steps(part))
                steps.append(run_steps)
                starts.append(inner[:-1] + first)
            stored = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
            return _Index(
                rl_steps=np.concatenate(steps),
                bounds=np.append(np.concatenate(starts), file.metadata.num_rows).astype(np.int64),
                group_bounds=bounds,
                row_bytes=max(stored, fixed_bytes(self.name)),
                metadata=file.metadata,
            )

    def _open(self, metadata: pq.FileMetaData | None) -> pq.ParquetFile:
        if not self.path.is_file():
            raise TraceError(f"{self.path}: not a readable Parquet file: it is no file")
        try:
            return pq.ParquetFile(self.path, metadata=metadata, page_checksum_verification=True)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path}: not a readable Parquet file (cut off?): {error}") from error

    def _read(self, file: pq.ParquetFile, columns: list[str], groups: list[int]) -> pa.Table:
        names = file.schema_arrow.names
        try:
            return file.read_row_groups(groups, columns=[column for column in columns if column in names])
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path}: cannot be read (damaged?): {error}") from error


class ReadTable(TraceTable):
    """Some RL steps of a stored table; what is selected of it shares the rows, read when one of them is first used."""

    def __init__(self, stored: StoredTable, rl_steps: Sequence[int], memory: Callable[[], MemoryTable] | None = None):
        selected = np.isin(stored.rl_steps, rl_steps)
        self.rl_steps, self.rows_per_step = stored.rl_steps[selected], stored.rows_per_step[selected]
        self._stored = stored
        self._memory = memory or cache(lambda: MemoryTable(stored.load(None)))

    def _matching(self, rl_steps: Sequence[int] | None) -> list[int]:
        chosen = self.rl_steps if rl_steps is None else self.rl_steps[np.isin(self.rl_steps, rl_steps)]
        return list(chosen.tolist())

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        return self._memory().load(self._matching(rl_steps))

    def select(self, rl_steps: Sequence[int]) -> ReadTable:
        return ReadTable(self._stored, self._matching(rl_steps), self._memory)


def seal(folder: Path) -> None:
    """Write into the manifest of a whole new trace the sum of every table next to it. Raises OSError."""
    file = folder / MANIFEST_FILE
    sums = {table.name: sha256_of(table) for table in sorted(folder.glob("*.parquet"))}
    write_durably(file, Manifest.read(file).to_json(sums).encode())


def put_sum(folder: Path, name: str, digest: str | None, drafters: Mapping[str, DrafterTraits] = {}) -> None:
    """Set the sum of a file in the manifest, or remove it with None; a trace without sums stays so. Raises OSError.

    `drafters` are added to those of the manifest.
    """
    file = folder / MANIFEST_FILE
    sums, manifest = unsealed(read_text(file)).get(SUMS), Manifest.read(file)
    if isinstance(sums, dict):
        sums.pop(name, None)
        sums |= {} if digest is None else {name: digest}
    if isinstance(sums, dict) or drafters:
        manifest = manifest.model_copy(update={"drafters": {**manifest.drafters, **drafters}})
        replace_durably(file, manifest.to_json(sums).encode())


def check_sums(folder: Path) -> bool:
    """TraceError where a table is not the one that was written; False where some table there has no sum."""
    tables = [f"{name}.parquet" for name in TABLES if (folder / f"{name}.parquet").exists()]
    try:
        sums = unsealed(read_text(folder / MANIFEST_FILE)).get(SUMS)
        if not isinstance(sums, dict):
            return False
        for name in tables:
            if name in sums and sha256_of(folder / name) != sums[name]:
                raise TraceError(
                    f"{folder / name}: not what was written: damaged, or changed by hand, and then remove {SUMS!r} and "
                    f"'sha256' from {MANIFEST_FILE}"
                )
    except (OSError, ValueError, AttributeError) as error:
        raise TraceError(f"{folder}: its sums cannot be checked: {error}") from error
    return set(tables) <= set(sums)


def write_parquet(path: Path, name: str, table: TraceTable) -> None:
    """Write one row group per RL step, and wait until it is on the disk."""
    with parquet_writer(path, name) as writer:
        for rl_step in table.rl_steps.tolist():
            rows = table.load([rl_step])
            writer.write_table(rows, row_group_size=len(rows))
    fsync_file(path)


def parquet_writer(path: Path, name: str) -> pq.ParquetWriter:
    """A writer for the file of a table; what repeats, such as prompt_id, is written once per row group."""
    # With page checksums a reader distinguishes a damaged file from strange data.
    return pq.ParquetWriter(path, TABLES[name], compression="zstd", write_page_checksum=True)


def refuse_foreign_target(path: Path) -> None:
    """Raise ConfigError where writing a trace to `path` would destroy something that is no trace."""
    if path.name.endswith(SUFFIX):
        raise ConfigError(f"{path}: so recordings are called that are in progress or interrupted; name another place")
    if path.is_dir():
        if any(path.iterdir()) and not is_trace(path):
            raise ConfigError(f"{path} is a folder with other things in it, not a trace; name another place")
    elif path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is a file; a trace is a folder, name another place")


@contextmanager
def new_trace_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; where the block ends well it takes the place of the trace at `path` in one move.

    Raises ConfigError where `path` is something that is no trace, OSError where the disk refuses.
    """
    refuse_foreign_target(path)
    with new_folder(path, durable=True) as new:
        yield new
        seal(new)
        carry_over(path, new)


def _runs(steps: Ints) -> tuple[Ints, Ints]:
    """Runs of equal RL steps: their RL steps (n) and their bounds (n + 1). [4, 4, 7]: [4, 7] and [0, 2, 3]."""
    starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1)) if len(steps) else np.arange(0)
    return steps[starts].astype(np.int64), np.append(starts, len(steps)).astype(np.int64)


def _ranges(starts: Ints, ends: Ints) -> Ints:
    """All numbers of some ranges: [2, 7], [4, 8] is [2, 3, 7]."""
    counts = ends - starts
    offset = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) if len(counts) else starts
    return np.arange(int(counts.sum())) + offset


def fixed_bytes(name: str) -> float:
    """Bytes of a row in memory without its lists. File sizes do not show this, since repeated values are compressed."""
    widths = [
        field.type.bit_width / 8 if pa.types.is_primitive(field.type) else _STRING_BYTES for field in TABLES[name]
    ]
    return float(sum(widths))


def _rl_steps(part: TablePart) -> Ints:
    """The RL step of every row; a fault in it is found here, before the rows are cut by RL step."""
    if pa.types.is_dictionary(part.table["rl_step"].type):
        decoded = part.table["rl_step"].cast(part.table["rl_step"].type.value_type)
        part = replace(part, table=pa.table({"rl_step": decoded}))
    if part.table["rl_step"].null_count:
        part.require(part.is_known("rl_step"), "rl_step", "got null, this column has no unknown values")
    steps = part.numpy("rl_step")
    part.require((steps >= 0) & (steps < 2**31) & (steps == np.floor(steps)), "rl_step", "got {}, not an RL step")
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
    format_files = {MANIFEST_FILE, *(f"{name}.parquet" for name in TABLES)}
    for item in sorted(old.iterdir()) if old.is_dir() else ():
        if item.name not in format_files:
            if item.is_dir() and not item.is_symlink():
                shutil.copytree(item, new / item.name, symlinks=True)
            else:
                shutil.copy2(item, new / item.name, follow_symlinks=False)
            fsync_tree(new / item.name)


def cannot_write(path: Path, error: OSError) -> InputError:
    """The error of a trace that cannot be written."""
    return InputError(f"cannot write the trace {path}: {error.strerror or error}")
