"""Crash-safe recording of a live run: a kill at any moment loses only rows not yet flushed.

While a run lasts, its trace PATH is recorded in the folder `PATH.recording` (see `recording`). A finished trace at PATH
stays until `close` puts the new one in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tltlab.errors import ConfigError, RunError, TraceError
from tltlab.files import lock, replace_durably

from .recording import cut, new_recording, recording_of, write_chunk
from .recovery import finish, reopen
from .schema import MANIFEST_FILE, TABLES, Manifest
from .storage import refuse_foreign_target
from .trace import Trace, read_recording
from .validate import TablePart, check_values, conform

Row = Mapping[str, Any]


class ColumnRows(Sequence[Row]):
    """Rows of the table `name` held by column: `table` has the columns of its schema, any of them with null.

    A row is a dict once it is looked at. Equal to a list of the same rows, with None for unknown columns.
    """

    def __init__(self, name: str, table: pa.Table) -> None:
        self.name = name
        self.table = table

    @classmethod
    def of(cls, name: str, rows: Sequence[Row]) -> ColumnRows:
        """The same rows by column. Raises TraceError for a column that is not in the format or holds something else."""
        if isinstance(rows, ColumnRows):
            return rows
        _refuse_unknown(name, rows)
        return cls(name, _by_column(name, rows))

    @classmethod
    def joined(cls, name: str, parts: Iterable[Sequence[Row]]) -> ColumnRows:
        """All rows of some parts, one by one."""
        empty = pa.schema(_fields(name)).empty_table()
        return cls(name, pa.concat_tables([empty, *(cls.of(name, part).table for part in parts)]))

    def column(self, name: str) -> Any:
        """A numeric column as an array, null as 0."""
        return self.table[name].fill_null(0).to_numpy()

    def with_column(self, name: str, values: Any) -> ColumnRows:
        """The same rows with other values in a column."""
        at = self.table.schema.get_field_index(name)
        field = self.table.schema.field(at)
        return ColumnRows(self.name, self.table.set_column(at, field, pa.array(values, field.type)))

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> ColumnRows: ...
    def __getitem__(self, at: int | slice) -> Row | ColumnRows:
        index = range(len(self))[at]
        if isinstance(index, int):
            row: Row = self.table.slice(index, 1).to_pylist()[0]
            return row
        return ColumnRows(self.name, self.table.take(pa.array(index, pa.int64())))

    def __iter__(self) -> Iterator[Row]:
        for batch in self.table.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


_Rows = dict[str, list[Sequence[Row]]]


class Recorder:
    """Records a live run; `close` turns the recording into a valid trace at `path`.

    Append the workload row of a request no later than its outcome. A row is a dict with the columns of the table
    (`schema.TABLES`); null or missing is unknown, a `turn` 0; many rows come faster as `ColumnRows`. Rows are checked
    one by one at `flush`, how tables fit together at `close`; a fault is a TraceError, and what was flushed before
    stays. As a context manager it closes at the end, and after an exception flushes and leaves the recording for
    `repair`. Raises ConfigError where `path` is no trace, or a recording is there already.

    >>> with Recorder("run/trace", Manifest(kind="recorded", num_workers=2)) as recorder:  # doctest: +SKIP
    ...     recorder.append("steps", [{"rl_step": 0, "t_start": 0.0, "rollout_s": 12.5, "policy_version": 0}])
    ...     recorder.flush()
    """

    def __init__(self, path: str | Path, manifest: Manifest):
        self._begin(Path(path))
        refuse_foreign_target(self.path)
        if self._folder.exists():
            raise ConfigError(
                f"{self._folder}: a recording is there already, in progress or interrupted, and all commands read it; "
                f"'tltlab trace repair {self.path}' makes it a trace, or remove it"
            )
        new_recording(self._folder, manifest)
        self._lock = lock(self._folder)

    @classmethod
    def reopen(cls, path: str | Path, manifest: Manifest, rl_steps: int) -> Self:
        """Go on recording the trace `path` of a run that ended or was killed, from RL step `rl_steps` on.

        The rows of all RL steps before it are kept, from the interrupted recording or the finished trace; later ones
        are gone for good once it closes. With 0 there need be nothing. The manifest stays the old one; where `manifest`
        names other hardware or another engine, its notes record the change. Raises ConfigError where another process
        records there or `manifest` is another run's (`recovery.SAME`), RunError where one of these RL steps is missing
        or the disk refuses.
        """
        recorder = cls.__new__(cls)
        recorder._begin(Path(path))
        try:
            recorder._next_chunk = reopen(recorder.path, manifest, rl_steps)
        except OSError as error:
            raise RunError(f"cannot record to {recorder._folder}: {error.strerror or error}") from error
        recorder._lock = lock(recorder._folder)
        return recorder

    def _begin(self, path: Path) -> None:
        self.path = path
        self._rows: _Rows = {}
        self._manifest_fields: dict[str, Any] = {}
        self._next_chunk = 0
        self._folder = recording_of(path)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tltlab-recorder")
        self._writing: Future[bool] | None = None
        self._failed_rows: _Rows = {}
        self._failed_manifest_fields: dict[str, Any] = {}

    def rewind(self, rl_steps: int) -> None:
        """Take back every row of RL step `rl_steps` and later, flushed or not: they are to be recorded anew."""
        self._settle()
        for table, rows in self._rows.items():
            self._rows[table] = [_before(part, rl_steps) for part in rows]
        try:
            self._next_chunk = cut(self._folder, rl_steps)
        except OSError as error:
            raise RunError(f"cannot record to {self._folder}: {error.strerror or error}") from error

    def append(self, table: str, rows: Sequence[Row]) -> None:
        """Keep rows in memory for the next flush. Raises TraceError for a table or column that is not in the format."""
        if isinstance(rows, ColumnRows):
            assert rows.name == table, rows.name
        else:
            _refuse_unknown(table, rows)
            rows = list(rows)
        self._rows.setdefault(table, []).append(rows)

    def set_manifest(self, **fields: Any) -> None:
        """Set fields of the manifest, such as `notes`, from the next flush on."""
        self._manifest_fields |= fields

    def flush(self, *, wait: bool = True) -> None:
        """Make everything appended so far durable, as one chunk: after a kill it is there as a whole or not at all.

        Without `wait` a thread does it meanwhile, and a fault is raised by whatever is called next.
        """
        self._settle()
        rows, self._rows = self._rows, {}
        # Taken here: a thread that writes shares nothing with callers.
        fields, self._manifest_fields = self._manifest_fields, {}
        if wait:
            # Here and not in the thread: an interpreter that is about to exit, with a trace to finish, starts none.
            self._count(partial(self._write, rows, fields, self._next_chunk))
        else:
            self._writing = self._writer.submit(self._write, rows, fields, self._next_chunk)

    def _write(self, rows: _Rows, fields: dict[str, Any], number: int) -> bool:
        """Write the manifest if it has other fields, and rows as chunk `number`; whether there were any."""
        try:
            if fields:
                file = self._folder / MANIFEST_FILE
                manifest = Manifest.read(file).model_copy(update=fields)
                replace_durably(file, manifest.to_json().encode())
            tables = {name: _to_arrow(name, rows[name]) for name in TABLES if any(map(len, rows.get(name, ())))}
            if tables:
                write_chunk(self._folder, number, tables)
            return bool(tables)
        except BaseException as error:
            self._failed_rows, self._failed_manifest_fields = rows, fields
            if isinstance(error, OSError):
                raise RunError(f"cannot record to {self._folder}: {error.strerror or error}") from error
            raise

    def _settle(self) -> None:
        """Wait for what is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._count(writing.result)

    def _count(self, write: Callable[[], bool]) -> None:
        """Count the chunk, if `write` writes one. Where it fails its rows come before those appended since, as ever."""
        try:
            self._next_chunk += write()
        except BaseException:
            rows, self._failed_rows = self._failed_rows, {}
            for table, since in self._rows.items():
                rows.setdefault(table, []).extend(since)
            self._rows = rows
            self._manifest_fields = self._failed_manifest_fields | self._manifest_fields
            raise

    def snapshot(self) -> Trace:
        """Everything flushed so far, as a trace in memory. Raises TraceError where tables do not fit together."""
        self._settle()
        return read_recording(self._folder, [], salvage=False).in_memory()

    def close(self) -> Path:
        """Flush, write the trace and remove the recording.

        Raises TraceError where tables do not fit together, InputError where the disk refuses; the recording is kept
        then, for `repair`.
        """
        self.flush()
        with self._lock:
            finish(self._folder, self.path, salvage=False)
        self._writer.shutdown()
        return self.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(TraceError, RunError):  # the first error is the one to show
            self.flush()
        # Rows that could not be written are dropped, since they may hold much memory.
        self._rows, self._failed_rows = {}, {}
        self._writer.shutdown()
        self._lock.close()


def _refuse_unknown(name: str, rows: Sequence[Row]) -> None:
    if name not in TABLES:
        raise TraceError(f"no table named {name!r}; there are: {', '.join(TABLES)}")
    if unknown := set().union(*rows).difference(TABLES[name].names):
        raise TraceError(f"{name}: no column named {min(unknown)!r}; there are: {', '.join(TABLES[name].names)}")


def _before(rows: Sequence[Row], rl_steps: int) -> Sequence[Row]:
    """Rows of RL steps before `rl_steps`."""
    if isinstance(rows, ColumnRows):
        return ColumnRows(rows.name, rows.table.filter(pc.less(rows.table["rl_step"], rl_steps)))
    return [row for row in rows if row["rl_step"] < rl_steps]


def _fields(name: str) -> list[pa.Field]:
    # Null is refused where the row can be named.
    return [field.with_nullable(True) for field in TABLES[name]]


def _to_arrow(name: str, parts: Sequence[Sequence[Row]]) -> pa.Table:
    """Rows as a checked table. Raises TraceError naming the column."""
    tables = []
    for by_column, group in groupby(parts, lambda part: isinstance(part, ColumnRows)):
        if by_column:
            tables += [part.table for part in group if isinstance(part, ColumnRows)]
        else:
            tables.append(_by_column(name, list(chain.from_iterable(group))))
    table = pa.concat_tables(tables)
    if "turn" in table.column_names and table["turn"].null_count:
        at = table.column_names.index("turn")
        table = table.set_column(at, table.schema.field(at), table["turn"].fill_null(0))
    part = conform(TablePart(name=name, file=f"{name} (being recorded)", table=table, rows=np.arange(len(table))))
    check_values(part)
    return part.table


def _by_column(name: str, rows: Sequence[Row]) -> pa.Table:
    """Rows as a table of the schema's columns, null included. Raises TraceError naming the column."""
    # All columns in one go, which takes a third of the time.
    fields = _fields(name)
    try:
        return pa.Table.from_struct_array(pa.array(rows, pa.struct(fields)))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # A column is at fault, which is named, or rows are no dicts.
        columns = []
        for field in fields:
            try:
                columns.append(pa.array([row.get(field.name) for row in rows], field.type))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise TraceError(f"{name}: column {field.name}: {error}; it must be {field.type}") from error
        return pa.table(columns, schema=pa.schema(fields))
