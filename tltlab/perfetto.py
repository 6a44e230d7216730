"""The timeline as Chrome trace-event JSON, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from . import metrics
from .errors import InputError, TraceError
from .lanes import lanes, step_offsets
from .trace import Trace

_US = 1e6
_ITERATION_ARGS = (
    "iteration", "batch", "num_waiting", "context_tokens", "prefill_tokens", "drafter", "draft_depth",
    "tokens_to_verify", "num_drafted", "num_accepted", "num_generated",
)  # fmt: skip


def to_perfetto(trace: Any, *, rl_step: int | Literal["all"] = "all", process: int = 1) -> dict[str, Any]:
    """Slices (`ph` "X", times in microseconds) per lane, one track of RL steps, a counter of the running requests.

    Iterations, where recorded, get a track of their own below their worker, with batch, depth and accepted tokens as
    arguments. `process` keeps several traces in one file apart. Raises TraceError where there are no times.

    {"ph": "X", "pid": 1, "tid": 2, "name": "decode", "cat": "decode", "ts": 500000.0, "dur": 1250000.0}
    """
    trace = getattr(trace, "trace", trace)
    offsets = step_offsets(trace)
    steps = trace.rl_steps if rl_step == "all" else [rl_step]
    shift = {step: offsets[step] if rl_step == "all" else 0.0 for step in steps}
    segments = lanes(trace, rl_step)
    tracks = {"RL steps": 1}
    for lane in segments["lane"].unique():
        tracks[lane] = len(tracks) + 1
        tracks[f"{lane} iterations"] = len(tracks) + 1
    events: list[dict[str, Any]] = []

    def add(track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        event = {
            "ph": "X",
            "pid": process,
            "tid": tracks.setdefault(track, len(tracks) + 1),
            "name": name,
            "cat": name.split(" ")[0],
        }
        event |= {"ts": start_s * _US, "dur": (end_s - start_s) * _US}
        events.append(event | ({"args": args} if args else {}))

    for step, duration in metrics.rollout_s(trace).items():
        if step in shift and duration is not None:
            add("RL steps", f"rollout {step}", shift[step], shift[step] + duration)
    for lane, kind, start_s, end_s in segments.itertuples(index=False):
        add(lane, kind, start_s, end_s)
    for step in steps:
        rows = trace.table("iterations", rl_step=step)
        for row in [] if rows is None else rows.to_dict("records"):
            args = {name: row[name] for name in _ITERATION_ARGS if not pd.isna(row[name])}
            start_s = shift[step] + row["t_start"]
            add(f"worker {row['worker']} iterations", "iteration", start_s, start_s + row["duration"], **args)
        events += _counter(trace, step, shift[step], process)
    used = {event["tid"] for event in events if event["ph"] == "X"}
    names = [_name(process, 0, "process_name", trace.manifest.name or trace.manifest.kind)]
    for track, tid in tracks.items():
        if tid in used:
            names += [_name(process, tid, "thread_name", track)]
            names += [{"ph": "M", "pid": process, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def write_perfetto(path: str | Path, *traces: Any, rl_step: int | Literal["all"] = "all") -> Path:
    """Write traces, one process each, as one JSON file in one move."""
    path = Path(path)
    parts = [to_perfetto(trace, rl_step=rl_step, process=number) for number, trace in enumerate(traces, 1)]
    whole = parts[0] | {"traceEvents": [event for part in parts for event in part["traceEvents"]]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            new = Path(folder) / path.name
            new.write_text(json.dumps(whole, separators=(",", ":"), allow_nan=False), encoding="utf-8")
            os.replace(new, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
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


def _name(process: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": tid, "name": what, "args": {"name": name}}
