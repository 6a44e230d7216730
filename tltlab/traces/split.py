"""RL steps made of parts of one: of a recording that knows no others, or of some of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tltlab.arrays import Flags
from tltlab.errors import TraceError

from .schema import KEY
from .trace import Trace, with_notes


def regrouped(trace: Trace, parts: Sequence[tuple[int, Flags]], **tables: pd.DataFrame | None) -> Trace:
    """Return a trace of other RL steps, of responses of the one that there is: masks of rows of `outcomes`.

    Each part's responses are further samples, and `tables` replace those that have no keys of responses.
    """
    keys = trace.outcomes[list(KEY)]
    stride = int(keys["sample"].max()) + 1
    placed = [keys[mask].assign(part=rl_step, more=stride * n) for n, (rl_step, mask) in enumerate(parts)]
    for name in ("workload", "outcomes", "tokens", "acceptance"):
        if (rows := trace.table(name)) is not None:
            rows = rows.merge(pd.concat(placed), on=list(KEY))
            tables[name] = rows.assign(rl_step=rows["part"], sample=rows["sample"] + rows["more"])
    if trace.steps is not None:
        steps = [trace.steps.assign(rl_step=rl_step, rollout_s=None) for rl_step in dict(parts)]
        tables["steps"] = pd.concat(steps, ignore_index=True)
    manifest = trace.manifest.model_copy(update={"num_rl_steps": None, "without_iterations": None})
    found = trace.replace(manifest=manifest, **tables)
    return Trace(found.manifest, found.tables, found.rl_steps, trace.path)


def split_at_gaps(trace: Trace, num: int | None = None, gap_s: float = 0.0) -> Trace:
    """Return a trace of one RL step as several, which end where no response was under way.

    These are `num` RL steps, which end with the longest gaps, or as many as gaps last `gap_s`. Decisions
    are left out. Raises TraceError for several RL steps, missing times and too few gaps.
    """
    rows = trace.outcomes
    if len(trace.rl_steps) != 1 or rows[["t_submit", "t_finish"]].isna().any(axis=None):
        raise TraceError(f"a split needs one RL step whose responses have times; there are {len(trace.rl_steps)}")
    begin_s = rows.groupby(list(KEY[:3]))["t_submit"].transform("min").to_numpy()
    order = np.argsort(begin_s, kind="stable")
    gaps_s = begin_s[order][1:] - np.maximum.accumulate(rows["t_finish"].to_numpy()[order])[:-1]
    longest = np.argsort(-gaps_s, kind="stable")
    ends = longest[gaps_s[longest] > 0.0] if num else longest[gaps_s[longest] >= max(gap_s, 1e-9)]
    if len(ends) < (num or 2) - 1:
        raise TraceError(
            f"responses are under way all the time but for {len(ends)} gaps; tune and verify take one RL step too, and "
            "hold out responses"
        )
    ends = ends[: num - 1] if num else ends
    starts_s = np.concatenate([[0.0], begin_s[order][np.sort(ends) + 1]])

    def part_at(time_s: Any) -> Any:
        return np.searchsorted(starts_s, time_s, "right") - 1

    iterations = trace.iterations
    if iterations is not None:
        iterations["rl_step"] = part_at(iterations["t_start"])
    parts = [(n, part_at(begin_s) == n) for n in range(len(starts_s))]
    found = regrouped(trace, parts, iterations=iterations, decisions=None, spans=None)
    tables = {name: found.table(name) for name in ("outcomes", "iterations", "workload", "steps")}
    for name, table in tables.items():
        if table is None:
            continue
        for time in {"t_submit", "t_first_token", "t_finish", "t_start"} & {*table}:
            table[time] += starts_s[table["rl_step"]] * (1 if name == "steps" else -1)
        if "epoch" in table:
            table["epoch"] += table.groupby("prompt_id")["rl_step"].rank("dense").astype(int) - 1
    note = f"one RL step split into {len(starts_s)}, where nothing ran for {gaps_s[ends].min():.2g} s or longer"
    return found.replace(manifest=with_notes(found.manifest, [note]), **tables)
