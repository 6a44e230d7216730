"""Traces that several engines of a run recorded at once, each for itself, put together into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from tltlab.errors import TraceError

from .schema import TABLES, Manifest

Trace = Any
"""A `tltlab.traces.trace.Trace`, whose module uses this one."""


def created_s(trace: Trace) -> float:
    """When a recording began, in seconds since 1970; 0 where that is unknown."""
    return datetime.fromisoformat(trace.manifest.created).timestamp() if trace.manifest.created else 0.0


def times(trace: Trace) -> dict[int, tuple[float, float]]:
    """Start and end of each RL step in seconds since 1970, for RL steps in `steps`."""
    if trace.manifest.created is None or trace.steps is None:
        return {}
    lasted = trace.outcomes.groupby("rl_step")["t_finish"].max()
    steps = pd.DataFrame({"start": trace.steps.set_index("rl_step")["t_start"], "lasted": lasted})
    steps = steps.dropna(subset="start").fillna(0.0)
    starts_s = created_s(trace) + steps["start"]
    return dict(zip(steps.index.tolist(), zip(starts_s, starts_s + steps["lasted"], strict=True), strict=True))


def overlap(one: Trace, other: Trace) -> bool:
    """Return True if both were recorded at once, by engines of the same kind."""
    same = ("model", "engine", "kind", "source")
    if any(getattr(one.manifest, name) != getattr(other.manifest, name) for name in same):
        return False
    ends = [max((end for _, end in times(trace).values()), default=-np.inf) for trace in (one, other)]
    return created_s(other) <= ends[0] and created_s(one) <= ends[1]


def merge_recordings(parts: Sequence[Trace]) -> tuple[Manifest, dict[str, pd.DataFrame]]:
    """One trace of what the engines of a run recorded each for itself: workers 0 to N - 1, in this order.

    RL steps are taken for one that have one number, or, where numbers do not go together, that overlap in time; times
    then count from its earliest start. A prompt's samples are numbered on where several parts have the same ones.
    Raises TraceError for traces of other models, and for tables that only a trainer's trace has.
    """
    first = parts[0].manifest
    for part in parts:
        if part.manifest.model != first.model:
            raise TraceError(f"{part.path} is of {part.manifest.model}, {parts[0].path} of {first.model}: two runs")
        if foreign := {"spans", "spot_training"} & {name for name in part.names if part.num_rows(name)}:
            raise TraceError(f"{part.path} has {min(foreign)}, so it is a whole run's, not one engine's")
    places, (workers, num_workers) = _places(parts), _workers(parts)
    tables: dict[str, pd.DataFrame] = {}
    for name in TABLES:
        frames = [table.assign(part=n) for n, part in enumerate(parts) if (table := part.table(name)) is not None]
        if frames:
            tables[name] = _placed(name, pd.concat(frames, ignore_index=True), places, workers)
    keys = tables["workload"]
    twice = keys.duplicated(["whole", "prompt_id", "sample", "turn"], keep=False)
    ambiguous = keys[twice.groupby([keys["whole"], keys["prompt_id"]]).transform("any")]
    samples = _offsets(ambiguous, "sample", ["whole", "prompt_id"], ["part", "rl_step"])
    for name, rows in tables.items():
        if "sample" in rows:
            _count_on(rows, "sample", samples)
        if "iteration" in rows:
            _count_on(rows, "iteration", _offsets(rows, "iteration", ["part", "whole"], ["rl_step"]))
        tables[name] = rows.assign(rl_step=rows["whole"])
    steps = tables.pop("steps", None)
    if steps is not None and all("steps" in part.names for part in parts):
        # One row for each RL step of the whole, since the first recording began.
        began_s = np.array([created_s(part) for part in parts])
        starts_s = steps["t_start"] + began_s[steps["part"]] - began_s.min()
        steps = steps[steps["whole"].isin(keys["whole"])].assign(t_start=starts_s, rollout_s=None)
        tables["steps"] = steps.sort_values(["whole", "t_start"], kind="stable").drop_duplicates("whole")
    notes = [note for note in dict.fromkeys(part.manifest.notes for part in parts) if note]
    names = [part.path.name for part in parts if part.path]
    notes.append(f"put together from {', '.join(names)}: workers in this order")
    hardware = ", ".join(dict.fromkeys(part.manifest.hardware for part in parts if part.manifest.hardware))
    update = {"num_workers": num_workers, "num_rl_steps": None, "notes": "; ".join(notes), "hardware": hardware or None}
    drafters = {name: traits for part in parts for name, traits in part.manifest.drafters.items()}
    named = [part.manifest.without_iterations for part in parts]
    without = None
    if all(steps is not None for steps in named):
        # RL steps without iterations in any part.
        there = set(tables["iterations"]["whole"]) if "iterations" in tables else set()
        moved = {places.get((at, step), (step, 0.0))[0] for at, steps in enumerate(named) for step in steps or ()}
        without = tuple(sorted(moved - there))
    return first.model_copy(update=update | {"drafters": drafters, "without_iterations": without}), tables


_Places = dict[tuple[int, int], tuple[int, float]]
"""For a part's RL step: the RL step of the whole, and the seconds by which the part began later."""


def _places(parts: Sequence[Trace]) -> _Places:
    numbers = [(at, step) for at, part in enumerate(parts) for step in part.rl_steps]
    spans = {(at, step): span for at, part in enumerate(parts) for step, span in times(part).items()}
    if any(piece not in spans for piece in numbers):
        return {(at, step): (step, 0.0) for at, step in numbers}
    overlaps: list[list[tuple[int, int]]] = []
    end_s = -np.inf
    for piece in sorted(numbers, key=lambda piece: spans[piece]):
        if spans[piece][0] > end_s:
            overlaps.append([])
        overlaps[-1].append(piece)
        end_s = max(end_s, spans[piece][1])
    numbers_agree = all(len({step for _, step in pieces}) == 1 for pieces in overlaps)
    if numbers_agree or _overlap_in_turn(parts, overlaps):
        by_number: dict[int, list[tuple[int, int]]] = {}
        for at, step in numbers:
            by_number.setdefault(step, []).append((at, step))
        groups = sorted(by_number.items())
    else:
        groups = list(enumerate(overlaps))
    starts = {number: min(spans[piece][0] for piece in pieces) for number, pieces in groups}
    return {piece: (number, spans[piece][0] - starts[number]) for number, pieces in groups for piece in pieces}


def _overlap_in_turn(parts: Sequence[Trace], overlaps: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Return True if RL steps of new weights begin before those of old ones end, so that time does not separate any."""
    versions = [
        {} if part.steps is None else part.steps.set_index("rl_step")["policy_version"].to_dict() for part in parts
    ]
    return any(
        len({versions[at][step] for at, step in pieces if at == engine}) > 1
        for pieces in overlaps
        for engine in {at for at, _ in pieces}
    )


def _workers(parts: Sequence[Trace]) -> tuple[dict[tuple[int, int | None], int], int]:
    """The number of each part's workers in the whole, None for one that no response names, and how many there are."""
    numbers: dict[tuple[int, int | None], int] = {}
    num_workers = 0
    for at, part in enumerate(parts):
        own = sorted(part.outcomes["worker"].dropna().astype(int).unique().tolist())
        numbers |= {(at, worker): num_workers + n for n, worker in enumerate(own)} | {(at, None): num_workers}
        num_workers += max(1, len(own))
    return numbers, num_workers


def _placed(
    name: str, rows: pd.DataFrame, places: _Places, workers: Mapping[tuple[int, int | None], int]
) -> pd.DataFrame:
    """Rows of all parts with the RL step of the whole as `whole`, and times and workers of the whole."""
    # Iterations may be of RL steps of which no response is whole.
    pieces = zip(rows["part"].tolist(), rows["rl_step"].tolist(), strict=True)
    place = [places.get(piece, (piece[1], 0.0)) for piece in pieces]
    rows["whole"], later_s = np.array([p[0] for p in place], np.int64), np.array([p[1] for p in place])
    for time_s in ("t_submit", "t_first_token", "t_finish", "t_start") if name != "steps" else ():
        if time_s in rows:
            rows[time_s] += later_s
    if "worker" in rows:
        numbers = zip(rows["part"].tolist(), rows["worker"].tolist(), strict=True)
        rows["worker"] = [None if pd.isna(w) else workers.get((part, w), workers[part, None]) for part, w in numbers]
    return rows


def _offsets(rows: pd.DataFrame, column: str, group: list[str], pieces: list[str]) -> pd.Series[int]:
    """By how much the numbers in each piece of a group count on from those of the pieces before it."""
    sizes = rows.groupby([*group, *pieces])[column].max() + 1
    return sizes.groupby(group).cumsum() - sizes


def _count_on(rows: pd.DataFrame, column: str, offsets: pd.Series[int]) -> None:
    at = pd.MultiIndex.from_frame(rows[list(offsets.index.names)])
    rows[column] += offsets.reindex(at).fillna(0).to_numpy(np.int64)
