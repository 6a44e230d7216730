"""From a recording to a trace: what `Recorder.close` does, and the repair of a recording that was interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tltlab.errors import ConfigError, TraceError

from .recording import SUFFIX, Chunk, chunks_of, lock, readable, recording_of, tables_of
from .schema import KEY, MANIFEST_FILE, REQUIRED_TABLES, TABLES, UNIQUE, Manifest
from .trace import Trace, cannot_write, is_trace, locate, read, refuse_foreign_target

_TOGETHER = "together.tmp"


def repair(path: str | Path, out: str | Path | None = None) -> Trace:
    """Turn the interrupted recording of the trace `path` into a valid trace at `path`, or at `out`.

    Every flushed row is kept but those without which the trace is valid: outcomes without their workload row, tokens
    and acceptance without their outcome, rows recorded twice, chunks that cannot be read. The manifest's notes say
    "repaired: ..." with what was lost. A valid trace without a recording beside it is returned unchanged; `path` may
    be a RUN folder or the recording itself. With another `out` nothing at `path` changes. A finished trace at `path` is
    replaced by the recording of the same run, resumed, that has every response of it. Raises TraceError for a damaged
    trace, ConfigError where the recording is in progress or a finished trace would lose responses, and InputError
    where the disk refuses; the recording is still there then.
    """
    path = Path(path)
    if not path.name:  # "."
        path = path.absolute()
    if path.name.endswith(SUFFIX):
        path = path.with_name(path.name.removesuffix(SUFFIX))
    elif not recording_of(path).exists():
        path = path / "trace" if recording_of(path / "trace").exists() else locate(path)
    folder = recording_of(path)
    if out is not None and Path(out).absolute() == path.absolute():
        out = None
    if not folder.exists():
        trace = read(path)
        return read(trace.write(out)) if out is not None else trace
    with lock(folder):
        if _closed_already(folder, path):
            _remove(folder)
            return repair(path, out)
        earlier = read(path) if out is None and is_trace(path) else None
        finish(folder, path if out is None else Path(out), salvage=True, keep=out is not None, earlier=earlier)
    return read(path if out is None else out)


def finish(folder: Path, target: Path, *, salvage: bool, keep: bool = False, earlier: Trace | None = None) -> None:
    """Write the trace of a recording to `target`, then remove the recording unless `keep`.

    Tables are first strung together chunk by chunk, then written as every trace is, RL step by RL step, so that a
    recording larger than memory passes. `earlier` is the trace at `target` of which nothing may be lost: ConfigError.
    """
    refuse_foreign_target(target)
    manifest = Manifest.read(folder / MANIFEST_FILE)
    chunks = chunks_of(folder)
    notes: list[str] = []
    if salvage:
        chunks = readable(chunks, notes)
    keep_rows = _salvage(chunks, notes) if salvage else {}
    together = folder / _TOGETHER
    shutil.rmtree(together, ignore_errors=True)
    try:
        together.mkdir()
        steps = _string_together(chunks, together, keep_rows)
        notes = [f"repaired: {'; '.join(['the recording was interrupted', *notes])}"] if salvage else []
        update = {
            "notes": "; ".join(([manifest.notes] if manifest.notes else []) + notes) or None,
            "num_rl_steps": len(steps) if salvage or manifest.num_rl_steps is None else manifest.num_rl_steps,
        }
        (together / MANIFEST_FILE).write_text(manifest.model_copy(update=update).to_json(), encoding="utf-8")
        found = read(together)
        if earlier is not None:
            _check_goes_on(earlier, found, folder)
        found.write(target)
    except BaseException as error:
        shutil.rmtree(together, ignore_errors=True)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from error
        raise
    if keep:
        shutil.rmtree(together)
    else:
        _remove(folder)


def _check_goes_on(earlier: Trace, found: Trace, folder: Path) -> None:
    """Raise ConfigError unless `found`, of the recording `folder`, has every response of `earlier`, of the same run."""
    ours, theirs = (
        trace.manifest.model_copy(update={"notes": None, "num_rl_steps": None}) for trace in (found, earlier)
    )
    lacks = "is of another run" if ours != theirs else ""
    for step in earlier.rl_steps if not lacks else ():
        now = found.select([step]).outcomes if step in found.rl_steps else None
        if lost := int((~_rows_in(earlier.select([step]).outcomes, now)).sum()):
            lacks = f"lacks {lost} of its responses in RL step {step}"
            break
    if lacks:
        raise ConfigError(
            f"{earlier.path} is a finished trace, and the interrupted recording {folder} {lacks}; name another place "
            "with --out, or remove one of them"
        )


def flushed(folder: Path) -> Trace:
    """The trace that a recording's whole chunks make so far, in memory."""
    parts = {name: list(tables_of(chunks_of(folder), name)) for name in TABLES}
    tables = {name: pa.concat_tables(found) for name, found in parts.items() if found}
    tables |= {name: TABLES[name].empty_table() for name in REQUIRED_TABLES if name not in tables}
    return Trace.from_tables(Manifest.read(folder / MANIFEST_FILE), tables)


def _remove(folder: Path) -> None:
    """Remove a recording in one move, so that no half of one is left."""
    gone = folder.with_name(f".{folder.name}.done")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def _closed_already(folder: Path, path: Path) -> bool:
    """Whether the trace at `path` is this recording, closed by a process that was killed before it tidied up."""
    try:
        ours, theirs = read(folder / _TOGETHER), read(path)
    except TraceError:
        return False
    same = (ours.manifest, ours.names) == (theirs.manifest, theirs.names)
    return same and all(ours.arrow(name) == theirs.arrow(name) for name in ours.names)


def _salvage(chunks: list[Chunk], notes: list[str]) -> dict[str, Any]:
    """Which rows of each table to keep, as masks over all chunks; what goes and what is lost is noted."""
    keep: dict[str, Any] = {}
    keys: dict[str, pd.DataFrame] = {}
    for name, unique in UNIQUE.items():
        loaded = [t for chunk in chunks if (t := chunk.load(name, unique)) is not None]
        if not loaded:
            continue
        keys[name] = pa.concat_tables(loaded).to_pandas()
        keep[name] = ~keys[name].duplicated().to_numpy()
        _note(notes, int((~keep[name]).sum()), f"rows of {name} recorded twice were dropped")
    for name, parent in (("outcomes", "workload"), ("tokens", "outcomes"), ("acceptance", "outcomes")):
        if name in keys:
            has_parent = _rows_in(keys[name], keys[parent][keep[parent]] if parent in keys else None)
            _note(notes, int((keep[name] & ~has_parent).sum()), f"rows of {name} without their {parent} were dropped")
            keep[name] &= has_parent
    if "workload" in keys:
        finished = _rows_in(keys["workload"], keys["outcomes"][keep["outcomes"]] if "outcomes" in keys else None)
        lost = keep["workload"] & ~finished
        steps = sorted(set(keys["workload"]["rl_step"][lost]))
        _note(notes, int(lost.sum()), f"requests (rl_step {', '.join(map(str, steps))}) have no outcome")
    return keep


def _rows_in(keys: pd.DataFrame, among: pd.DataFrame | None) -> Any:
    if among is None:
        return np.zeros(len(keys), bool)
    columns = list(KEY)
    return pd.MultiIndex.from_frame(keys[columns]).isin(pd.MultiIndex.from_frame(among[columns]))


def _note(notes: list[str], count: int, what: str) -> None:
    if count:
        notes.append(f"{count} {what}")


def _string_together(chunks: list[Chunk], folder: Path, keep: Mapping[str, Any]) -> set[int]:
    """Write each table as one Parquet file, a row group per chunk; returns the RL steps of the workload."""
    steps: set[int] = set()
    for name, schema in TABLES.items():
        done = 0
        writer = None
        for table in tables_of(chunks, name):
            rows = table
            if name in keep:
                rows = table.filter(pa.array(keep[name][done : done + len(table)]))
                done += len(table)
            if name == "workload":
                steps |= set(rows["rl_step"].unique().to_pylist())
            writer = writer or pq.ParquetWriter(folder / f"{name}.parquet", schema)
            writer.write_table(rows)
        if writer is None and name in REQUIRED_TABLES:
            writer = pq.ParquetWriter(folder / f"{name}.parquet", schema)
        if writer is not None:
            writer.close()
    return steps
