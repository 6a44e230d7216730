"""A trace: what a rollout was asked for and what came out. Reading, checking, slicing and writing of trace folders."""

from __future__ import annotations

import glob
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.console import progress
from tltlab.drafters.specs import Drafters
from tltlab.errors import TraceError
from tltlab.files import in_progress, write_durably

from .recording import EngineTrace, merge_recordings, recorded_tables, recording_of
from .schema import MANIFEST_FILE, REQUIRED_TABLES, SUFFIX, TABLES, Manifest, is_trace
from .storage import (
    FileTable,
    MemoryTable,
    ReadTable,
    StoredTable,
    TraceTable,
    cannot_write,
    check_sums,
    frame_to_arrow,
    new_trace_folder,
    write_parquet,
)
from .validate import TablePart, check, conform

__all__ = ["Manifest", "Trace", "is_trace", "locate", "read"]

CHUNK_BYTES = 64 << 20
"""Traces are read in runs of whole RL steps of about this many bytes in memory (the check takes 5 times it)."""


class _Optional:
    """A trace's table of this name; None where it has none."""

    def __set_name__(self, owner: type[Trace], name: str) -> None:
        self._name = name

    def __get__(self, trace: Trace, owner: type[Trace]) -> pd.DataFrame | None:
        return trace.table(self._name)


class Trace:
    """A checked trace, in memory or lazily read from its folder; immutable.

    Tables are DataFrames with the columns of `schema.TABLES`, rows in workload order within an RL step, RL steps
    ascending. Unknown is null: an integer column with unknown values is float64 with NaN in pandas.
    """

    def __init__(
        self, manifest: Manifest, tables: Mapping[str, TraceTable], rl_steps: list[int], path: Path | None = None
    ):
        """Not for users: `read` and `Trace.from_tables` make checked traces."""
        self.manifest = manifest
        self.path = path
        self.rl_steps = rl_steps
        self._tables = dict(tables)
        self._frames: dict[str, pd.DataFrame] = {}

    @cached_property
    def drafters(self) -> Drafters:
        """The drafters of the trace by name, with the traits of its manifest."""
        return Drafters(traits=self.manifest.drafters)

    @classmethod
    def from_tables(cls, manifest: Manifest, tables: Mapping[str, pd.DataFrame | pa.Table | None]) -> Trace:
        """Make a trace of DataFrames or Arrow tables; None is a table that is not there. Raises TraceError.

        `manifest.num_rl_steps` is filled in where it is None.

        >>> manifest = Manifest(kind="imported", num_workers=2)
        >>> Trace.from_tables(manifest, {"workload": workload, "outcomes": outcomes}).rl_steps  # doctest: +SKIP
        [0, 1]
        """
        sources: dict[str, TraceTable] = {**checked(tables, without_iterations=manifest.without_iterations)}
        rl_steps = _steps_of(sources)
        if manifest.num_rl_steps is None:
            manifest = manifest.model_copy(update={"num_rl_steps": len(rl_steps)})
        return cls(manifest, sources, rl_steps)

    def arrow(self, name: str, rl_step: int | None = None) -> pa.Table | None:
        """A table, or its rows of one RL step, as Arrow; None where the trace has no such table."""
        assert name in TABLES, name
        if name not in self._tables:
            return None
        return self._tables[name].load(None if rl_step is None else [rl_step])

    def table(self, name: str, *, rl_step: int | None = None) -> pd.DataFrame | None:
        """A table as a DataFrame; None where the trace has no such table.

        With `rl_step` only that RL step is read and nothing is kept, for traces larger than memory.
        """
        if rl_step is not None or name not in self._tables:
            part = self.arrow(name, rl_step)
            return None if part is None else part.to_pandas()
        if name not in self._frames:
            table = self.arrow(name)
            assert table is not None
            self._frames[name] = table.to_pandas()
        return self._frames[name].copy(deep=False)

    def num_rows(self, name: str) -> int:
        """Rows of a table, 0 where the trace has no such table; nothing is read."""
        return self._tables[name].num_rows if name in self._tables else 0

    @property
    def workload(self) -> pd.DataFrame:
        return self._frame("workload")

    @property
    def outcomes(self) -> pd.DataFrame:
        return self._frame("outcomes")

    tokens = _Optional()
    iterations = _Optional()
    decisions = _Optional()
    acceptance = _Optional()
    steps = _Optional()
    spans = _Optional()
    spot_training = _Optional()

    @property
    def names(self) -> tuple[str, ...]:
        """The tables this trace has."""
        return tuple(name for name in TABLES if name in self._tables)

    def select(self, rl_steps: Sequence[int]) -> Trace:
        """The trace of some of its RL steps. Raises TraceError for one it has not."""
        selected = sorted(set(rl_steps))
        if missing := set(selected) - set(self.rl_steps):
            raise TraceError(f"{self.path or 'trace'}: no rl_step {min(missing)}; there are: {_few(self.rl_steps)}")
        return self._of_steps(selected, selected, self._tables)

    def iter_rl_steps(self) -> Iterator[Trace]:
        """One-step traces in order: the way through a trace larger than memory.

        Tables are read when they are used, those of neighbouring RL steps together (CHUNK_BYTES), and kept while one
        of these RL steps is.
        """
        for part in self.parts():
            shared = {
                name: ReadTable(table, table.rl_steps.tolist()) if isinstance(table, StoredTable) else table
                for name, table in part._tables.items()
            }
            yield from (self._of_steps([rl_step], [rl_step], shared) for rl_step in part.rl_steps)

    def parts(self) -> Iterator[Trace]:
        """This trace in traces of neighbouring RL steps, each about CHUNK_BYTES when all its tables are read.

        A trace in memory, or one that small, is its only part. All rows of all tables are in one part.
        """
        chunks = _chunks(_stored_tables(self))
        if len(chunks) < 2:
            yield self
            return
        whole = set(self.rl_steps)
        for chunk in chunks:
            yield self._of_steps([rl_step for rl_step in chunk if rl_step in whole], chunk, self._tables)

    def with_manifest(self, manifest: Manifest) -> Trace:
        """The same tables under another manifest."""
        return Trace(manifest, self._tables, self.rl_steps, self.path)

    def in_memory(self) -> Trace:
        """The same with all tables read."""
        tables = {name: MemoryTable(table.load(None)) for name, table in self._tables.items()}
        return Trace(self.manifest, tables, self.rl_steps, self.path)

    def replace(self, *, manifest: Manifest | None = None, **tables: pd.DataFrame | pa.Table | None) -> Trace:
        """The same trace with some tables (None: without them) or the manifest replaced, checked anew."""
        old: dict[str, pd.DataFrame | pa.Table | None] = {name: self.arrow(name) for name in self._tables}
        return Trace.from_tables(manifest or self.manifest, {**old, **tables})

    def write(self, path: str | Path) -> Path:
        """Write the trace folder `path` in one move: a killed writer leaves the old trace or none.

        Row groups are cut at RL steps; same tables, same bytes. A trace at `path` is replaced, files in it that are
        not the format's are kept; anything else there is a ConfigError.
        """
        path = Path(path)
        try:
            with new_trace_folder(path) as new:
                for name, table in self._tables.items():
                    write_parquet(new / f"{name}.parquet", name, table)
                write_durably(new / MANIFEST_FILE, self.manifest.to_json().encode())
        except OSError as error:
            raise cannot_write(path, error) from error
        return path

    def __repr__(self) -> str:
        place = f" at {self.path}" if self.path else ""
        return f"<Trace {self.manifest.kind}{place}: {len(self.rl_steps)} RL steps, {', '.join(self.names)}>"

    def _of_steps(self, rl_steps: list[int], selected: Sequence[int], tables: Mapping[str, TraceTable]) -> Trace:
        """The trace of some RL steps with the rows of `selected` ones of these tables."""
        manifest = self.manifest.model_copy(update={"num_rl_steps": len(rl_steps)})
        return Trace(manifest, {name: table.select(selected) for name, table in tables.items()}, rl_steps, self.path)

    def _frame(self, name: str) -> pd.DataFrame:
        frame = self.table(name)
        assert frame is not None
        return frame


def read(path: str | Path) -> Trace:
    """Read and check the trace in a folder or in a RUN folder (its `trace/`). Raises TraceError.

    `tltlab.read` takes dumps, logs and response lengths too.

    Where there is no finished trace the recording of one is read, of a run that was killed or still continues:
    responses that are whole and durable. A note "unfinished: ..." goes to its manifest and to standard error.
    Recordings that several engines of a run made at once as PATH, PATH-1, PATH-2 ... are one trace, at PATH or at the
    folder that holds nothing else (see `recording.merge_recordings`). Tables are loaded when they are used, at once
    where a recording continues or several are merged; the check itself streams.
    """
    place = locate(path)
    if place.is_dir() and not (place / MANIFEST_FILE).exists():
        place = _only_run(place)
    trace = read_one(place)
    engines = _engines(place, trace)
    return trace if len(engines) == 1 else together(engines)


def together(traces: Sequence[Trace]) -> Trace:
    """One trace of what several engines of a run recorded, in memory: see `recording.merge_recordings`."""
    parts = [_engine_trace(trace) for trace in traces]
    manifest, tables = merge_recordings(parts)
    report(Path(parts[0].place), (manifest.notes or "").rpartition("; ")[2])
    return Trace.from_tables(manifest, tables)


def _engine_trace(trace: Trace) -> EngineTrace:
    tables = {name: table for name in trace.names if (table := trace.arrow(name)) is not None}
    return EngineTrace(place=str(trace.path or "a trace"), manifest=trace.manifest, tables=tables)


def _only_run(folder: Path) -> Path:
    """The trace in a folder that stands for all that are in it. Raises TraceError for none, and for several runs."""
    names = sorted({item.name.removesuffix(SUFFIX) for item in folder.iterdir() if is_trace(item)}, key=_number)
    if not names:
        raise TraceError(f"{folder}: no {MANIFEST_FILE} in it, so this is not a trace")
    first = locate(folder / names[0])
    if len(names) > 1 and _number(names[0])[0] == _number(names[-1])[0]:
        of_run = {trace.path for trace in _engines(first, read_one(first))}
        names = [name for name in names if locate(folder / name) not in of_run or locate(folder / name) == first]
    if len(names) > 1:
        raise TraceError(f"{folder} holds several traces: name one, such as {first}")
    return first


def _number(name: str) -> tuple[str, int]:
    """The name that engines of a run share, and the number of this one: ("x", 2) for "x-2", ("x", 0) for "x"."""
    base, dash, number = name.rpartition("-")
    return (base, int(number)) if dash and base and number.isdecimal() else (name, 0)


def _engines(first: Path, trace: Trace) -> list[Trace]:
    """A recorded trace and those that other engines of its run recorded at once, of the same name with higher numbers.

    One with a lower number that is of the same run stands for the run: then `trace` is only itself.
    """
    base, number = _number(first.name.removesuffix(SUFFIX))
    names = {item.name.removesuffix(SUFFIX) for item in first.parent.glob(f"{glob.escape(base)}*") if is_trace(item)}
    siblings = {_number(name)[1]: name for name in names if _number(name)[0] == base and _number(name)[1] != number}
    if trace.manifest.kind != "recorded" or not siblings:
        return [trace]
    traces = {number: trace}
    for at, name in sorted(siblings.items()):
        try:
            traces[at] = read_one(locate(first.parent / name))
        except TraceError as error:
            report(first, f"not put together with {name}: {error}")
    parts = {at: _engine_trace(recorded) for at, recorded in traces.items()}
    run, reached = {number}, [number]
    while reached:
        part = parts[reached.pop()]
        overlapping = [at for at in parts if at not in run and part.overlaps(parts[at])]
        run.update(overlapping)
        reached += overlapping
    return [traces[at] for at in sorted(run)] if min(run) == number else [trace]


def read_one(place: Path) -> Trace:
    """Read and check the trace or recording that is at this very place, as `read` does."""
    if place.name.endswith(SUFFIX) and (place / MANIFEST_FILE).exists():
        try:
            return _read_unfinished(place)
        except TraceError:
            if place.exists():
                raise
            # The recording was closed meanwhile.
            return read_one(place.with_name(place.name.removesuffix(SUFFIX)))
    trace = _open_trace(place)
    _check(trace)
    return trace


def _read_unfinished(folder: Path) -> Trace:
    """Read a recording that was interrupted, or that continues."""
    goes_on = in_progress(folder)
    notes: list[str] = []
    trace = read_recording(folder, notes, salvage=True)
    if goes_on:
        # Chunks read later might not fit those read before, or be gone.
        trace = trace.in_memory()
    if not folder.exists():
        raise TraceError(f"{folder}: gone while it was read")
    state = "it is still being recorded" if goes_on else "the recording was interrupted"
    note = f"unfinished: {'; '.join([state, *notes])}"
    report(folder, note)
    return trace.with_manifest(with_notes(trace.manifest, [note]))


def read_recording(folder: Path, notes: list[str], *, salvage: bool) -> Trace:
    """Return the present content of a recording, checked, lazily read. Raises TraceError.

    With `salvage` rows that make no valid trace are dropped and noted, see `recorded_tables`.
    """
    try:
        tables = recorded_tables(folder, notes, salvage=salvage)
    except FileNotFoundError as error:
        raise TraceError(f"{folder}: gone while it was read") from error
    rl_steps = _steps_of(tables)
    manifest = Manifest.read(folder / MANIFEST_FILE)
    if salvage or manifest.num_rl_steps is None:
        manifest = manifest.model_copy(update={"num_rl_steps": len(rl_steps)})
    if salvage and manifest.without_iterations is not None:
        there = {*tables["iterations"].rl_steps.tolist()} if "iterations" in tables else set()
        lost = sorted({*tables["outcomes"].rl_steps.tolist()} - there - {*manifest.without_iterations})
        if lost:
            notes.append(f"no iterations of rl_step {_few(lost)} are durable")
            manifest = manifest.model_copy(update={"without_iterations": (*manifest.without_iterations, *lost)})
    trace = Trace(manifest, tables, rl_steps, folder)
    _check(trace)
    return trace


def with_notes(manifest: Manifest, notes: list[str]) -> Manifest:
    """The same manifest with notes more."""
    return manifest.model_copy(update={"notes": "; ".join(filter(None, [manifest.notes, *notes])) or None})


def report(place: Path, note: str | None) -> None:
    """Print a note on a trace to standard error, once in a process, however often a command reads the trace."""
    _report_once(place.absolute(), f"{place}: {note}")


@cache
def _report_once(place: Path, line: str) -> None:
    progress(line)


def _check(trace: Trace) -> None:
    """Check values of stored tables, and how they fit together, some RL steps at a time."""
    stored = _stored_tables(trace)
    for rl_steps in _chunks(stored):
        check({name: table.part(rl_steps) for name, table in stored.items()}, trace.manifest.without_iterations)


def _open_trace(path: Path) -> Trace:
    """Open a trace with valid manifest, columns and RL steps; values are not checked yet. Raises TraceError."""
    check_source(path)
    if not path.is_dir():
        raise TraceError(f"{path}: a file; a trace is a folder")
    if not (path / MANIFEST_FILE).exists():
        raise TraceError(f"{path}: no {MANIFEST_FILE} in it, so this is not a trace")
    manifest = Manifest.read(path / MANIFEST_FILE)
    for name in REQUIRED_TABLES:
        if not (path / f"{name}.parquet").exists():
            raise TraceError(f"{path / name}.parquet: missing; a trace has {' and '.join(REQUIRED_TABLES)}")
    # First: what opens a damaged file may raise anything.
    check_sums(path)
    tables: dict[str, TraceTable] = {
        name: FileTable(name, file) for name in TABLES if (file := path / f"{name}.parquet").exists()
    }
    return Trace(manifest, tables, _steps_of(tables), path)


def checked(
    tables: Mapping[str, pd.DataFrame | pa.Table | None],
    num_before: Mapping[str, int] | None = None,
    without_iterations: Collection[int] | None = None,
) -> dict[str, MemoryTable]:
    """The conformed and checked tables of some RL steps. Raises TraceError.

    `num_before` rows of a table count as its rows before these when a fault names its row; `without_iterations` is as
    in `Manifest`.
    """
    if unknown := set(tables) - set(TABLES):
        raise TraceError(f"no table named {sorted(unknown)[0]!r}; there are: {', '.join(TABLES)}")
    parts = {}
    for name in TABLES:
        source = tables.get(name)
        if source is not None:
            table = frame_to_arrow(name, source) if isinstance(source, pd.DataFrame) else source
            first = (num_before or {}).get(name, 0)
            parts[name] = conform(
                TablePart(name=name, file=name, table=table, rows=np.arange(first, first + len(table)))
            )
        elif name in REQUIRED_TABLES:
            raise TraceError(f"table {name} is missing: a trace has {' and '.join(REQUIRED_TABLES)}")
    check(parts, without_iterations)
    return {name: MemoryTable(part.table) for name, part in parts.items()}


def locate(path: str | Path) -> Path:
    """The trace folder that `path` means: itself, or `trace/` in a RUN folder; else the recording of either.

    Raises TraceError for a path that the system refuses, such as a name that is too long.
    """
    path = Path(path)
    inner = path / "trace"
    try:
        if (path / MANIFEST_FILE).exists():
            return path
        if inner.is_dir():
            return inner
        recordings = [recording_of(place) for place in (path, inner) if place.name]
        return next((folder for folder in recordings if folder.is_dir()), path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def check_source(path: Path) -> None:
    """Raise TraceError for a path that is not of a folder or a file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TraceError(f"{path}: no such file or folder") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise TraceError(f"{path}: a pipe, a device or a socket; give a file or a folder")


def run_folder(trace: Path) -> Path:
    """The RUN folder that a trace folder, or the recording of one, is part of, else that folder."""
    return trace.parent if trace.name in ("trace", recording_of(Path("trace")).name) else trace


def _stored_tables(trace: Trace) -> dict[str, StoredTable]:
    return {name: table for name, table in trace._tables.items() if isinstance(table, StoredTable)}


def _chunks(tables: Mapping[str, StoredTable]) -> list[list[int]]:
    """All RL steps of all tables, in runs whose rows take about CHUNK_BYTES."""
    steps = np.unique(np.concatenate([np.arange(0), *(table.rl_steps for table in tables.values())]))
    size = np.zeros(len(steps))
    for table in tables.values():
        size[np.searchsorted(steps, table.rl_steps)] += table.rows_per_step * table.row_bytes
    chunk = (np.cumsum(size) // CHUNK_BYTES).astype(np.int64)
    return [run.tolist() for run in np.split(steps, np.flatnonzero(np.diff(chunk)) + 1) if len(run)]


def _steps_of(tables: Mapping[str, TraceTable]) -> list[int]:
    return list(tables["workload"].rl_steps.tolist())


def _few(values: list[Any]) -> str:
    return ", ".join([*map(str, values[:8]), *([f"... {values[-1]}"] if len(values) > 8 else [])])
