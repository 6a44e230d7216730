"""Going on with a trace that a run began: which of what it left holds the RL steps so far, made a recording again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from tltlab.errors import ConfigError, RunError
from tltlab.files import replace_durably

from .recording import chunks_of, cut, lock, new_recording, readable, recording_of
from .schema import MANIFEST_FILE, REQUIRED_TABLES, TABLES, Manifest
from .trace import Trace, is_trace, read, refuse_foreign_target

SAME = ("kind", "model", "num_workers", "max_response_tokens", "group_size", "seed")
"""Fields of the manifest in which a run and its continuation must agree."""


def reopen(path: Path, manifest: Manifest, rl_steps: int) -> int:
    """Make the recording of the trace `path` hold the rows of RL steps before `rl_steps`, and no others.

    They are taken from the recording that is there, else from the finished trace at `path`, which stays as it is. A
    kill at any moment leaves what was there, or the recording as it should be. Returns the number of its next chunk.
    Raises ConfigError where another process records, or `manifest` is that of another run; RunError where neither
    holds every one of these RL steps.
    """
    folder = recording_of(path)
    refuse_foreign_target(path)
    held = "nothing is recorded there"
    if folder.is_dir():
        with lock(folder):
            there = Manifest.read(folder / MANIFEST_FILE)
            _check_same_run(folder, there, manifest)
            notes: list[str] = []
            good = readable(chunks_of(folder), notes)
            missing = _missing(((name, chunk.load(name)) for chunk in good for name in _TELLING), rl_steps)
            if missing is None:
                _note(folder, there, [*notes, *_elsewhere(there, manifest, rl_steps)])
                for chunk in set(chunks_of(folder)) - set(good):
                    os.rename(chunk.path, chunk.path.with_suffix(".tmp"))
                return cut(folder, rl_steps)
        held = f"{folder} lacks RL step {missing}"
    chunks: Iterable[Mapping[str, pa.Table]] = ()
    if is_trace(path):
        trace = read(path)
        _check_same_run(path, trace.manifest, manifest)
        missing = _missing(((name, part.arrow(name)) for part in trace.parts() for name in _TELLING), rl_steps)
        if missing is None:
            begun = trace.manifest.model_copy(update={"num_rl_steps": None})
            manifest = _noted(begun, _elsewhere(begun, manifest, rl_steps))
            chunks = _chunks(trace, rl_steps)
        held = f"{path} lacks RL step {missing}"
    if rl_steps and not chunks:
        raise RunError(
            f"cannot go on recording {path} from RL step {rl_steps}: {held}; "
            "go on from an earlier checkpoint, or begin a new run"
        )
    gone = folder.with_name(f".{folder.name}.short")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        # It lacks RL steps that the finished trace has, and that trace stays.
        os.rename(folder, gone)
    new_recording(folder, manifest, chunks)
    shutil.rmtree(gone, ignore_errors=True)
    return len(chunks_of(folder))


_TELLING = (*REQUIRED_TABLES, "steps")
"""The tables that, where there are any rows of them, have rows of every RL step."""


def _missing(tables: Iterable[tuple[str, pa.Table | None]], rl_steps: int) -> int | None:
    """The first RL step before `rl_steps` that some table lacks."""
    found: dict[str, set[int]] = {name: set() for name in REQUIRED_TABLES}
    for name, table in tables:
        if table is not None:
            found.setdefault(name, set()).update(np.unique(table["rl_step"].to_numpy()).tolist())
    return min((step for step in range(rl_steps) for steps in found.values() if step not in steps), default=None)


def _chunks(trace: Trace, rl_steps: int) -> Iterator[Mapping[str, pa.Table]]:
    for part in trace.iter_rl_steps():
        if part.rl_steps[0] < rl_steps:
            tables = {name: part.arrow(name) for name in TABLES}
            yield {name: table for name, table in tables.items() if table is not None and len(table)}


def _check_same_run(place: Path, there: Manifest, now: Manifest) -> None:
    for name in SAME:
        before, after = getattr(there, name), getattr(now, name)
        if before != after:
            raise ConfigError(
                f"{place} is the trace of another run: its {name} is {before!r}, this run's {after!r}; "
                "go on with the recipe that it began with, or choose another folder"
            )


def _elsewhere(there: Manifest, now: Manifest, rl_steps: int) -> list[str]:
    """What a reader has to know of a run that went on with another engine or on another machine."""
    changed = [f"{n} {getattr(now, n)}" for n in ("hardware", "engine") if getattr(there, n) != getattr(now, n)]
    return [f"from RL step {rl_steps} on {', '.join(changed)}"] if changed else []


def _noted(manifest: Manifest, notes: list[str]) -> Manifest:
    if not notes:
        return manifest
    return manifest.model_copy(update={"notes": "; ".join([*([manifest.notes] if manifest.notes else []), *notes])})


def _note(folder: Path, manifest: Manifest, notes: list[str]) -> None:
    """Add notes to the manifest of a recording."""
    if notes:
        replace_durably(folder / MANIFEST_FILE, _noted(manifest, notes).to_json().encode())
