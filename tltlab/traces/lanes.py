"""Segments of each lane (worker, trainer, ...) over time, behind the timeline picture and the Perfetto file."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd

from tltlab.errors import TraceError

from . import metrics
from .trace import Trace

COLUMNS = ["lane", "kind", "start_s", "end_s"]

_AFTER_ROLLOUT = {"inference_s": "inference", "reward_s": "reward", "train_s": "train", "sync_s": "weight_sync"}
"""Parts of an RL step in the order in which `steps` lists them, and the kind of span each is."""


def lanes(
    trace: Trace,
    rl_step: int | Literal["all"],
    *,
    offsets: Mapping[int, float] | None = None,
    rollout_only: bool = False,
) -> pd.DataFrame:
    """Segments of an RL step, or of all one by one: lane, kind, start_s, end_s; lanes in display order.

    Taken from `spans`, else from `iterations`, else from `outcomes` (a worker is busy until its last response
    finishes). Decoding with drafts is "speculative_decode (ngram)" where the drafter is known. Neighbours of one kind
    are merged, gaps of a worker during the rollout are "idle". Without a trainer in the spans its lane comes from
    `steps`. Times are since the start of the RL step, for "all" since that of the run; `offsets` places the RL steps
    elsewhere. `rollout_only` keeps workers only, until the rollout's end.
    Raises TraceError where the trace has no times, or no such RL step.
    """
    places = step_offsets(trace) if offsets is None else offsets
    steps = trace.rl_steps if rl_step == "all" else [rl_step]
    if not steps:
        raise TraceError(f"{trace.path or 'this trace'} has no RL step with a whole response")
    pieces = []
    for step in steps:
        part = trace.select([step])
        (rollout,) = metrics.rollouts(part)
        start_s, duration = rollout.start_s, rollout.rollout_s
        piece = _workers(part, start_s, duration)
        if not rollout_only:
            piece = pd.concat([piece, _trainer(part, start_s + (duration or 0.0))], ignore_index=True)
        else:
            piece = piece[piece["lane"].str.startswith("worker ")]
            if duration is not None:
                end_s = start_s + duration
                piece = piece[piece["start_s"] < end_s].assign(end_s=piece["end_s"].clip(upper=end_s))
        shift = places[step] if rl_step == "all" else 0.0
        pieces.append(piece.assign(start_s=piece["start_s"] + shift, end_s=piece["end_s"] + shift))
    segments = pd.concat(pieces, ignore_index=True)
    order = {lane: i for i, lane in enumerate(sorted(segments["lane"].unique(), key=_lane_order))}
    return segments.sort_values(
        ["lane", "start_s"], key=lambda c: c.map(order) if c.name == "lane" else c, kind="stable", ignore_index=True
    )


def step_offsets(trace: Trace) -> dict[int, float]:
    """Start of each RL step in seconds since the run's: `steps.t_start`, else one rollout after the other."""
    steps = trace.steps
    if steps is not None and set(trace.rl_steps) <= set(steps["rl_step"]):
        starts = dict(zip(steps["rl_step"], steps["t_start"], strict=True))
        return {step: float(starts[step]) for step in trace.rl_steps}
    return _one_after_the_other({step: duration or 0.0 for step, duration in metrics.rollout_s(trace).items()})


def _one_after_the_other(lasts_s: Mapping[int, float]) -> dict[int, float]:
    """Starts of RL steps that last so long. Lasting 2 s and 3 s: {0: 0.0, 1: 2.0}."""
    starts = np.cumsum([0.0, *lasts_s.values()])
    return dict(zip(lasts_s, starts.tolist(), strict=False))


def aligned_offsets(*traces: Trace, rollout_only: bool = False) -> dict[int, float]:
    """Where each RL step of several traces starts, in seconds, so that it starts at the same place in all of them.

    An RL step begins when the longest of those before it has ended. Lasting 2 s and 3 s: {0: 0.0, 1: 3.0}.
    """
    lasts: dict[int, float] = {}
    for trace in traces:
        for step in trace.rl_steps:
            end_s = float(lanes(trace, step, rollout_only=rollout_only)["end_s"].max())
            lasts[step] = max(lasts.get(step, 0.0), end_s)
    return _one_after_the_other(dict(sorted(lasts.items())))


def median_step(trace: Trace, *peers: Trace) -> int:
    """The RL step with the median rollout time (the lower of two), of those that `peers` have too.

    Raises TraceError where none is known.
    """
    common = set(trace.rl_steps).intersection(*(peer.rl_steps for peer in peers))
    if not common:
        raise TraceError("the traces have no RL step in common: compare the same RL steps")
    durations = sorted((d, step) for step, d in metrics.rollout_s(trace).items() if d is not None and step in common)
    if not durations:
        raise TraceError(f"{trace.path or 'this trace'} has no times: simulate it first (tltlab simulate)")
    return durations[(len(durations) - 1) // 2][1]


def _workers(trace: Trace, start_s: float, duration: float | None) -> pd.DataFrame:
    """The segments of a one-step trace whose rollout begins at `start_s` and lasts `duration` seconds."""
    outcomes, spans, iterations = trace.outcomes, trace.spans, trace.iterations
    other_lanes = _segments([], [], [], [])
    if spans is not None and len(spans):
        drafter = " (" + spans["detail"].str.partition(":")[0] + ")"
        drafting = spans["kind"] + drafter.where(spans["kind"] == "speculative_decode").fillna("")
        work = _segments(spans["lane"], drafting, spans["t_start"], spans["t_start"] + spans["duration"])
        on_worker = work["lane"].str.startswith("worker ")
        work, other_lanes = work[on_worker], work[~on_worker]
    elif iterations is not None and len(iterations):
        drafted = "speculative_decode (" + iterations["drafter"] + ")"
        kind = np.where(iterations["num_drafted"] > 0, drafted.fillna("speculative_decode"), "decode")
        kind = np.where((iterations["prefill_tokens"] > 0) & (iterations["num_generated"] == 0), "prefill", kind)
        on = "worker " + iterations["worker"].astype(str)
        work = _segments(on, kind, iterations["t_start"], iterations["t_start"] + iterations["duration"])
    else:
        last = metrics.last_finish_s(outcomes)
        work = _segments(last.index, "decode", start_s, last.to_numpy())
    if duration is None and work.empty:
        raise TraceError(
            f"rl_step {trace.rl_steps[0]} has no times to draw: simulate the trace first (tltlab simulate)"
        )
    end_s = start_s + duration if duration is not None else float(work["end_s"].max())
    gap_s = 1e-3 * (end_s - start_s)
    names = {f"worker {i}" for i in range(metrics.num_workers(trace))} | set(work["lane"])
    on_lane = dict(iter(work.groupby("lane")))
    pieces = [_fill(name, _merge(on_lane.get(name, work[:0]), gap_s), start_s, end_s, gap_s) for name in sorted(names)]
    pieces += [_merge(rows, gap_s) for _, rows in other_lanes.groupby("lane")]
    return pd.concat([piece for piece in pieces if len(piece)] or [other_lanes], ignore_index=True)


def _trainer(trace: Trace, rollout_end_s: float) -> pd.DataFrame:
    """The trainer's lane from `steps`, its parts one by one behind the rollout."""
    steps, spans = trace.steps, trace.spans
    if steps is None or steps.empty or (spans is not None and (spans["lane"] == "trainer").any()):
        return _segments([], [], [], [])
    row = steps.iloc[0]
    parts = {kind: float(row[column]) for column, kind in _AFTER_ROLLOUT.items() if row[column] > 0}
    times = np.cumsum([rollout_end_s, *parts.values()])
    return _segments("trainer", list(parts), times[:-1], times[1:])


def _segments(lane: Any, kind: Any, start_s: Any, end_s: Any) -> pd.DataFrame:
    frame = pd.DataFrame({"lane": lane, "kind": kind, "start_s": start_s, "end_s": end_s}, columns=COLUMNS)
    return frame.astype({"lane": str, "kind": str, "start_s": float, "end_s": float})


def _merge(segments: pd.DataFrame, gap_s: float) -> pd.DataFrame:
    """One lane's segments by start; neighbours of one kind with at most `gap_s` between them become one."""
    if segments.empty:
        return segments
    segments = segments.sort_values("start_s", kind="stable")
    kind, start = segments["kind"].to_numpy(), segments["start_s"].to_numpy()
    end = np.maximum.accumulate(segments["end_s"].to_numpy())
    new = np.concatenate([[True], (kind[1:] != kind[:-1]) | (start[1:] - end[:-1] > gap_s)])
    first = np.flatnonzero(new)
    return segments.iloc[first].assign(end_s=np.maximum.reduceat(segments["end_s"].to_numpy(), first))


def _fill(lane: str, segments: pd.DataFrame, start_s: float, end_s: float, gap_s: float) -> pd.DataFrame:
    """A worker's lane with its gaps in the rollout as "idle" segments."""
    covered = np.concatenate([[start_s], np.maximum.accumulate(segments["end_s"].to_numpy(dtype=float))])
    until = np.minimum(np.concatenate([segments["start_s"].to_numpy(dtype=float), [end_s]]), end_s)
    idle = until - covered > gap_s
    gaps = _segments(lane, "idle", covered[idle], until[idle])
    return pd.concat([segments, gaps], ignore_index=True)


def _lane_order(lane: str) -> tuple[int, int, str]:
    head, _, number = lane.rpartition(" ")
    if head == "worker" and number.isdigit():
        return (0, int(number), lane)
    return (1 if lane == "trainer" else 2, 0, lane)
