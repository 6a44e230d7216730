"""From a recording to a trace, also an interrupted one; and from a trace back to a recording, to continue with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from tltlab.errors import ConfigError, InputError, RunError, TraceError
from tltlab.files import fsync_folder, lock, replace_durably

from .recording import chunks_of, cut, new_recording, read_chunks, recording_of, rows_in
from .schema import MANIFEST_FILE, REQUIRED_TABLES, SUFFIX, TABLES, Manifest, is_trace
from .storage import refuse_foreign_target
from .trace import Trace, locate, read_one, read_recording, with_notes

SAME = ("kind", "model", "num_workers", "max_response_tokens", "group_size", "seed")
"""Fields of the manifest in which a run and its continuation must agree."""


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
