"""Recording of a live run: its folder is a valid trace whenever the program ends, without rows not yet flushed.

A flush writes a file for each table and RL step that got rows, `NAME/part-000123.parquet` for RL step 123, and then
replaces the manifest, which names them: that is the moment at which they are there. Files that the manifest does not
name are nothing, and go with the next flush. Where an RL step got rows before, small parts of it are joined with the
new rows, so that a flush every few seconds leaves few files. A flush writes the whole manifest and looks at the names
of all parts, so its time grows with the RL steps recorded. A process that records holds the folder (`files.lock`).
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tltlab.errors import ConfigError, InputError, RunError, TraceError
from tltlab.files import LOCK, fsync_folder, lock, new_folder, sha256_of
from tltlab.records import Json

from .schema import MANIFEST_FILE, REQUIRED_TABLES, TABLES, Contents, Manifest, Rows, by_column
from .storage import StoredTable, damaged, refuse_foreign_target, table_writer
from .trace import (
    Trace,
    as_far_as_recorded,
    check_tables,
    locate,
    open_trace,
    read_one,
    with_notes,
)
from .validate import TablePart, check_values, conform

SAME = ("kind", "model", "num_workers", "max_response_tokens", "group_size", "seed")
"""Fields of the manifest in which a run and its continuation must agree."""
JOINED_BYTES = 64 << 20
"""Files of parts that are larger are not joined with later rows of their RL step."""
_PART = re.compile(r"(\w+)/part-(\d+)(?:-\d+)?\.parquet")


def repair(path: str | Path, out: str | Path | None = None) -> Trace:
    """Turn what is left of the trace `path` into a valid, finished one at `path`, or at `out`.

    Left out are requests without outcome in an interrupted recording; parts that are not what was written, and with one
    of an optional table its other rows of the RL step; and RL steps that are not valid then. The manifest gets the note
    "repaired: ..." with the losses. A trace that is whole is returned unchanged; `path` may be a RUN folder. With
    another `out` nothing at `path` changes. Raises TraceError where a required table is lost as a whole, ConfigError
    where the recording is in progress, and InputError where the disk refuses; nothing is changed then.
    """
    place = locate(path)
    place = place if place.name not in ("", "..") else place.resolve()
    target = place if out is None else Path(out)
    contents = Contents.read(place)
    lost = damaged(place, contents)
    if not lost and not contents.unfinished:
        trace = read_one(place)
        return trace if target.absolute() == place.absolute() else read_one(trace.write(target))
    with lock(place) if contents.unfinished else contextlib.nullcontext():
        notes = ["the recording was interrupted"] if contents.unfinished else []
        trace = _sound(as_far_as_recorded(_without(place, contents, lost, notes), notes), notes)
        manifest = with_notes(trace.manifest, [f"repaired: {'; '.join(notes)}"])
        trace.with_manifest(manifest).write(target, repairs=target.absolute() == place.absolute())
    return read_one(target)


def _without(place: Path, contents: Contents, lost: Sequence[str], notes: list[str]) -> Trace:
    """A trace without its damaged parts, and of optional tables without the RL steps of these; what goes is noted."""
    steps: dict[str, set[int]] = defaultdict(set)
    for part in lost:
        name, of_step = part.partition("/")[0].removesuffix(".parquet"), _rl_step_of(part)
        if name in REQUIRED_TABLES and of_step is None:
            raise TraceError(f"{place / part}: not what was written (damaged), and without it nothing can be repaired")
        if name not in REQUIRED_TABLES and of_step is not None:
            steps[name].add(of_step)
        notes.append(f"{part} was damaged and its rows were dropped")
    sound = {part: sha256 for part, sha256 in (contents.parts or {}).items() if part not in lost}
    trace = open_trace(place, Contents(manifest=contents.manifest, parts=sound, unfinished=True))
    return trace.filtered(lambda name, rl_step: rl_step not in steps[name])


def _sound(trace: Trace, notes: list[str]) -> Trace:
    """A trace without RL steps that are not valid, which are noted."""
    faulty: set[int] = set()
    for one in trace.iter_rl_steps():
        try:
            check_tables(one)
        except TraceError as fault:
            faulty.update(one.rl_steps)
            notes.append(f"rl_step {one.rl_steps[0]} was dropped: {fault}")
    sound = set(trace.rl_steps) - faulty
    of_responses = [name for name, schema in TABLES.items() if "prompt_id" in schema.names]
    return trace.filtered(lambda name, step: step in sound if name in of_responses else step not in faulty)


def _rl_step_of(part: str) -> int | None:
    """The RL step of a part by its name; None for a file of all RL steps."""
    named = _PART.fullmatch(part)
    return int(named[2]) if named else None


class Recorder:
    """Records a live run into the trace folder `path`; `close` marks it as finished.

    Append the workload row of a request no later than its outcome, and other rows of it no earlier. Rows are dicts with
    the columns of the table (`schema.TABLES`), or a `pa.Table`; null or missing is unknown, a `turn` 0. Rows are
    checked one by one when they are appended or flushed, how tables fit together at `close`; a fault is a TraceError,
    and what was flushed before stays. As a context manager it closes at the end, and after an exception flushes and
    leaves the recording as it is. Raises ConfigError where there is something at `path`.

    >>> with Recorder("run/trace", Manifest(kind="recorded", num_workers=2)) as recorder:  # doctest: +SKIP
    ...     recorder.append("steps", [{"rl_step": 0, "t_start": 0.0, "rollout_s": 12.5, "policy_version": 0}])
    ...     recorder.flush()
    """

    def __init__(self, path: str | Path, manifest: Manifest):
        self._begin(Path(path))
        self._make(manifest)

    @classmethod
    def reopen(cls, path: str | Path, manifest: Manifest, rl_steps: int) -> Self:
        """Go on recording the trace `path` of a run that ended or was killed, from RL step `rl_steps` on.

        The rows of all RL steps before it are kept; later ones are gone at once. With 0 there need be nothing. The
        manifest stays the old one; where `manifest` names other hardware or another engine, its notes record the
        change. Raises ConfigError where another process records there or `manifest` is another run's (`SAME`), RunError
        where one of these RL steps is missing or damaged, or the disk refuses, TraceError for a damaged manifest.
        """
        recorder = cls.__new__(cls)
        recorder._begin(Path(path))
        if not (recorder.path / MANIFEST_FILE).exists():
            if rl_steps:
                raise recorder._cannot_continue(rl_steps, "nothing is recorded there")
            recorder._make(manifest)
            return recorder
        recorder._lock = lock(recorder.path)
        try:
            recorder._go_on(manifest, rl_steps)
        except BaseException as error:
            recorder._lock.close()
            if isinstance(error, OSError):
                raise recorder._refused(error) from error
            raise
        return recorder

    def _begin(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, list[pa.Table]] = {}
        self._manifest_fields: Json = {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tltlab-recorder")
        # A write in a thread, with its rows and fields: where it fails, these come before those appended since.
        self._writing: tuple[Future[None], dict[str, list[pa.Table]], Json] | None = None
        # Parts of a table and RL step that this process wrote, in order, with their numbers of rows.
        self._sizes: dict[tuple[str, int], list[tuple[str, int]]] = {}
        refuse_foreign_target(path)

    def _make(self, manifest: Manifest) -> None:
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(
                f"{self.path}: a trace is there already, or the recording of one; choose another place, or remove it"
            )
        self._contents = Contents(manifest=manifest, parts={}, unfinished=True)
        try:
            with new_folder(self.path, durable=True, replace=False) as new:
                self._contents.write(new)
        except OSError as error:
            raise ConfigError(f"cannot record to {self.path}: {error.strerror}") from error
        self._lock = lock(self.path)

    def _go_on(self, manifest: Manifest, rl_steps: int) -> None:
        found = Contents.read(self.path)
        for name in SAME:
            before, after = getattr(found.manifest, name), getattr(manifest, name)
            if before != after:
                raise ConfigError(
                    f"{self.path} is the trace of another run: its {name} is {before!r}, this run's {after!r}; "
                    "continue with the recipe that it began with, or choose another folder"
                )
        lost = damaged(self.path, found)
        missing = {_rl_step_of(part) or 0 for part in lost}
        names, files = ("hardware", "engine"), list(self._files(found, lost))
        for name in (*REQUIRED_TABLES, "steps"):
            there = {step for _, table, stored in files if table == name for step in stored.rl_steps.tolist()}
            if there or name in REQUIRED_TABLES:
                missing |= set(range(rl_steps)) - there
        if (first := min(missing, default=rl_steps)) < rl_steps:
            raise self._cannot_continue(rl_steps, f"RL step {first} is missing or damaged")
        changed = [f"{n} {getattr(manifest, n)}" for n in names if getattr(found.manifest, n) != getattr(manifest, n)]
        notes = [f"from RL step {rl_steps} on {', '.join(changed)}"] if changed else []
        kept = with_notes(found.manifest.model_copy(update={"num_rl_steps": None}), notes)
        self._contents = Contents(manifest=kept, parts=found.parts, unfinished=True)
        self._keep(files, rl_steps)

    def _files(self, contents: Contents, lost: Sequence[str] = ()) -> Iterable[tuple[str, str, StoredTable]]:
        """The sound files of tables: place, table and rows."""
        for name in TABLES:
            for place, file in contents.files_of(self.path, name).items():
                if place not in lost:
                    yield place, name, StoredTable.open(name, [file])

    def _keep(self, files: Iterable[tuple[str, str, StoredTable]], rl_steps: int) -> None:
        """Have the recording hold the rows in these files of RL steps before `rl_steps`, and no others."""
        parts: dict[str, str] = {}
        sums = self._contents.parts or {}
        for place, name, table in files:
            before = table.rl_steps[table.rl_steps < rl_steps].tolist()
            if len(before) == len(table.rl_steps):
                parts[place] = sums.get(place) or sha256_of(self.path / place)
            else:
                for step in before:
                    parts |= dict([self._write_part(name, step, [table.load([step])])])
        self._sizes = {}
        self._commit(self._contents.manifest, parts)

    def rewind(self, rl_steps: int) -> None:
        """Take back every row of RL step `rl_steps` and later, flushed or not: they are to be recorded anew."""
        self._settle()
        for table, rows in self._rows.items():
            self._rows[table] = [part.filter(pc.less(part["rl_step"], rl_steps)) for part in rows]
        try:
            self._keep(list(self._files(self._contents)), rl_steps)
        except OSError as error:
            raise self._refused(error) from error

    def append(self, table: str, rows: Rows) -> None:
        """Keep rows in memory for the next flush. Raises TraceError for a table or column that is not in the format."""
        self._rows.setdefault(table, []).append(by_column(table, rows))

    def set_manifest(self, **fields: Any) -> None:
        """Set fields of the manifest, such as `notes`, from the next flush on."""
        self._manifest_fields |= fields

    def flush(self, *, wait: bool = True) -> None:
        """Make everything appended so far durable: after a kill it is there as a whole or not at all.

        Without `wait` a thread does it meanwhile, and a fault is raised by whatever is called next.
        """
        self._settle()
        rows, self._rows = self._rows, {}
        # Taken here: a thread that writes shares nothing with callers.
        fields, self._manifest_fields = self._manifest_fields, {}
        if wait:
            # Here and not in the thread: an interpreter that is about to exit, with a trace to finish, starts none.
            self._done(lambda: self._write(rows, fields), rows, fields)
        else:
            self._writing = self._writer.submit(self._write, rows, fields), rows, fields

    def _write(self, rows: dict[str, list[pa.Table]], fields: Json) -> None:
        try:
            tables = {name: _checked(name, rows[name]) for name in TABLES if any(map(len, rows.get(name, ())))}
            if not tables and not fields:
                return
            parts, sizes = dict(self._contents.parts or {}), dict[tuple[str, int], list[tuple[str, int]]]()
            for name, table in tables.items():
                for rl_step in pc.unique(table["rl_step"]).to_pylist():
                    new = table.filter(pc.equal(table["rl_step"], rl_step))
                    before = [*self._sizes.get((name, rl_step), ())]
                    pieces, num_rows = [new], len(new)
                    while before and before[-1][1] <= num_rows and self._can_be_joined(before[-1][0]):
                        place, size = before.pop()
                        del parts[place]
                        pieces, num_rows = [self.path / place, *pieces], num_rows + size
                    place, parts_sum = self._write_part(name, rl_step, pieces)
                    parts[place] = parts_sum
                    sizes[name, rl_step] = [*before, (place, num_rows)]
            self._commit(self._contents.manifest.model_copy(update=fields), parts)
            self._sizes |= sizes
        except OSError as error:
            raise self._refused(error) from error

    def _can_be_joined(self, place: str) -> bool:
        file = self.path / place
        try:
            return file.stat().st_size <= JOINED_BYTES and sha256_of(file) == (self._contents.parts or {})[place]
        except OSError:
            return False

    def _write_part(self, name: str, rl_step: int, pieces: Iterable[pa.Table | Path]) -> tuple[str, str]:
        """Write rows of an RL step, or of earlier parts of it, under a name that nothing has; place and sum."""
        inside = self.path / name
        if not inside.is_dir():
            inside.mkdir()
            fsync_folder(self.path)
        numbers = (f"{name}/part-{rl_step:06d}{f'-{n}' if n else ''}.parquet" for n in count())
        place = next(place for place in numbers if not (self.path / place).exists())
        with table_writer(self.path / place, name) as writer:
            for piece in pieces:
                if isinstance(piece, Path):
                    with pq.ParquetFile(piece) as file:
                        for group in range(file.num_row_groups):
                            writer.append(file.read_row_group(group))
                else:
                    writer.append(piece)
        return place, writer.sha256

    def _commit(self, manifest: Manifest, parts: Mapping[str, str], *, unfinished: bool = True) -> None:
        """Have the trace hold these parts, and no others, from this moment on. Raises OSError."""
        for folder in {(self.path / part).parent for part in parts.keys() - (self._contents.parts or {}).keys()}:
            fsync_folder(folder)
        contents = Contents(manifest=manifest, parts=parts, unfinished=unfinished)
        contents.write(self.path)
        self._contents = contents
        for file in (*self.path.glob("*.parquet"), *self.path.glob("*/*.parquet")):
            place = file.relative_to(self.path).as_posix()
            if place not in parts and place.partition("/")[0].removesuffix(".parquet") in TABLES:
                with contextlib.suppress(OSError):  # it is nothing, and goes with the next flush
                    file.unlink()

    def _settle(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            (future, *written), self._writing = self._writing, None
            self._done(future.result, *written)

    def _done(self, write: Callable[[], None], rows: dict[str, list[pa.Table]], fields: Json) -> None:
        """Where `write` fails its rows come before those appended since."""
        try:
            write()
        except BaseException:
            for table, since in self._rows.items():
                rows.setdefault(table, []).extend(since)
            self._rows, self._manifest_fields = rows, fields | self._manifest_fields
            raise

    def snapshot(self) -> Trace:
        """Everything flushed so far, as a trace in memory. Raises TraceError where tables do not fit together."""
        self._settle()
        trace = open_trace(self.path, self._contents)
        check_tables(trace)
        return trace.in_memory()

    def close(self) -> Path:
        """Flush, check the trace and mark it as finished.

        Raises TraceError where tables do not fit together, InputError where the disk refuses; the recording is kept
        then as it is.
        """
        self.flush()
        with self._lock:
            trace = open_trace(self.path, self._contents)
            check_tables(trace)
            try:
                self._commit(trace.manifest, self._contents.parts or {}, unfinished=False)
                (self.path / LOCK).unlink()
            except OSError as error:
                raise InputError(f"cannot finish the trace {self.path}: {error.strerror or error}") from error
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
        self._rows = {}
        self._writer.shutdown()
        self._lock.close()

    def _refused(self, error: OSError) -> RunError:
        return RunError(f"cannot record to {self.path}: {error.strerror or error}")

    def _cannot_continue(self, rl_steps: int, why: str) -> RunError:
        return RunError(
            f"cannot continue recording {self.path} from RL step {rl_steps}: {why}; continue from an earlier "
            "checkpoint, or begin a new run"
        )


def _checked(name: str, parts: Sequence[pa.Table]) -> pa.Table:
    """Rows as a table of the format. Raises TraceError naming the column."""
    table = pa.concat_tables(parts)
    if table["turn"].null_count if "turn" in table.column_names else 0:
        at = table.column_names.index("turn")
        table = table.set_column(at, table.schema.field(at), table["turn"].fill_null(0))
    part = conform(TablePart.of(name, table, f"{name} (being recorded)"))
    check_values(part)
    return part.table
