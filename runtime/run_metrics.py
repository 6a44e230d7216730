"""The figures of one RL step that people follow a run by, from its report and its rows of the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from tltlab import metrics
from tltlab.schema import TABLES, Manifest
from tltlab.trace import Trace

from .step_rows import Row, StepReport

LENGTH_PERCENTILES = (50, 90, 99)

STAGES = ("rollout_s", "reward_s", "inference_s", "train_s", "sync_s")

_TABLES = ("workload", "outcomes", "iterations", "steps", "spans")
"""What the metrics look at: texts and counterfactuals are most of a step's rows, and say nothing about its time."""


def step_metrics(report: StepReport, rows: Mapping[str, list[Row]]) -> dict[str, float]:
    """Return the figures of an RL step by name, all finite; what is unknown is not there. Raises TraceError for rows
    that are no valid trace.

    `reward/*`: mean, standard deviation, and the share of groups whose rewards differ, from which alone is learnt.
    `time/*_s`: seconds per stage, `step_s` the step's, or their sum where it is not known. `rollout/*`:
    `tltlab.metrics` of this step. `length/*`: tokens of the responses that ended, percentiles linear between ranks;
    `truncated_fraction` ended at a cap. `mismatch/*` and `train/*`: what the trainer measured. `drafter/*`: the drafter
    in service, its age in RL steps and its updates. `recorder/share`: time for the trace, in engines and driver, over
    that of the step.

    >>> step_metrics(report, rows)["rollout/bubble_fraction"]  # doctest: +SKIP
    0.25
    """
    stages = {name: getattr(report, name) for name in STAGES}
    step_s = report.step_s or sum(stages.values())
    found: dict[str, float | None] = {f"time/{name}": seconds for name, seconds in stages.items()}
    found["time/step_s"] = step_s
    found["recorder/share"] = (report.recorder_s + report.record_s) / step_s if step_s else None
    found |= _rewards(report, rows["outcomes"]) | _rollout(rows) | _lengths(rows["outcomes"])
    for name, value in report.metrics.items():
        kind, _, rest = name.partition("_")
        found[f"mismatch/{rest}" if kind == "mismatch" else f"train/{name}"] = value
    for step in rows.get("steps", []):
        found |= {f"drafter/{name}": step.get(f"drafter_{name}") for name in ("age", "updates")}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _rewards(report: StepReport, outcomes: Sequence[Row]) -> dict[str, float | None]:
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


def _rollout(rows: Mapping[str, list[Row]]) -> dict[str, float | None]:
    # All responses were known from an epoch before (`prefix_reuse`): no engine had anything to do.
    if not rows["workload"]:
        return {}
    # Every worker has a lane, one that got nothing to do as well: its idle time is part of the bubble.
    lanes = {row["lane"] for row in rows.get("spans", []) if row["lane"].startswith("worker ")}
    tables = {name: pa.Table.from_pylist(list(rows[name]), schema=TABLES[name]) for name in _TABLES if rows.get(name)}
    trace = Trace.from_tables(Manifest(kind="recorded", num_workers=len(lanes) or None), tables)
    return {
        "rollout/tokens_per_s": metrics.tokens_per_s(trace),
        "rollout/bubble_fraction": metrics.bubble_fraction(trace),
        "rollout/tail_fraction": metrics.tail_fraction(trace),
        "rollout/mean_accept_length": metrics.mean_accept_length(trace),
    }


def _lengths(outcomes: Sequence[Row]) -> dict[str, float | None]:
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
