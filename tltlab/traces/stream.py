"""Traces larger than memory, written RL step by RL step; and what a trace holds, in numbers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd
import pyarrow as pa

from tltlab.errors import InputError, TraceError

from . import metrics
from .schema import REQUIRED_TABLES, Contents, Manifest
from .storage import TableWriter, cannot_write, new_trace_folder, table_writer
from .trace import Trace, checked


class StreamWriter:
    """Writes a trace of any length in the memory of one RL step and one row group.

    A context manager. The trace is at `path` after the block ended well and not before: a block that raises, or a
    killed process, leaves what was there. Each `append` is checked as its own trace; the manifest gets the number
    of RL steps. Raises ConfigError where `path` is something that is no trace, InputError where it cannot be written.

    >>> with StreamWriter("huge", Manifest(kind="synthetic", num_workers=64)) as writer:  # doctest: +SKIP
    ...     for workload, outcomes in rl_steps:
    ...         writer.append(workload, outcomes)
    """

    def __init__(self, path: str | Path, manifest: Manifest):
        self.path = Path(path)
        self.manifest = manifest
        self.num_rl_steps = 0
        self._last = -1
        self._stack, self._files = ExitStack(), ExitStack()
        self._writers: dict[str, TableWriter] = {}
        self._failure: InputError | None = None

    def __enter__(self) -> Self:
        try:
            self._folder = self._stack.enter_context(new_trace_folder(self.path))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._stack.push(self._files)
        return self

    def append(
        self, workload: pd.DataFrame | pa.Table, outcomes: pd.DataFrame | pa.Table, **optional: pd.DataFrame | pa.Table
    ) -> None:
        """Add one or more whole RL steps, later than all before: their rows of each table. Raises TraceError.

        `optional` are the other tables by name. Rows of a text that repeats may come as an Arrow dictionary array.
        """
        sources = {"workload": workload, "outcomes": outcomes, **optional}
        num_before = {name: writer.num_rows for name, writer in self._writers.items()}
        tables = checked(sources, num_before, self.manifest.without_iterations)
        steps = [int(rl_step) for table in tables.values() for rl_step in table.rl_steps]
        if steps and min(steps) <= self._last:
            raise TraceError(
                f"{self.path}: rl_step {min(steps)} came after rl_step {self._last}; "
                "append RL steps whole and in ascending order"
            )
        try:
            for name, table in tables.items():
                self._writer(name).append(table.load(None))
        except OSError as error:
            self._failure = cannot_write(self.path, error)
            raise self._failure from error
        self._last = max([self._last, *steps])
        self.num_rl_steps += len(tables["workload"].rl_steps)

    def _writer(self, name: str) -> TableWriter:
        if name not in self._writers:
            file = self._folder / f"{name}.parquet"
            self._writers[name] = self._files.enter_context(table_writer(file, name))
        return self._writers[name]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if self._failure is not None:  # The caller continued, but part of an RL step may be missing.
                raise self._failure
            try:
                for name in REQUIRED_TABLES:
                    self._writer(name)
                self._files.close()
                manifest = self.manifest.model_copy(update={"num_rl_steps": self.num_rl_steps})
                parts = {f"{name}.parquet": writer.sha256 for name, writer in self._writers.items()}
                Contents(manifest=manifest, parts=parts).write(self._folder)
                self._stack.close()
            except OSError as failed:
                raise cannot_write(self.path, failed) from failed


def describe(trace: Trace) -> dict[str, Any]:
    """The keys of `tltlab trace describe --json`: manifest, rows of each table, one dict per RL step, prompt share."""
    return {
        "manifest": trace.manifest.model_dump(),
        "tables": {name: trace.num_rows(name) for name in trace.names},
        "rl_steps": metrics.per_step(trace),
        "prompt_share": metrics.prompt_share(trace),
    }


def count(trace: Trace) -> dict[str, Any]:
    """RL steps, responses and tokens of a trace, and the names of its tables."""
    return {
        "num_rl_steps": len(trace.rl_steps),
        "num_responses": trace.num_rows("outcomes"),
        "num_tokens": metrics.num_tokens(trace),
        "tables": list(trace.names),
    }
