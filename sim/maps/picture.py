"""The picture of a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from tltlab.charts import COLORS, finish

from .grid import FAMILIES, shown_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .survey import Map, PointResult

_OPACITY = {"pays": 0.9, "likely pays": 0.55, "open": 0.25}
_OFF = "#e6e6e6"
_LUMA, _DARK = (0.299, 0.587, 0.114), 0.5
"""How light red, green and blue are (Rec. 601), and below what black letters no longer stand out."""


def draw(surveyed: Map) -> Figure:
    """A panel per schedule: a field per point, coloured by the best family, paler where it is less sure."""
    grid = surveyed.grid
    rows = [(name, weights) for name in grid.models for weights in grid.weights]
    columns = [(context, load) for context in grid.contexts for load in grid.loads]
    height = 1.3 + len(grid.schedules) * (0.9 + 0.42 * len(rows))
    figure = Figure(figsize=(max(7.2, 2.2 + 0.75 * len(columns)), height), layout="constrained")
    panels = figure.subplots(len(grid.schedules), 1, squeeze=False)[:, 0]
    for axes, schedule in zip(panels, grid.schedules, strict=True):
        results = [result for result in surveyed.results if result.point.schedule == schedule]
        for result in results:
            point = result.point
            x, y = columns.index((point.context, point.load)), rows.index((point.model, point.weights))
            _field(axes, x, y, result)
        labels = [f"{shown_tokens(context)}\n{load}" for context, load in columns]
        _frame(axes, labels, [f"{name} {weights}" for name, weights in rows])
        finish(axes, title=f"{schedule}: the family with the fastest RL step, times as fast as without (simulated)",
               xlabel="length limit in tokens, responses to a worker", grid=None)  # fmt: skip
    names = [name for name in FAMILIES if name != "off"]
    handles = [Patch(color=_color(name), label=name) for name in names] + [Patch(color=_OFF, label="nothing pays")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False,
                  title="paler: not beyond doubt of lengths, costs and acceptance", title_fontsize=8)  # fmt: skip
    return figure


def _color(family: str) -> str:
    return COLORS[list(FAMILIES).index(family) - 1] if family != "off" else _OFF


def _field(axes: Axes, x: int, y: int, result: PointResult) -> None:
    gain = result.gain
    opacity = 1.0 if gain is None else _OPACITY.get(gain.verdict, 0.25)
    color = "#ffffff" if result.fault is not None else _color(result.best)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=color, alpha=opacity, edgecolor="none"))
    text = "no room" if result.fault is not None else "1.0" if gain is None else f"{gain.step.estimate:.2f}"
    # On white, a colour is as dark as its opacity leaves it.
    light = 1.0 - opacity * (1.0 - sum(share * part for share, part in zip(_LUMA, to_rgb(color), strict=True)))
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if light < _DARK else "black")


def _frame(axes: Axes, across: Sequence[str], down: Sequence[str]) -> None:
    axes.set_xlim(-0.6, len(across) - 0.4)
    axes.set_ylim(len(down) - 0.4, -0.6)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.tick_params(length=0)
