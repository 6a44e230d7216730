"""The timeline picture: what every worker did during an RL step, and how many requests were still running."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from . import metrics
from .errors import ConfigError, InputError, TraceError
from .lanes import lanes, median_step, step_offsets
from .trace import Trace

# Colours keep apart in grey (by luminance) and for colour-blind eyes; hatches help where two come close.
LOOKS: dict[str, tuple[str, str, str]] = {
    "decode": ("decode", "#7fb8de", ""),
    "speculative_decode": ("speculative decode", "#1f5f99", ""),
    "prefill": ("prefill", "#e8a33d", "////"),
    "switch": ("switch", "#111111", ""),
    "idle": ("idle (bubble)", "#efefef", ""),
    "spot_train": ("spot training", "#b789c9", "\\\\\\\\"),
    "inference": ("inference", "#cfc76a", "...."),
    "reward": ("reward", "#5cb08c", "xxxx"),
    "train": ("train", "#8a4a3c", ""),
    "weight_sync": ("weight sync", "#d9704f", "----"),
    "checkpoint": ("checkpoint", "#9a9a9a", "||||"),
}
_OTHER = ("other", "#c9c9c9", "++++")
_MARK_SHARE = 0.002  # a switch takes milliseconds; it is drawn at least this wide, in shares of the picture
FORMATS = (".png", ".svg")


def timeline(
    trace: Any,
    *,
    rl_step: int | Literal["all"] | None = None,
    out: str | Path | None = None,
    title: str | None = None,
    compare: Any = None,
) -> Figure:
    """Draw one lane per worker, the trainer below, and the running requests over time.

    `trace` is a trace or anything with a `.trace` (a simulation's result). `rl_step` defaults to the one with the
    median rollout time; "all" lays the RL steps one after the other. `compare`, a second trace, is drawn below on the
    same time axis. `out` names a .png or .svg file. Raises TraceError where there are no times to draw.

    >>> timeline(read("run"), compare=simulate(read("run"), policy="beg-mab"), out="run.png")  # doctest: +SKIP
    """
    first: Trace = getattr(trace, "trace", trace)
    traces: list[Trace] = [first] if compare is None else [first, getattr(compare, "trace", compare)]
    if out is not None and Path(out).suffix not in FORMATS:
        raise ConfigError(f"{out}: a timeline is written as {' or '.join(FORMATS)} (or as .json for Perfetto)")
    chosen = median_step(first) if rl_step is None else rl_step
    drawn = [(one, lanes(one, chosen)) for one in traces]
    heights: list[float] = []
    for _, segments in drawn:
        heights += [_lanes_inches(segments["lane"].nunique()), 1.0]
    figure = Figure(figsize=(10.0, sum(heights) + 0.5 * len(traces) + 0.75), layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    end_s = max(float(segments["end_s"].max()) for _, segments in drawn)
    for number, (one, segments) in enumerate(drawn):
        above, below = grid[2 * number, 0], grid[2 * number + 1, 0]
        _draw_lanes(above, segments, end_s)
        _draw_running(below, one, chosen, end_s)
        above.set_title(_title(one, chosen, title if number == 0 else None), loc="left", fontsize=10)
    grid[-1, 0].set_xlim(0.0, end_s)
    since = "the run" if chosen == "all" else "the RL step"
    grid[-1, 0].set_xlabel(f"seconds since the start of {since}", fontsize=9)
    _legend(figure, pd.concat([segments["kind"] for _, segments in drawn]))
    if out is not None:
        _save(figure, Path(out))
    return figure


def _lanes_inches(num_lanes: int) -> float:
    return max(0.5, num_lanes * float(np.clip(3.2 / num_lanes, 0.09, 0.32)))


def _draw_lanes(axes: Axes, segments: pd.DataFrame, end_s: float) -> None:
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
        _, color, hatch = LOOKS.get(kind, _OTHER)
        axes.add_collection(
            PolyCollection(
                list(corners), facecolor=color, edgecolor=(1, 1, 1, 0.75), linewidth=0, hatch=hatch or None,
                antialiased=False,
            )
        )  # fmt: skip
    axes.set_ylim(len(names) - 0.4, -0.6)
    every = 1 if len(names) <= 18 else int(np.ceil(len(names) / 16 / 4) * 4)
    shown = [i for i, name in enumerate(names) if not name.startswith("worker ") or i % every == 0]
    axes.set_yticks(shown, [names[i] for i in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_running(axes: Axes, trace: Trace, rl_step: int | Literal["all"], end_s: float) -> None:
    offsets = step_offsets(trace)
    for step in trace.rl_steps if rl_step == "all" else [rl_step]:
        shift = offsets[step] if rl_step == "all" else 0.0
        try:
            times, counts = metrics.running_requests(trace, step)
        except TraceError:
            continue  # iterations without request times: there are lanes, but no curve
        axes.fill_between(times + shift, counts, step="post", color="#7fb8de", alpha=0.35, linewidth=0)
        axes.step(times + shift, counts, where="post", color="#1f5f99", linewidth=1.2)
        if (tail := metrics.tail_window(trace, step)) is not None and tail[1] > tail[0]:
            axes.axvspan(tail[0] + shift, tail[1] + shift, color="#d9704f", alpha=0.14, linewidth=0, zorder=0)
            if rl_step != "all":
                at = (tail[0] + tail[1]) / 2
                text = "tail: fewer than 1/8 running" if tail[1] - tail[0] > 0.2 * end_s else "tail"
                axes.text(at, 0.88, text, transform=axes.get_xaxis_transform(),
                          ha="center", va="top", fontsize=7.5, color="#a0452a")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("running\nrequests", fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(axis="both", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(trace: Trace, rl_step: int | Literal["all"], title: str | None) -> str:
    part = trace if rl_step == "all" else trace.select([rl_step])
    what = "all RL steps" if rl_step == "all" else f"RL step {rl_step}"
    name = title or " ".join(word for word in (trace.manifest.name, f"({trace.manifest.kind})") if word)
    facts = [f"{name}: {what}"]
    if (duration := metrics.makespan_s(part)) is not None:
        facts.append(f"rollout {duration:.3g} s{' on average' if rl_step == 'all' else ''}")
    if (bubble := metrics.bubble_fraction(part)) is not None:
        facts.append(f"bubble {100 * bubble:.0f} %")
    if (tail := metrics.tail_fraction(part)) is not None:
        facts.append(f"tail {100 * tail:.0f} %")
    return "  ·  ".join(facts)


def _legend(figure: Figure, kinds: pd.Series[Any]) -> None:
    present = [kind for kind in LOOKS if (kinds == kind).any()]
    looks = [LOOKS[kind] for kind in present] + ([_OTHER] if (~kinds.isin(list(LOOKS))).any() else [])
    patches = [
        Patch(facecolor=color, edgecolor="white" if hatch else "#888888", hatch=hatch or None, label=label,
              linewidth=0 if hatch else 0.4)
        for label, color, hatch in looks
    ]  # fmt: skip
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(len(patches), 6), fontsize=8, frameon=False,
        handlelength=1.8, handleheight=1.0,
    )  # fmt: skip


def _save(figure: Figure, path: Path) -> None:
    """Write the picture in one move; same trace, same bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder,
            matplotlib.rc_context({"svg.hashsalt": "tltlab", "svg.fonttype": "none"}),
        ):
            new = Path(folder) / path.name
            figure.savefig(new, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
            os.replace(new, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
