"""The timeline: what every worker did during an RL step, as a picture, or as Chrome trace-event JSON.

The JSON is for https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from tltlab.charts import Chart, finish, save_figure
from tltlab.errors import ConfigError, TraceError
from tltlab.files import write_file
from tltlab.importers.sources import read
from tltlab.records import Json
from tltlab.traces import metrics
from tltlab.traces.lanes import aligned_offsets, lanes, median_step, step_offsets
from tltlab.traces.trace import Trace

_US = 1e6
_STEPS = "RL steps"
_LOOKS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("looks.toml").read_text(encoding="utf-8"))
LOOKS: dict[str, list[str]] = _LOOKS["kinds"]
_MARK_SHARE = 0.002  # a switch takes milliseconds; it is drawn at least this wide, in shares of the picture

Offsets = Mapping[int, float]
Size = Literal["page", "column", "talk"]


class _Shape(NamedTuple):
    """Width and, where it is fixed, height of a picture in inches; points of its type, of all but a page's."""

    width_in: float
    height_in: float | None
    type_pt: float
    most_in: float
    """Height of a trace's lanes together, at most."""
    lane_in: tuple[float, float]
    """Height of one lane, at least and at most."""
    running_in: float


_SHAPES: dict[Size, _Shape] = {
    "page": _Shape(10.0, None, 8.0, 3.2, (0.09, 0.32), 1.0),
    "column": _Shape(85 / 25.4, None, 8.0, 1.1, (0.02, 0.16), 0.45),
    "talk": _Shape(40 / 3, 7.5, 16.0, 3.2, (0.09, 0.32), 1.6),
}


def to_perfetto(
    trace: Trace,
    *,
    rl_step: int | Literal["all"] = "all",
    process: int = 1,
    offsets: Offsets | None = None,
) -> Json:
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
        if lane.startswith("worker ") and trace.num_rows("iterations"):
            tracks[f"{lane} iterations"] = len(tracks) + 1
    events: list[Json] = []

    def add(track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        tid, category = tracks.setdefault(track, len(tracks) + 1), name.split(" ")[0]
        event = {"ph": "X", "pid": process, "tid": tid, "name": name, "cat": category}
        event |= {"ts": start_s * _US, "dur": (end_s - start_s) * _US}
        known = {name: value for name, value in args.items() if not pd.isna(value)}
        events.append(event | ({"args": known} if known else {}))

    def named(tid: int, kind: str, **args: Any) -> Json:
        return {"ph": "M", "pid": process, "tid": tid, "name": kind, "args": args}

    rollouts = {step: d for step, d in metrics.rollout_s(trace).items() if step in shift and d is not None}
    for step, duration in rollouts.items():
        rollout = trace.select([step])
        add(
            _STEPS, f"rollout {step}", shift[step], shift[step] + duration,
            bubble_fraction=metrics.bubble_fraction(rollout), tail_fraction=metrics.tail_fraction(rollout),
        )  # fmt: skip
    for lane, kind, start_s, end_s in segments.itertuples(index=False):
        add(lane, kind, start_s, end_s)
    for step in shift:
        rows = trace.table("iterations", rl_step=step)
        for row in [] if rows is None else rows.to_dict("records"):
            start_s = shift[step] + row["t_start"]
            args = {name: row[name] for name in _LOOKS["iteration"]}
            add(f"worker {row['worker']} iterations", "iteration", start_s, start_s + row["duration"], **args)
        events += _counter(trace, step, shift[step], process)
    whole = f"{trace.manifest.name or 'trace'} ({trace.manifest.kind})"
    names = [named(0, "process_name", name=whole), named(0, "process_sort_index", sort_index=process)]
    for track, tid in tracks.items():
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


def _counter(trace: Trace, step: int, shift_s: float, process: int) -> list[Json]:
    try:
        times, counts = metrics.running_requests(trace, step)
    except TraceError:
        return []  # iterations without request times: there are slices, but no counter
    name = "running requests"
    return [
        {"ph": "C", "pid": process, "name": name, "ts": (shift_s + time) * _US, "args": {"running": count}}
        for time, count in zip(times.tolist(), counts.tolist(), strict=True)
    ]


def timeline(
    trace: Any,
    compare: Any = None,
    *,
    rl_step: int | Literal["all"] | None = None,
    out: str | Path | None = None,
    title: str | tuple[str, str] | None = None,
    rollout_only: bool = False,
    size: Size = "page",
) -> Figure:
    """Draw one lane per worker, its idle time hatched, the trainer below, and the running requests over time.

    `trace` is a trace, its path, or anything with a `.trace` (a simulation's result). `rl_step` defaults to the one
    with the median rollout time; "all" lays the RL steps one by one. `compare`, a second trace, is drawn below
    on the same time axis, and every RL step starts at the same place in both. `title` names the first, or both.
    `rollout_only` leaves out what comes after the rollouts. A worker that trains a drafter is not idle.
    `size` is that of a page, of a paper's column (85 mm, all type of 8 points) or of a talk's slide (16:9).
    `out` names a .png, .svg or .pdf file. Raises TraceError where there are no times to draw.

    >>> timeline(read("run"), compare=read("tuned"), size="column", out="run.pdf")  # doctest: +SKIP
    """
    if size not in _SHAPES:
        raise ConfigError(f"size is {size!r}; there are {', '.join(_SHAPES)}")
    traces = [read(getattr(each, "trace", each)) for each in (trace, compare) if each is not None]
    chosen = median_step(*traces) if rl_step is None else rl_step
    offsets: Offsets
    if chosen != "all":
        offsets = {chosen: 0.0}
    elif len(traces) == 1 and not rollout_only:
        offsets = step_offsets(*traces)
    else:
        offsets = aligned_offsets(*traces, rollout_only=rollout_only)
    names = title if isinstance(title, tuple) else (title, None)
    drawn = [(shown, lanes(shown, chosen, offsets=offsets, rollout_only=rollout_only)) for shown in traces]
    heights: list[float] = []
    shape = _SHAPES[size]
    for _, segments in drawn:
        num_lanes = segments["lane"].nunique()
        lane_in = float(np.clip(shape.most_in / num_lanes, *shape.lane_in))
        heights += [max(shape.most_in / 6, num_lanes * lane_in), shape.running_in]
    titles = [
        _title(shown, chosen, name, brief=size == "column") for (shown, _), name in zip(drawn, names, strict=False)
    ]
    kinds = pd.concat([segments["kind"] for _, segments in drawn])
    columns = 2 if size == "column" else 6
    further = sum(title.count("\n") for title in titles) + (kinds.nunique() - 1) // columns
    natural_in = sum(heights) + 0.5 * len(drawn) + 0.75 + 0.18 * further
    height_in = shape.height_in or natural_in
    figure = Chart(figsize=(shape.width_in, height_in), layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    end_s = max(float(segments["end_s"].max()) for _, segments in drawn)
    for number, (shown, segments) in enumerate(drawn):
        above, below = grid[2 * number, 0], grid[2 * number + 1, 0]
        lane_pt = 72 * heights[2 * number] / segments["lane"].nunique() * height_in / natural_in
        _draw_lanes(above, segments, end_s, most_names=lane_pt / (1.15 * shape.type_pt))
        _draw_running(below, shown, offsets, end_s, 0.2 if size == "page" else 0.6)
        _shade_tails(above, shown, offsets)
        above.set_title(titles[number], loc="left", fontsize=10)
    most = max(axes.get_ylim()[1] for axes in grid[1::2, 0])
    for axes in grid[1::2, 0]:
        axes.set_ylim(0, most)
    grid[-1, 0].set_xlim(0.0, end_s)
    grid[-1, 0].set_xlabel(_time_label(chosen, aligned=len(traces) > 1, rollout_only=rollout_only), fontsize=9)
    _legend(figure, kinds, columns)
    if size != "page":
        for axes in grid.flat:
            axes.tick_params(labelsize=shape.type_pt)
        for text in figure.findobj(Text):
            text.set_fontsize(shape.type_pt)
    if out is not None:
        save_figure(figure, Path(out))
    return figure


def _time_label(rl_step: int | Literal["all"], *, aligned: bool, rollout_only: bool) -> str:
    if rl_step != "all":
        return "seconds since the start of the RL step"
    seconds = "seconds of rollout" if rollout_only else "seconds"
    if aligned:
        return f"{seconds}, each RL step starting at the same place in both"
    return seconds if rollout_only else f"{seconds} since the start of the run"


def _draw_lanes(axes: Axes, segments: pd.DataFrame, end_s: float, most_names: float) -> None:
    """The segments of each lane; `most_names` is the names per lane that there is room for."""
    names = list(segments["lane"].unique())
    row = segments["lane"].map({name: i for i, name in enumerate(names)}).to_numpy()
    # Idle first: what fills a bubble lies on top of it.
    for kind in sorted(segments["kind"].unique(), key=lambda k: k != "idle"):
        of_kind = (segments["kind"] == kind).to_numpy()
        start, end = segments["start_s"].to_numpy()[of_kind], segments["end_s"].to_numpy()[of_kind]
        if kind == "switch":
            end = np.maximum(end, start + _MARK_SHARE * end_s)
        low, high = row[of_kind] - 0.42, row[of_kind] + 0.42
        corners = np.stack([start, low, start, high, end, high, end, low], axis=-1).reshape(-1, 4, 2)
        color, hatch = _look(kind)
        axes.add_collection(
            PolyCollection(
                list(corners), facecolor=color, edgecolor=_edge(kind), linewidth=0, hatch=hatch or None,
                antialiased=False,
            )
        )  # fmt: skip
    axes.set_ylim(len(names) - 0.4, -0.6)
    every = 2 ** max(0, int(np.ceil(-np.log2(most_names))))
    shown = [i for i, name in enumerate(names) if not name.startswith("worker ") or i % every == 0]
    axes.set_yticks(shown, [names[i] for i in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _look(kind: str) -> list[str]:
    """The colour and hatch of a kind; a drafter that has none of its own has those of all decoding with drafts."""
    return LOOKS.get(kind) or LOOKS.get(kind.partition(" ")[0]) or list(_LOOKS["other"])


def _edge(kind: str) -> tuple[float, float, float, float]:
    """The colour of a kind's hatch: that of bubbles, which have no colour of their own, is grey."""
    return (0.72, 0.72, 0.72, 1.0) if kind == "idle" else (1.0, 1.0, 1.0, 0.75)


def _shade_tails(axes: Axes, trace: Trace, offsets: Offsets) -> list[tuple[float, float]]:
    """Shade the tail of each rollout; returns where each is, in seconds."""
    windows = {step: metrics.tail_window(trace, step) for step in trace.rl_steps if step in offsets}
    tails = [(at[0] + offsets[step], at[1] + offsets[step]) for step, at in windows.items() if at and at[1] > at[0]]
    for tail in tails:
        axes.axvspan(*tail, color="#d9704f", alpha=0.14, linewidth=0, zorder=0)
    return tails


def _draw_running(axes: Axes, trace: Trace, offsets: Offsets, end_s: float, room: float) -> None:
    """Number of running requests over time; `room` is the share of the picture that a long word on the tail takes."""
    for step in [step for step in trace.rl_steps if step in offsets]:
        try:
            times, counts = metrics.running_requests(trace, step)
        except TraceError:
            continue  # iterations without request times
        shift = offsets[step]
        axes.fill_between(times + shift, counts, step="post", color="#7fb8de", alpha=0.35, linewidth=0)
        axes.step(times + shift, counts, where="post", color="#1f5f99", linewidth=1.2)
    for start, end in _shade_tails(axes, trace, offsets) if len(offsets) == 1 else ():
        text = "tail: fewer than 1/8 running" if end - start > room * end_s else "tail"
        axes.text((start + end) / 2, 0.88, text, transform=axes.get_xaxis_transform(),
                  ha="center", va="top", fontsize=7.5, color="#a0452a")  # fmt: skip
    _name_steps(axes, trace, offsets, end_s)
    finish(axes, title="", xlabel="", grid="both")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("running\nrequests", fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _name_steps(axes: Axes, trace: Trace, offsets: Offsets, end_s: float) -> None:
    """Where several RL steps lie side by side: a mark where each starts, and its number where there is room."""
    if len(offsets) < 2:
        return
    free_s = 0.0
    for step in [step for step in trace.rl_steps if step in offsets]:
        axes.axvline(offsets[step], color="#6f6f6f", linewidth=0.7, linestyle=(0, (2, 2)), zorder=0)
        if offsets[step] >= free_s:
            axes.text(offsets[step], 1.01, f" step {step}", transform=axes.get_xaxis_transform(),
                      ha="left", va="bottom", fontsize=7, color="#444444")  # fmt: skip
            free_s = offsets[step] + 0.05 * end_s


def _title(trace: Trace, rl_step: int | Literal["all"], title: str | None, *, brief: bool) -> str:
    part = trace if rl_step == "all" else trace.select([rl_step])
    steps = "all RL steps" if rl_step == "all" else f"RL step {rl_step}"
    policies = [] if part.steps is None else part.steps["policy"].dropna().unique().tolist()
    kind = ", ".join([trace.manifest.kind, *(policies if len(policies) == 1 else [])])
    name = title or (f"{trace.manifest.name} ({kind})" if trace.manifest.name else kind)
    facts = [f"{name}: {steps}"]
    if (duration := metrics.makespan_s(part)) is not None:
        facts.append(f"rollout {duration:.3g} s{' on average' if rl_step == 'all' else ''}")
    if (idle := metrics.bubble_fraction(part, idle=True)) is not None:
        facts.append(f"idle {100 * idle:.0f} %")
    if (tail := metrics.tail_fraction(part)) is not None and not brief:
        facts.append(f"tail {100 * tail:.0f} %")
    if not brief:
        return "  ·  ".join(facts)
    whole = [fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts[1:]]
    return textwrap.fill(f"{name}: {', '.join(whole)}", 46)


def _legend(figure: Figure, kinds: pd.Series[Any], columns: int) -> None:
    order = list(LOOKS)
    looks = {kind: _look(kind) for kind in sorted(kinds.unique(), key=lambda k: order.index(k) if k in order else 99)}
    patches = [
        Patch(facecolor=color, edgecolor=_edge(kind) if hatch else "#888888", hatch=hatch or None,
              label=kind.replace("_", " "), linewidth=0 if hatch else 0.4)
        for kind, (color, hatch) in looks.items()
    ]  # fmt: skip
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(len(patches), columns), fontsize=8, frameon=False,
        handlelength=1.8, handleheight=1.0,
    )  # fmt: skip
