"""Crash-safe recording of a live run, and the repair of a recording that was interrupted.

While a run lasts, its trace PATH is recorded in the folder `PATH.recording`:

    manifest.json            the manifest
    000000/ 000001/ ...      one chunk per flush: `TABLE.arrow` (Arrow IPC) for each table that got rows

A chunk is written as `NNNNNN.tmp`, synced and renamed, so it is there as a whole or not at all, and a kill at any
moment loses only rows not yet flushed. A finished trace at PATH stays until `close` puts the new one in its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from .errors import ConfigError, RunError, TraceError
from .repair import finish, flushed, lock, recording_of, repair
from .schema import MANIFEST_FILE, TABLES, Manifest
from .storage import fsync_folder, write_durably
from .trace import Trace, refuse_foreign_target
from .validate import Part, check_values, conform

__all__ = ["Recorder", "repair"]


class Recorder:
    """Records a live run; `close` turns the recording into a valid trace at `path`.

    Append the workload row of a request no later than its outcome. A row is a dict with the columns of the table
    (`schema.TABLES`); null or missing is unknown. Rows are checked one by one at `flush`, how tables fit together at
    `close`; a fault is a TraceError, and what was flushed before stays. `seconds` is the time spent in here, read from
    `clock`. As a context manager it closes at the end, and after an exception flushes and leaves the recording for
    `repair`. Raises ConfigError where `path` is no trace, or a recording is there already.

    >>> with Recorder("run/trace", Manifest(kind="recorded", num_workers=2)) as recorder:  # doctest: +SKIP
    ...     recorder.append("steps", [{"rl_step": 0, "t_start": 0.0, "rollout_s": 12.5, "policy_version": 0}])
    ...     recorder.flush()
    """

    def __init__(self, path: str | Path, manifest: Manifest, *, clock: Callable[[], float] = time.perf_counter):
        self.path = Path(path)
        self.seconds = 0.0
        self._clock = clock
        self._rows: dict[str, list[Mapping[str, Any]]] = {}
        self._next_chunk = 0
        self._folder = recording_of(self.path)
        refuse_foreign_target(self.path)
        if self._folder.exists():
            raise ConfigError(
                f"{self._folder}: a recording is there already, in progress or interrupted; "
                f"'tltlab trace repair {self.path}' makes it a trace, or remove it"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=f".{self._folder.name}.") as temporary:
                new = Path(temporary) / "new"
                new.mkdir()
                write_durably(new / MANIFEST_FILE, manifest.to_json().encode())
                os.rename(new, self._folder)
            fsync_folder(self.path.parent)
        except OSError as error:
            raise ConfigError(f"cannot record to {self._folder}: {error.strerror}") from error
        self._lock = lock(self._folder)

    def append(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows in memory for the next flush. Raises TraceError for a table or column that is not in the format."""
        started = self._clock()
        if table not in TABLES:
            raise TraceError(f"no table named {table!r}; there are: {', '.join(TABLES)}")
        columns = set(TABLES[table].names)
        for row in rows:
            if unknown := row.keys() - columns:
                raise TraceError(
                    f"{table}: no column named {min(unknown)!r}; there are: {', '.join(TABLES[table].names)}"
                )
        self._rows.setdefault(table, []).extend(rows)
        self.seconds += self._clock() - started

    def flush(self) -> None:
        """Make everything appended so far durable, as one chunk: after a kill it is there as a whole or not at all."""
        started = self._clock()
        tables = {name: _to_arrow(name, self._rows[name]) for name in TABLES if self._rows.get(name)}
        if tables:
            final = self._folder / f"{self._next_chunk:06d}"
            temporary = final.with_suffix(".tmp")
            try:
                temporary.mkdir()
                for name, table in tables.items():
                    _write_arrow(temporary / f"{name}.arrow", table)
                fsync_folder(temporary)
                os.rename(temporary, final)
                fsync_folder(self._folder)
            except OSError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise RunError(f"cannot record to {self._folder}: {error.strerror or error}") from error
            self._next_chunk += 1
            self._rows.clear()
        self.seconds += self._clock() - started

    def snapshot(self) -> Trace:
        """Everything flushed so far, as a trace in memory. Raises TraceError where tables do not fit together."""
        return flushed(self._folder)

    def close(self) -> Path:
        """Flush, write the trace and remove the recording.

        Raises TraceError where tables do not fit together; the recording is kept then.
        """
        self.flush()
        started = self._clock()
        finish(self._folder, self.path, salvage=False)
        self._lock.close()
        self.seconds += self._clock() - started
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
        self._lock.close()


def _to_arrow(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a checked table. Raises TraceError naming the column."""
    columns = []
    for field in TABLES[name]:
        default = 0 if field.name == "turn" else None
        try:
            columns.append(pa.array([row.get(field.name, default) for row in rows], field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise TraceError(f"{name}: column {field.name}: {error}; it must be {field.type}") from error
    table = pa.table(columns, names=TABLES[name].names)
    part = conform(Part(name=name, file=f"{name} (being recorded)", table=table, rows=np.arange(len(table))))
    check_values(part)
    return part.table


def _write_arrow(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_durably(path, sink.getvalue())
