"""A trace: what a rollout was asked for and what came out. Reading, checking, slicing and writing of trace folders."""

from __future__ import annotations

import glob
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.console import progress
from tltlab.drafters.specs import Drafters
from tltlab.errors import TraceError
from tltlab.files import in_progress

from .engines import merge_recordings, overlap
from .schema import KEY, MANIFEST_FILE, REQUIRED_TABLES, TABLES, Contents, Manifest, is_trace
from .storage import (
    MemoryTable,
    ReadTable,
    StoredTable,
    TraceTable,
    frame_to_arrow,
    new_trace_folder,
    refuse_damaged,
    write_tables,
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
        self.tables = dict(tables)
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
        sources: dict[str, TraceTable] = {**_checked(tables, manifest.without_iterations)}
        if manifest.num_rl_steps is None:
            return _counted(manifest, sources, None)
        return cls(manifest, sources, _steps_of(sources))

    def arrow(self, name: str, rl_step: int | None = None) -> pa.Table | None:
        """A table, or its rows of one RL step, as Arrow; None where the trace has no such table."""
        assert name in TABLES, name
        if name not in self.tables:
            return None
        return self.tables[name].load(None if rl_step is None else [rl_step])

    def table(self, name: str, *, rl_step: int | None = None) -> pd.DataFrame | None:
        """A table as a DataFrame; None where the trace has no such table.

        With `rl_step` only that RL step is read and nothing is kept, for traces larger than memory.
        """
        if rl_step is not None or name not in self.tables:
            part = self.arrow(name, rl_step)
            return None if part is None else part.to_pandas()
        if name not in self._frames:
            table = self.arrow(name)
            assert table is not None
            self._frames[name] = table.to_pandas()
        return self._frames[name].copy(deep=False)

    def num_rows(self, name: str) -> int:
        """Rows of a table, 0 where the trace has no such table; nothing is read."""
        return self.tables[name].num_rows if name in self.tables else 0

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
        return tuple(name for name in TABLES if name in self.tables)

    def select(self, rl_steps: Sequence[int]) -> Trace:
        """The trace of some of its RL steps. Raises TraceError for one it has not."""
        selected = sorted(set(rl_steps))
        if missing := set(selected) - set(self.rl_steps):
            raise TraceError(f"{self.path or 'trace'}: no rl_step {min(missing)}; there are: {few(self.rl_steps)}")
        return self._of_steps(selected, selected, self.tables)

    def iter_rl_steps(self) -> Iterator[Trace]:
        """One-step traces in order: the way through a trace larger than memory.

        Tables are read when they are used, those of neighbouring RL steps together (CHUNK_BYTES), and kept while one
        of these RL steps is.
        """
        for part in self.parts():
            shared = {
                name: ReadTable(table) if isinstance(table, StoredTable) else table
                for name, table in part.tables.items()
            }
            yield from (self._of_steps([rl_step], [rl_step], shared) for rl_step in part.rl_steps)

    def parts(self) -> Iterator[Trace]:
        """This trace in traces of neighbouring RL steps, each about CHUNK_BYTES when all its tables are read.

        A trace in memory, or one that small, is its only part. All rows of all tables are in one part.
        """
        chunks = _chunks(self.tables)
        if len(chunks) < 2:
            yield self
            return
        whole = set(self.rl_steps)
        for chunk in chunks:
            yield self._of_steps([rl_step for rl_step in chunk if rl_step in whole], chunk, self.tables)

    def with_manifest(self, manifest: Manifest) -> Trace:
        """The same tables under another manifest."""
        return Trace(manifest, self.tables, self.rl_steps, self.path)

    def in_memory(self) -> Trace:
        """The same with all tables read."""
        tables = {name: MemoryTable(name, table.load(None)) for name, table in self.tables.items()}
        return Trace(self.manifest, tables, self.rl_steps, self.path)

    def filtered(self, keeps: Callable[[str, int], bool]) -> Trace:
        """The same without the rows of RL steps in tables that `keeps` is not true for; it is not checked anew."""
        tables = {
            name: table.select([rl_step for rl_step in table.rl_steps.tolist() if keeps(name, rl_step)])
            for name, table in self.tables.items()
        }
        return _counted(self.manifest, tables, self.path)

    def replace(self, *, manifest: Manifest | None = None, **tables: pd.DataFrame | pa.Table | None) -> Trace:
        """The same trace with some tables (None: without them) or the manifest replaced, checked anew."""
        old: dict[str, pd.DataFrame | pa.Table | None] = {name: self.arrow(name) for name in self.tables}
        return Trace.from_tables(manifest or self.manifest, {**old, **tables})

    def write(self, path: str | Path, *, repairs: bool = False) -> Path:
        """Write the trace folder `path` in one move: a killed writer leaves the old trace or none.

        A file for each table, row groups cut at RL steps; same tables, same bytes. A trace at `path` is replaced, files
        in it that are not the format's are kept; anything else there is a ConfigError, and so is a recording that was
        not closed, unless this `repairs` it.
        """
        path = Path(path)
        with new_trace_folder(path, repairs=repairs) as new:
            Contents(manifest=self.manifest, parts=write_tables(new, self.tables)).write(new)
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

    Of a run that was killed or still continues responses are read that are whole and durable. A note "unfinished: ..."
    goes to the manifest and to standard error. Recordings that several engines of a run made at once as PATH, PATH-1,
    PATH-2 ... are one trace, at PATH or at the folder that holds nothing else (see `engines.merge_recordings`). Tables
    are loaded when they are used, at once where a recording continues or several are merged; the check itself streams.
    """
    place = locate(path)
    if not (place / MANIFEST_FILE).exists():
        check_source(place)
        if not place.is_dir():
            raise TraceError(f"{place}: a file; a trace is a folder")
        place = _only_run(place)
    trace = read_one(place)
    engines = _engines(place, trace)
    return trace if len(engines) == 1 else together(engines)


def together(traces: Sequence[Trace]) -> Trace:
    """One trace of what several engines of a run recorded, in memory: see `engines.merge_recordings`."""
    manifest, tables = merge_recordings(traces)
    report(traces[0].path or Path("a trace"), (manifest.notes or "").rpartition("; ")[2])
    return Trace.from_tables(manifest, tables)


def _only_run(folder: Path) -> Path:
    """The trace in a folder that stands for all that are in it. Raises TraceError for none, and for several runs."""
    names = sorted((item.name for item in folder.iterdir() if is_trace(item)), key=_number)
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
    base, number = _number(first.name)
    names = {item.name for item in first.parent.glob(f"{glob.escape(base)}*") if is_trace(item)}
    siblings = {_number(name)[1]: name for name in names if _number(name)[0] == base and _number(name)[1] != number}
    if trace.manifest.kind != "recorded" or not siblings:
        return [trace]
    traces = {number: trace}
    for at, name in sorted(siblings.items()):
        try:
            traces[at] = read_one(locate(first.parent / name))
        except TraceError as error:
            report(first, f"not put together with {name}: {error}")
    run, reached = {number}, [number]
    while reached:
        part = traces[reached.pop()]
        overlapping = [at for at in traces if at not in run and overlap(part, traces[at])]
        run.update(overlapping)
        reached += overlapping
    return [traces[at] for at in sorted(run)] if min(run) == number else [trace]


def read_one(place: Path) -> Trace:
    """Read and check the trace that is at this very place, as `read` does."""
    while True:
        contents = Contents.read(place)
        goes_on = contents.unfinished and in_progress(place)
        try:
            trace, notes = open_trace(place, contents), list[str]()
            if contents.unfinished:
                trace = as_far_as_recorded(trace, notes)
            check_tables(trace)
            if goes_on:
                # Parts may go that are read later.
                trace = trace.in_memory()
        except TraceError:
            if Contents.read(place) == contents:
                raise
            continue
        if not contents.unfinished:
            return trace
        if goes_on or Contents.read(place) == contents:
            notes.insert(0, "it is still being recorded" if goes_on else "the recording was interrupted")
            note = f"unfinished: {'; '.join(notes)}"
            report(place, note)
            return trace.with_manifest(with_notes(trace.manifest, [note]))


def as_far_as_recorded(trace: Trace, notes: list[str]) -> Trace:
    """The trace of a recording without requests that have no outcome; what it lacks is noted.

    Keys are read some RL steps at a time; the workload is in memory then.
    """
    workloads = []
    for part in trace.parts():
        asked, ended = (pd.MultiIndex.from_frame(part._frame(name)[list(KEY)]) for name in REQUIRED_TABLES)
        workloads.append(part.tables["workload"].load(None).filter(asked.isin(ended)))
    workload, tables = MemoryTable("workload", pa.concat_tables(workloads)), trace.tables
    if under_way := trace.num_rows("workload") - workload.num_rows:
        before = tables["workload"]
        after = dict(zip(workload.rl_steps.tolist(), workload.rows_per_step.tolist(), strict=True))
        counts = zip(before.rl_steps.tolist(), before.rows_per_step.tolist(), strict=True)
        steps = ", ".join(str(step) for step, num_rows in counts if num_rows > after.get(step, 0))
        notes.append(f"{under_way} requests (rl_step {steps}) have no outcome")
        # An RL step of nothing else would be one without responses.
        tables = {**tables, "workload": workload}
    manifest = trace.manifest
    if manifest.without_iterations is not None:
        there = {*tables["iterations"].rl_steps.tolist()} if "iterations" in tables else set()
        lost = sorted({*tables["outcomes"].rl_steps.tolist()} - there - {*manifest.without_iterations})
        if lost:
            notes.append(f"no iterations of rl_step {few(lost)} are durable")
            manifest = manifest.model_copy(update={"without_iterations": (*manifest.without_iterations, *lost)})
    return _counted(manifest, tables, trace.path)


def with_notes(manifest: Manifest, notes: list[str]) -> Manifest:
    """The same manifest with notes more."""
    return manifest.model_copy(update={"notes": "; ".join(filter(None, [manifest.notes, *notes])) or None})


def report(place: Path, note: str | None) -> None:
    """Print a note on a trace to standard error, once in a process, however often a command reads the trace."""
    _report_once(place.absolute(), f"{place}: {note}")


@cache
def _report_once(place: Path, line: str) -> None:
    progress(line)


def check_tables(trace: Trace) -> None:
    """Check values of tables, and how they fit together, some RL steps at a time. Raises TraceError."""
    for rl_steps in _chunks(trace.tables):
        parts = {name: table.part(rl_steps) for name, table in trace.tables.items()}
        check(parts, trace.manifest.without_iterations)


def open_trace(path: Path, contents: Contents) -> Trace:
    """Open a trace whose files are as they were written, with valid columns and RL steps; values are not checked yet.

    Raises TraceError.
    """
    # First: what opens a damaged file may raise anything.
    refuse_damaged(path, contents)
    tables: dict[str, TraceTable] = {}
    for name in TABLES:
        files = contents.files_of(path, name)
        has_none = contents.parts is not None and not any(part.startswith(name) for part in contents.parts)
        if files or (name in REQUIRED_TABLES and has_none):
            tables[name] = StoredTable.open(name, [*files.values()])
        elif name in REQUIRED_TABLES:
            raise TraceError(f"{path / name}.parquet: missing; a trace has {' and '.join(REQUIRED_TABLES)}")
    if contents.unfinished:
        return _counted(contents.manifest, tables, path)
    return Trace(contents.manifest, tables, _steps_of(tables), path)


def _checked(
    tables: Mapping[str, pd.DataFrame | pa.Table | None],
    without_iterations: Collection[int] | None = None,
) -> dict[str, MemoryTable]:
    """The conformed and checked tables of a trace; `without_iterations` is as in `Manifest`. Raises TraceError."""
    if unknown := set(tables) - set(TABLES):
        raise TraceError(f"no table named {sorted(unknown)[0]!r}; there are: {', '.join(TABLES)}")
    parts = {}
    for name in TABLES:
        source = tables.get(name)
        if source is not None:
            table = frame_to_arrow(name, source) if isinstance(source, pd.DataFrame) else source
            parts[name] = conform(TablePart.of(name, table, name))
        elif name in REQUIRED_TABLES:
            raise TraceError(f"table {name} is missing: a trace has {' and '.join(REQUIRED_TABLES)}")
    check(parts, without_iterations)
    return {name: MemoryTable(name, part.table) for name, part in parts.items()}


def locate(path: str | Path) -> Path:
    """The trace folder that `path` means: itself, or `trace/` in a RUN folder.

    Raises TraceError for a path that the system refuses, such as a name that is too long.
    """
    path = Path(path)
    try:
        return path / "trace" if not (path / MANIFEST_FILE).exists() and (path / "trace").is_dir() else path
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


def file_of_run(trace: Trace, name: str) -> Path | None:
    """The file of that name in the trace's folder, else in the RUN folder that the trace is part of."""
    if trace.path is None:
        return None
    folders = (trace.path, run_folder(trace.path))
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def is_run(folder: Path) -> bool:
    """Return True for a RUN folder, or a trace's."""
    return (folder / "trace").is_dir() or (folder / "run.json").is_file() or is_trace(folder)


def run_folder(trace: Path) -> Path:
    """The RUN folder that a trace folder is part of, else that folder."""
    return trace.parent if trace.name == "trace" else trace


def _chunks(tables: Mapping[str, TraceTable]) -> list[list[int]]:
    """All RL steps of all tables, in runs whose rows take about CHUNK_BYTES of memory when they are read."""
    steps = np.unique(np.concatenate([np.arange(0), *(table.rl_steps for table in tables.values())]))
    size = np.zeros(len(steps))
    for table in tables.values():
        size[np.searchsorted(steps, table.rl_steps)] += table.rows_per_step * table.row_bytes
    chunk = (np.cumsum(size) // CHUNK_BYTES).astype(np.int64)
    return [run.tolist() for run in np.split(steps, np.flatnonzero(np.diff(chunk)) + 1) if len(run)]


def _counted(manifest: Manifest, tables: Mapping[str, TraceTable], path: Path | None) -> Trace:
    """A trace whose manifest has the number of RL steps in its tables."""
    rl_steps = _steps_of(tables)
    return Trace(manifest.model_copy(update={"num_rl_steps": len(rl_steps)}), tables, rl_steps, path)


def _steps_of(tables: Mapping[str, TraceTable]) -> list[int]:
    return list(tables["workload"].rl_steps.tolist())


def few(values: Sequence[Any]) -> str:
    """The first five of some values, and the last.

    >>> few(range(7))
    '0, 1, 2, 3, 4, ... 6'
    """
    return ", ".join([*map(str, values[:5]), *([f"... {values[-1]}"] if len(values) > 5 else [])])
