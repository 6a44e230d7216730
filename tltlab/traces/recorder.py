"""Crash-safe recording of a live run: a kill at any moment loses only rows not yet flushed.

While a run lasts, its trace PATH is recorded in the folder `PATH.recording` (see `recording`). A finished trace at PATH
stays until `close` puts the new one in its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
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

from tltlab.errors import ConfigError, InputError, RunError, TraceError
from tltlab.files import fsync_folder, lock, replace_durably

from .recording import chunks_of, cut, new_recording, read_chunks, recording_of, rows_in, write_chunk
from .schema import MANIFEST_FILE, REQUIRED_TABLES, SUFFIX, TABLES, Manifest, is_trace
from .storage import refuse_foreign_target
from .trace import Trace, locate, read_one, read_recording, with_notes
from .validate import TablePart, check_values, conform

SAME = ("kind", "model", "num_workers", "max_response_tokens", "group_size", "seed")
"""Fields of the manifest in which a run and its continuation must agree."""
Row = Mapping[str, Any]


def reopen(path: Path, manifest: Manifest, rl_steps: int) -> int:
    """Make the recording of the trace `path` hold the rows of RL steps before `rl_steps`, and no others.

    Rows are taken from the existing recording, else from the finished trace at `path`, which stays unchanged. A
    kill at any moment leaves what was there, or the recording as it should be. Returns the number of its next chunk.
    Raises ConfigError where another process records, or `manifest` is that of another run; RunError where neither
    holds every one of these RL steps.
    """
    folder = recording_of(path)
    refuse_foreign_target(path)
    reason = "nothing is recorded there"
    if folder.is_dir():
        with lock(folder):
            earlier, notes = manifest, list[str]()
            try:
                earlier = Manifest.read(folder / MANIFEST_FILE)
            except TraceError as damage:
                # The lost manifest differs from the run's own only in start time and notes.
                notes = [f"the manifest is the resumed run's, for the recording's was damaged: {damage}"]
            _check_same_run(folder, earlier, manifest)
            good = {chunk: _rl_steps(tables) for chunk, tables in read_chunks(chunks_of(folder), notes)}
            missing = _first_missing(good.values(), rl_steps)
            if missing is None:
                if notes := [*notes, *_change_notes(earlier, manifest, rl_steps)]:
                    replace_durably(folder / MANIFEST_FILE, with_notes(earlier, notes).to_json().encode())
                for chunk in set(chunks_of(folder)) - good.keys():
                    os.rename(chunk.path, chunk.path.with_suffix(".tmp"))
                return cut(folder, rl_steps)
        reason = f"{folder} lacks RL step {missing}"
    chunks: Iterable[Mapping[str, pa.Table]] = ()
    if is_trace(path):
        trace = read_one(path)
        _check_same_run(path, trace.manifest, manifest)
        missing = _first_missing((_rl_steps(_tables(part, _RL_STEP_TABLES)) for part in trace.parts()), rl_steps)
        if missing is None:
            original = trace.manifest.model_copy(update={"num_rl_steps": None})
            manifest = with_notes(original, _change_notes(original, manifest, rl_steps))
            chunks = (_tables(part) for part in trace.iter_rl_steps() if part.rl_steps[0] < rl_steps)
        reason = f"{path} lacks RL step {missing}"
    if rl_steps and not chunks:
        raise RunError(
            f"cannot continue recording {path} from RL step {rl_steps}: {reason}; "
            "continue from an earlier checkpoint, or begin a new run"
        )
    aside = folder.with_name(f".{folder.name}.short")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        # It lacks RL steps that the finished trace has, and that trace stays.
        os.rename(folder, aside)
    new_recording(folder, manifest, chunks)
    shutil.rmtree(aside, ignore_errors=True)
    return len(chunks_of(folder))


_RL_STEP_TABLES = (*REQUIRED_TABLES, "steps")
"""The tables that, where there are any rows of them, have rows of every RL step."""


def _rl_steps(tables: Mapping[str, pa.Table]) -> dict[str, set[int]]:
    return {name: set(np.unique(tables[name]["rl_step"]).tolist()) for name in _RL_STEP_TABLES if name in tables}


def _first_missing(pieces: Iterable[Mapping[str, set[int]]], rl_steps: int) -> int | None:
    """The first RL step before `rl_steps` that some table lacks, given the `_rl_steps` of each piece of a run."""
    rl_steps_of: dict[str, set[int]] = {name: set() for name in REQUIRED_TABLES}
    for piece in pieces:
        for name, steps in piece.items():
            rl_steps_of[name] = rl_steps_of.get(name, set()) | steps
    return min((step for step in range(rl_steps) for steps in rl_steps_of.values() if step not in steps), default=None)


def _tables(part: Trace, names: Iterable[str] = TABLES) -> dict[str, pa.Table]:
    return {name: table for name in names if (table := part.arrow(name)) is not None and len(table)}


def _check_same_run(place: Path, earlier: Manifest, current: Manifest) -> None:
    for name in SAME:
        before, after = getattr(earlier, name), getattr(current, name)
        if before != after:
            raise ConfigError(
                f"{place} is the trace of another run: its {name} is {before!r}, this run's {after!r}; "
                "continue with the recipe that it began with, or choose another folder"
            )


def _change_notes(earlier: Manifest, current: Manifest, rl_steps: int) -> list[str]:
    """Notes for readers on a run that was resumed with another engine or on another machine."""
    names = ("hardware", "engine")
    changed = [f"{n} {getattr(current, n)}" for n in names if getattr(earlier, n) != getattr(current, n)]
    return [f"from RL step {rl_steps} on {', '.join(changed)}"] if changed else []


def repair(path: str | Path, out: str | Path | None = None) -> Trace:
    """Turn the interrupted recording of the trace `path` into a valid trace at `path`, or at `out`.

    Every flushed row is kept but those without which the trace is valid: outcomes without their workload row, tokens
    and acceptance without their outcome, rows recorded twice, chunks that cannot be read. The manifest gets the note
    "repaired: ..." with the losses. A valid trace without a recording next to it is returned unchanged; `path` may
    be a RUN folder or the recording itself. With another `out` nothing at `path` changes. A finished trace at `path` is
    replaced by the recording of the same run, resumed, that has every response of it. Raises TraceError for a damaged
    trace, ConfigError where the recording is in progress or a finished trace would lose responses, and InputError
    where the disk refuses; the recording is still there then.
    """
    path = Path(path)
    if not path.name:  # "."
        path = path.absolute()
    located = locate(path)
    if path.name.endswith(SUFFIX):
        path = path.with_name(path.name.removesuffix(SUFFIX))
    elif not recording_of(path).exists():
        path = path / "trace" if recording_of(path / "trace").exists() else located
    folder = recording_of(path)
    if out is not None and Path(out).absolute() == path.absolute():
        out = None
    if not folder.exists():
        trace = read_one(path)
        return read_one(trace.write(out)) if out is not None else trace
    with lock(folder):
        if _is_closed(folder, path):
            _remove(folder)
            return repair(path, out)
        earlier = read_one(path) if out is None and is_trace(path) else None
        finish(folder, path if out is None else Path(out), salvage=True, keep=out is not None, earlier=earlier)
    return read_one(path if out is None else Path(out))


def finish(folder: Path, target: Path, *, salvage: bool, keep: bool = False, earlier: Trace | None = None) -> None:
    """Write the trace of a recording to `target`, then remove the recording unless `keep`.

    A recording larger than memory passes. `earlier` is the trace at `target` of which nothing may be lost: ConfigError.
    """
    refuse_foreign_target(target)
    notes: list[str] = []
    trace = read_recording(folder, notes, salvage=salvage)
    if salvage:
        manifest = with_notes(trace.manifest, [f"repaired: {'; '.join(['the recording was interrupted', *notes])}"])
        trace = trace.with_manifest(manifest)
    if earlier is not None:
        _check_continuation(earlier, trace, folder)
    trace.write(target)
    if not keep:
        _remove(folder)


def _check_continuation(earlier: Trace, later: Trace, folder: Path) -> None:
    """Raise ConfigError unless `later`, of the recording `folder`, has every response of `earlier`, of the same run."""
    apart = {"notes": None, "num_rl_steps": None, "without_iterations": None}
    now, before = (t.manifest.model_copy(update=apart) for t in (later, earlier))
    fault = "is of another run" if now != before else ""
    for step in earlier.rl_steps if not fault else ():
        outcomes = later.select([step]).outcomes if step in later.rl_steps else None
        if num_missing := int((~rows_in(earlier.select([step]).outcomes, outcomes)).sum()):
            fault = f"lacks {num_missing} of its responses in RL step {step}"
            break
    if fault:
        raise ConfigError(
            f"{earlier.path} is a finished trace, and the interrupted recording {folder} {fault}; name another place "
            "with --out, or remove one of them"
        )


def _remove(folder: Path) -> None:
    """Remove a recording in one move, so that no half of one is left."""
    aside = folder.with_name(f".{folder.name}.done")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(folder, aside)
        # Else the power may go and leave the recording under its name without some of its files.
        fsync_folder(folder.parent)
    except OSError as error:
        raise InputError(f"{folder} cannot be removed, its trace is written: {error.strerror}") from error
    shutil.rmtree(aside, ignore_errors=True)


def _is_closed(folder: Path, path: Path) -> bool:
    """Return True if the trace at `path` is this recording, closed by a process that was killed before it tidied up."""
    try:
        recording, trace = read_recording(folder, [], salvage=False), read_one(path)
    except TraceError:
        return False
    alike = (recording.manifest, recording.names) == (trace.manifest, trace.names)
    return alike and all(recording.arrow(name) == trace.arrow(name) for name in trace.names)


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
        records there or `manifest` is another run's (`SAME`), RunError where one of these RL steps is missing
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
