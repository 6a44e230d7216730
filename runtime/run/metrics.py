"""The figures of one RL step that people follow a run by, from its report and its rows of the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.errors import TraceError
from tltlab.traces.metrics import bubble_fraction, mean_accept_length, tail_fraction, tokens_per_s
from tltlab.traces.recorder import ColumnRows
from tltlab.traces.schema import GRAPH_KINDS, Manifest
from tltlab.traces.trace import Trace

from .rows import StepReport

Rows = Sequence[Mapping[str, Any]]

LENGTH_PERCENTILES = (50, 90, 99)
_TABLES = ("workload", "outcomes", "iterations", "steps", "spans")
_FIGURES = (tokens_per_s, bubble_fraction, tail_fraction, mean_accept_length)


def step_metrics(report: StepReport, rows: Mapping[str, Rows]) -> dict[str, float]:
    """Return the figures of an RL step by name, all finite; what is unknown is not there.

    `reward/*`: mean, standard deviation, and the share of groups whose rewards differ, from which alone is learnt.
    `time/*_s`: seconds per stage, `step_s` the step's, or their sum where it is not known. `rollout/*`:
    `tltlab.traces.metrics` of this step. `length/*`: tokens of the responses that ended, percentiles linear between
    ranks; `truncated_fraction` ended at a cap. `graphs/*`: shares of the engines' iterations by what they ran in.
    `mismatch/*` and `train/*`: what the trainer measured. `staleness/*`, `trained/*`, `generated/*`: where rollouts
    span updates, how old the tokens trained on are, and the lengths trained on and generated so far. `drafter/*`: the
    drafter in service, its age in RL steps and its updates. `recorder/share`: time for the trace, in engines and
    driver, over that of the step.

    >>> step_metrics(report, rows)["rollout/bubble_fraction"]  # doctest: +SKIP
    0.25
    """
    figures: dict[str, float | None] = {f"time/{name}_s": seconds for name, seconds in report.stages.items()}
    figures["time/step_s"] = report.seconds
    figures["recorder/share"] = (report.recorder_s + report.record_s) / report.seconds if report.seconds else None
    figures |= _rewards(report, rows["outcomes"]) | _rollout(report.rollout_s, rows) | _lengths(rows["outcomes"])
    figures |= _graphs(ColumnRows.of("iterations", rows["iterations"]).table["graph"])
    for name, value in report.metrics.items():
        kind, _, rest = name.partition("_")
        figures[f"mismatch/{rest}" if kind == "mismatch" else name if "/" in name else f"train/{name}"] = value
    for step in rows.get("steps", []):
        figures |= {f"drafter/{name}": step.get(f"drafter_{name}") for name in ("age", "updates")}
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def _graphs(kinds: pa.ChunkedArray) -> dict[str, float | None]:
    known = kinds.drop_null()
    counts = {each["values"]: each["counts"] for each in known.value_counts().to_pylist()}
    return {f"graphs/{kind}": counts.get(kind, 0) / len(known) for kind in GRAPH_KINDS} if counts else {}


def _rewards(report: StepReport, outcomes: Rows) -> dict[str, float | None]:
    groups: dict[str, list[float]] = {}
    for row in outcomes:
        if row.get("reward") is not None:
            groups.setdefault(row["prompt_id"], []).append(row["reward"])
    rewards = [reward for group in groups.values() for reward in group]
    mixed = [len(set(group)) > 1 for group in groups.values()]
    return {
        "reward/mean": report.reward_mean,
        "reward/std": float(np.std(rewards)) if rewards else None,
        "reward/mixed_groups": float(np.mean(mixed)) if mixed else None,
    }


def _rollout(rollout_s: float, rows: Mapping[str, Rows]) -> dict[str, float | None]:
    """Tokens per second, bubble, tail and accept length, each as `tltlab.traces.metrics` defines it."""
    # All responses were known from an epoch before (`prefix_reuse`): no engine had anything to do.
    if not rows["outcomes"] or not rollout_s:
        return {}
    tables = {
        name: given.table if isinstance(given, ColumnRows) else pd.DataFrame(given)
        for name in _TABLES
        if (given := rows[name])
    }
    # Every worker has a lane, one that got nothing to do as well: its idle time is part of the bubble.
    num_workers = len({row["lane"] for row in rows["spans"] if row["lane"].startswith("worker ")})
    try:
        trace = Trace.from_tables(Manifest(kind="recorded", num_workers=num_workers), tables)
    except TraceError:
        # Whoever reads the recording is told; the run is worth more than its figures.
        return {}
    return {f"rollout/{figure.__name__}": figure(trace) for figure in _FIGURES}


def _lengths(outcomes: Rows) -> dict[str, float | None]:
    ended = [row for row in outcomes if row["finish_reason"] != "abort"]
    if not ended:
        return {}
    lengths = np.array([row["response_tokens"] for row in ended])
    percentiles = zip(LENGTH_PERCENTILES, np.percentile(lengths, LENGTH_PERCENTILES), strict=True)
    return {
        **{f"length/p{rank}": float(value) for rank, value in percentiles},
        "length/max": float(lengths.max()),
        "length/mean": float(lengths.mean()),
        "length/truncated_fraction": sum(row["finish_reason"] == "length" for row in ended) / len(ended),
    }
