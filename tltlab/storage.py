"""One table of a trace, in memory or in a Parquet file, and the rows of some RL steps of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import TraceError
from .schema import TABLES
from .validate import Ints, Part, check_columns, conform


class MemoryTable:
    """A conformed table in memory, sorted (stably) by RL step."""

    def __init__(self, table: pa.Table, rl_step: Ints | None = None):
        steps = table["rl_step"].to_numpy().astype(np.int64) if rl_step is None else rl_step
        if (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            table, steps = table.take(order), steps[order]
        self._table = table
        self.rl_step = steps

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        """The rows of some RL steps, ascending (None: all)."""
        if rl_steps is None:
            return self._table
        starts, ends = np.searchsorted(self.rl_step, rl_steps), np.searchsorted(self.rl_step, rl_steps, side="right")
        slices = [self._table.slice(start, end - start) for start, end in zip(starts, ends, strict=True)]
        return pa.concat_tables(slices) if slices else self._table.slice(0, 0)

    def select(self, rl_steps: Sequence[int]) -> MemoryTable:
        return MemoryTable(self.load(rl_steps), self.rl_step[np.isin(self.rl_step, rl_steps)])


@dataclass(frozen=True, kw_only=True)
class _Index:
    """Where the rows of a file are: the RL step of every row, the end of every row group, size uncompressed."""

    rl_step: Ints
    group_ends: Ints
    num_bytes: int


class FileTable:
    """A table in a Parquet file, or the rows of some RL steps in it; only row groups that hold them are read."""

    def __init__(self, name: str, path: Path, only: Sequence[int] | None = None, parent: FileTable | None = None):
        self.name, self.path, self._only = name, path, only
        self._index: _Index = parent._index if parent else self._read_index()
        steps = self._index.rl_step
        self.rl_step: Ints = steps if only is None else steps[np.isin(steps, only)]

    def load(self, rl_steps: Sequence[int] | None) -> pa.Table:
        """The rows of some RL steps, sorted (stably) by RL step (None: all)."""
        return MemoryTable(self.part(rl_steps).table).load(None)

    def select(self, rl_steps: Sequence[int]) -> FileTable:
        return FileTable(self.name, self.path, rl_steps, self)

    def part(self, rl_steps: Sequence[int] | None) -> Part:
        """The conformed rows of some RL steps (None: all), in file order."""
        wanted = np.ones(len(self._index.rl_step), bool)
        for only in (self._only, rl_steps):
            if only is not None:
                wanted &= np.isin(self._index.rl_step, only)
        rows = np.flatnonzero(wanted)
        groups = np.unique(np.searchsorted(self._index.group_ends, rows, side="right"))
        table = self._read([field.name for field in TABLES[self.name]], groups.tolist())
        starts = np.concatenate([[0], self._index.group_ends])
        read_rows = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in groups] or [np.arange(0)])
        if len(read_rows) != len(rows):
            table = table.filter(pa.array(wanted[read_rows]))
        return conform(Part(name=self.name, file=str(self.path), table=table, rows=rows))

    @property
    def num_bytes(self) -> int:
        """Uncompressed size of the whole file."""
        return self._index.num_bytes

    def _read_index(self) -> _Index:
        with self._open() as file:
            check_columns(self.name, str(self.path), file.schema_arrow)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        table = self._read(["rl_step"], list(range(len(groups))))
        return _Index(
            rl_step=_rl_steps(Part(name=self.name, file=str(self.path), table=table, rows=np.arange(len(table)))),
            group_ends=np.cumsum([group.num_rows for group in groups], dtype=np.int64),
            num_bytes=sum(group.total_byte_size for group in groups),
        )

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path, page_checksum_verification=True)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path}: not a readable Parquet file (cut off?): {error}") from error

    def _read(self, columns: list[str], groups: list[int]) -> pa.Table:
        with self._open() as file:
            columns = [column for column in columns if column in file.schema_arrow.names]
            try:
                return file.read_row_groups(groups, columns=columns)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                raise TraceError(f"{self.path}: cannot be read (damaged?): {error}") from error


Table = MemoryTable | FileTable


def write_parquet(path: Path, name: str, table: Table) -> None:
    """Write one row group per RL step, and wait until it is on the disk."""
    # Page checksums let a reader tell a damaged file from strange data.
    with pq.ParquetWriter(path, TABLES[name], compression="zstd", write_page_checksum=True) as writer:
        for rl_step in np.unique(table.rl_step).tolist():
            rows = table.load([rl_step])
            writer.write_table(rows, row_group_size=len(rows))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes | pa.Buffer) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _rl_steps(part: Part) -> Ints:
    """The RL step of every row; a fault in it is found here, before the rows are cut by RL step."""
    if pa.types.is_dictionary(part.table["rl_step"].type):
        decoded = part.table["rl_step"].cast(part.table["rl_step"].type.value_type)
        part = replace(part, table=pa.table({"rl_step": decoded}))
    if part.table["rl_step"].null_count:
        part.require(part.known("rl_step"), "rl_step", "got null, this column has no unknown values")
    steps = part.numpy("rl_step")
    part.require((steps >= 0) & (steps < 2**31) & (steps == np.floor(steps)), "rl_step", "got {}, not an RL step")
    whole: Ints = steps.astype(np.int64)
    return whole
