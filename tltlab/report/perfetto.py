"""The timeline as Chrome trace-event JSON, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tltlab.errors import TraceError
from tltlab.files import write_file
from tltlab.traces import metrics
from tltlab.traces.lanes import aligned_offsets, lanes, step_offsets
from tltlab.traces.trace import Trace

_US = 1e6
_STEPS = "RL steps"
_ITERATION_ARGS = (
    "iteration", "batch", "num_waiting", "context_tokens", "prefill_tokens", "drafter", "draft_depth", "top_k",
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

    Iterations, where recorded, get their own track below their worker, with batch, draft and accepted tokens as
    arguments. `process` keeps several traces in one file apart, `offsets` places RL steps elsewhere than where
    `step_offsets` does. Raises TraceError where there are no times.

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
        rows = trace.table("iterations", rl_step=step)
        for row in [] if rows is None else rows.to_dict("records"):
            start_s = shift[step] + row["t_start"]
            args = {name: row[name] for name in _ITERATION_ARGS if not pd.isna(row[name])}
            add(f"worker {row['worker']} iterations", "iteration", start_s, start_s + row["duration"], **args)
        events += _counter(trace, step, shift[step], process)
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
