"""The timeline as Chrome trace-event JSON, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tltlab.errors import ConfigError, TraceError
from tltlab.files import write_file
from tltlab.strategy import Strategy
from tltlab.traces import metrics
from tltlab.traces.lanes import aligned_offsets, lanes, step_offsets
from tltlab.traces.trace import Trace

_US = 1e6
_STEPS = "RL steps"
_ITERATION_ARGS = (
    "iteration", "batch", "num_waiting", "context_tokens", "prefill_tokens", "drafter", "draft_depth",
    "tokens_to_verify", "num_drafted", "num_accepted", "num_generated",
)  # fmt: skip


def to_perfetto(
    trace: Trace,
    *,
    rl_step: int | Literal["all"] = "all",
    process: int = 1,
    offsets: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Slices (`ph` "X", times in microseconds) per lane, one track of RL steps, a counter of the running requests.

    Iterations, where recorded, get a track of their own below their worker, with batch, strategy and accepted tokens as
    arguments; so do spans of a simulation. An arrow leads from each weight sync to the next rollout. `process` keeps
    several traces in one file apart, `offsets` places RL steps elsewhere than where `step_offsets` does. Raises
    TraceError where there are no times.

    {"ph": "X", "pid": 1, "tid": 2, "name": "decode", "cat": "decode", "ts": 500000.0, "dur": 1250000.0}
    """
    places = step_offsets(trace) if offsets is None else offsets
    steps = trace.rl_steps if rl_step == "all" else [rl_step]
    shift = {step: places[step] if rl_step == "all" else 0.0 for step in steps if step in trace.rl_steps}
    segments = lanes(trace, rl_step, offsets=places)
    tracks = {_STEPS: 1}
    for lane in segments["lane"].unique():
        tracks[lane] = len(tracks) + 1
        tracks[f"{lane} iterations"] = len(tracks) + 1
    events: list[dict[str, Any]] = []

    def add(track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        tid, category = tracks.setdefault(track, len(tracks) + 1), name.split(" ")[0]
        event = {"ph": "X", "pid": process, "tid": tid, "name": name, "cat": category}
        event |= {"ts": start_s * _US, "dur": (end_s - start_s) * _US}
        events.append(event | ({"args": args} if args else {}))

    def named(tid: int, kind: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": process, "tid": tid, "name": kind, "args": args}

    rollouts = {step: d for step, d in metrics.rollout_s(trace).items() if step in shift and d is not None}
    for step, duration in rollouts.items():
        rollout = trace.select([step])
        facts = {"bubble_fraction": metrics.bubble_fraction(rollout), "tail_fraction": metrics.tail_fraction(rollout)}
        arguments = {name: value for name, value in facts.items() if value is not None}
        add(_STEPS, f"rollout {step}", shift[step], shift[step] + duration, **arguments)
    for lane, kind, start_s, end_s in segments.itertuples(index=False):
        add(lane, kind, start_s, end_s)
    for step in shift:
        for track, name, start_s, end_s, args in _details(trace, step):
            add(track, name, shift[step] + start_s, shift[step] + end_s, **args)
        events += _counter(trace, step, shift[step], process)
    events += _arrows(segments, {step: shift[step] for step in rollouts}, tracks, process)
    used = {event["tid"] for event in events if event["ph"] == "X"}
    whole = f"{trace.manifest.name or 'trace'} ({trace.manifest.kind})"
    names = [named(0, "process_name", name=whole), named(0, "process_sort_index", sort_index=process)]
    for track, tid in tracks.items():
        if tid in used:
            names += [named(tid, "thread_name", name=track), named(tid, "thread_sort_index", sort_index=tid)]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def write_perfetto(path: str | Path, *traces: Any, rl_step: int | Literal["all"] = "all") -> Path:
    """Write traces, one process each, as one JSON file in one move; RL steps of several start together."""
    path = Path(path)
    traces = tuple(getattr(trace, "trace", trace) for trace in traces)
    offsets = aligned_offsets(*traces) if rl_step == "all" and len(traces) > 1 else None
    parts = [to_perfetto(trace, rl_step=rl_step, process=i, offsets=offsets) for i, trace in enumerate(traces, 1)]
    whole = parts[0] | {"traceEvents": [event for part in parts for event in part["traceEvents"]]}
    write_file(path, json.dumps(whole, separators=(",", ":"), allow_nan=False))
    return path


def _details(trace: Trace, step: int) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """Track, name, start, end and arguments of every iteration; without iterations, of the workers' spans."""
    rows = trace.table("iterations", rl_step=step)
    if rows is not None and len(rows):
        for row in rows.to_dict("records"):
            args = {name: row[name] for name in _ITERATION_ARGS if not pd.isna(row[name])}
            end_s = row["t_start"] + row["duration"]
            yield f"worker {row['worker']} iterations", "iteration", row["t_start"], end_s, {**args, **_strategy(row)}
        return
    spans = trace.table("spans", rl_step=step)
    for row in [] if spans is None else spans.to_dict("records"):
        if row["lane"].startswith("worker ") and row["kind"] in metrics.ROLLOUT_KINDS and not pd.isna(row["batch"]):
            args = {"batch": int(row["batch"])} | ({} if pd.isna(row["detail"]) else {"strategy": row["detail"]})
            end_s = row["t_start"] + row["duration"]
            yield f"{row['lane']} iterations", row["kind"], row["t_start"], end_s, args


def _strategy(row: Mapping[Any, Any]) -> dict[str, str]:
    """The strategy in one word, where the row has a whole one."""
    try:
        depth, top_k, verify = (int(row[name]) for name in ("draft_depth", "top_k", "tokens_to_verify"))
        return {} if pd.isna(row["drafter"]) else {"strategy": str(Strategy(row["drafter"], depth, top_k, verify))}
    except ConfigError:
        return {}


def _arrows(
    segments: pd.DataFrame, rollout_start_s: Mapping[int, float], tracks: Mapping[str, int], process: int
) -> list[dict[str, Any]]:
    """Flow events from each weight sync to the next rollout, which is the first with those weights."""
    events: list[dict[str, Any]] = []
    syncs = segments[(segments["kind"] == "weight_sync") & (segments["lane"] == "trainer")]
    for sync_s, end_s in zip(syncs["start_s"], syncs["end_s"], strict=True):
        later = [start_s for start_s in rollout_start_s.values() if start_s >= end_s - 1e-6 * abs(end_s)]
        if later:
            arrow = {"pid": process, "name": "new weights", "cat": "weights", "id": f"{process}.{len(events)}"}
            events.append({"ph": "s", "tid": tracks["trainer"], "ts": sync_s * _US, **arrow})
            events.append({"ph": "f", "bp": "e", "tid": tracks[_STEPS], "ts": min(later) * _US, **arrow})
    return events


def _counter(trace: Trace, step: int, shift_s: float, process: int) -> list[dict[str, Any]]:
    try:
        times, counts = metrics.running_requests(trace, step)
    except TraceError:
        return []  # iterations without request times: there are slices, but no counter
    name = "running requests"
    return [
        {"ph": "C", "pid": process, "name": name, "ts": (shift_s + time) * _US, "args": {"running": count}}
        for time, count in zip(times.tolist(), counts.tolist(), strict=True)
    ]
