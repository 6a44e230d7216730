"""The look of a panel where a picture of an experiment has several, and a figure with its interval in a sentence."""

from __future__ import annotations

import math
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator


def finish(
    axes: Axes, *, title: str, xlabel: str, ylabel: str = "", grid: Literal["x", "y", "both"] | None = "y"
) -> None:
    """Title, labels, grid and type sizes, as in `tltlab.charts`."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    if grid is not None:
        axes.grid(axis=grid, color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def whole_numbers(axes: Axes) -> None:
    """Ticks of the horizontal axis at whole numbers only, also where there is a single one."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def with_interval(estimate: float | None, low: float | None, high: float | None, form: str = ".2f") -> str:
    """An estimate with its ends where they are known.

    >>> with_interval(1.5, 1.4, 1.6)
    '1.50 [1.40, 1.60]'
    """
    if estimate is None or not math.isfinite(estimate):
        return "an unknown number of"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return f"{estimate:{form}} (no interval)"
    return f"{estimate:{form}} [{low:{form}}, {high:{form}}]"
