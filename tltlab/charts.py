"""Small charts in one look: bars with intervals, lines, shares over time, predicted against measured."""

import base64
import io
import re
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from tltlab.records import Fields

from .files import check_writable, write_file

# Ordered so that neighbours differ in luminance: they keep apart in grey and for colour-blind eyes.
COLORS = ("#1f5f99", "#e8a33d", "#5cb08c", "#8a4a3c", "#7fb8de", "#b789c9", "#d9704f", "#6f6f6f", "#cfc76a", "#111111")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
_HATCHES = ("", "////", "", "||||", "\\\\\\\\", "", "xxxx", "----", "//", "++++")  # dots take 200 KB in SVG
_WIDTH_IN = 6.2
_LABEL_LETTERS = 30
"""Letters of a line of a bar's label."""
_LETTERS_PER_IN, _HANDLE_LETTERS = 13.0, 9
"""Letters of a legend in an inch, and of the space that the line beside a name takes."""
_MOST_MARKERS = 24
_ROUND = (1, 2, 2.5, 5, 10)
"""Distances of ticks, times a power of ten."""
_DRAWING = threading.Lock()
_VECTORS: Any = {"svg.hashsalt": "tltlab", "svg.fonttype": "none", "pdf.fonttype": 42, "hatch.linewidth": 0.6}
FORMATS = (".png", ".svg", ".pdf")

Values = Sequence[float | None] | np.ndarray


class Chart(Figure):
    """A figure that shows itself as the last line of a notebook's cell, without `%matplotlib inline` too."""

    def _repr_png_(self) -> bytes:
        return _bytes(self, "png", dpi=96)


def _panel(height_in: float, width_in: float = _WIDTH_IN) -> Axes:
    """A panel that has a figure of its own."""
    return Chart(figsize=(width_in, height_in), layout="constrained").subplots()


def bars(
    labels: Sequence[str],
    values: Values,
    low: Values | None = None,
    high: Values | None = None,
    *,
    xlabel: str,
    title: str,
    reference: float | None = None,
    measured: Sequence[bool] = (),
    axes: Axes | None = None,
) -> Figure:
    """Horizontal bars, the first on top; `low` and `high` are the ends of an interval around each, in `values`' unit.

    None or NaN leaves out a bar, or its interval. `reference` draws a dashed line to compare with (1.0 for a ratio).
    Bars are blue, those that are `measured` orange.
    With `axes` the chart is drawn into a panel of another figure.
    """
    names = [textwrap.fill(label, _LABEL_LETTERS) for label in labels]
    if axes is None:
        row_in = 0.3 + 0.15 * max((name.count("\n") for name in names), default=0)
        axes = _panel(0.85 + row_in * max(len(labels), 1))
    y, size = np.arange(len(labels)), _floats(values)
    axes.barh(y, np.nan_to_num(size), height=0.62, color=[COLORS[1 if m else 4] for m in measured] or COLORS[4],
              edgecolor=COLORS[0], linewidth=0.6)  # fmt: skip
    if low is not None and high is not None:
        least, most = _floats(low), _floats(high)
        finite = np.isfinite(size) & np.isfinite(least) & np.isfinite(most)
        away = np.stack([size - least, most - size])[:, finite]
        axes.errorbar(size[finite], y[finite], xerr=np.maximum(away, 0.0), fmt="none", ecolor="#111111", elinewidth=1.1,
                      capsize=3)  # fmt: skip
    if reference is not None:
        axes.axvline(reference, color="#a0452a", linewidth=1.0, linestyle=(0, (4, 2)))
    axes.set_yticks(y, names, fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    return finish(axes, xlabel=xlabel, title=title, grid="x")


def lines(
    series: Mapping[str, tuple[Any, Any]],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    bands: Mapping[str, tuple[Any, Any]] | None = None,
    doubling: bool = False,
) -> Figure:
    """One line per series of (x, y), distinguished by colour, dash and marker; `bands` are (low, high) at a series' x.

    `doubling` spaces x = 1, 2, 4, ... evenly, as batch sizes want it.
    """
    axes = _panel(2.9)
    for i, (name, (x, y)) in enumerate(series.items()):
        across, up, color = _floats(x), _floats(y), COLORS[i % len(COLORS)]
        axes.plot(across, up, color=color, linestyle=DASHES[i % len(DASHES)], marker=MARKERS[i % len(MARKERS)],
                  linewidth=1.4, markersize=4, markevery=max(1, len(across) // _MOST_MARKERS), label=name)  # fmt: skip
        if bands is not None and name in bands:
            low, high = (_floats(end) for end in bands[name])
            axes.fill_between(across, low, high, color=color, alpha=0.18, linewidth=0)
    if doubling:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        _round_ticks(axes, *(x for x, _ in series.values()))
    if len(series) > 1:
        _legend(axes)
    return finish(axes, xlabel=xlabel, ylabel=ylabel, title=title, grid="both")


def shares(x: Any, parts: Fields, *, xlabel: str, title: str) -> Figure:
    """Stacked columns of percent, one per value of `x`: what a whole consists of over time.

    `parts` are shares between 0 and 1, one per value of x; a part that is 0 throughout takes a colour and is not
    drawn.
    """
    axes = _panel(2.9)
    across = _floats(x)
    width = float(np.min(np.diff(across))) if len(across) > 1 else 1.0
    floor = np.zeros(len(across))
    for i, (name, part) in enumerate(parts.items()):
        height = np.nan_to_num(_floats(part))
        if not height.any():
            continue  # keeps its colour for another chart of the same parts
        axes.bar(across, 100 * height, width=0.9 * width, bottom=100 * floor, color=COLORS[i % len(COLORS)],
                 hatch=_HATCHES[i % len(_HATCHES)], edgecolor="white", linewidth=0, label=name)  # fmt: skip
        floor += height
    _round_ticks(axes, across)
    axes.set_ylim(0, 100)
    if len(across):
        axes.set_xlim(across.min() - 0.6 * width, across.max() + 0.6 * width)
    _legend(axes)
    return finish(axes, xlabel=xlabel, ylabel="%", title=title, grid=None)


def scatter_identity(measured_s: Values, predicted_s: Values, labels: Sequence[str]) -> Figure:
    """Predicted over measured rollout times, and the line on which they agree; `labels` names each point's group."""
    axes = _panel(4.0, 4.6)
    x, y = _floats(measured_s), _floats(predicted_s)
    group = np.asarray(labels, dtype=object)
    for i, name in enumerate(dict.fromkeys(group)):
        of_group = group == name
        marker = MARKERS[(i + i // len(COLORS)) % len(MARKERS)]  # the eleventh has another than the first
        axes.plot(x[of_group], y[of_group], linestyle="none", marker=marker, markersize=5,
                  color=COLORS[i % len(COLORS)], markeredgecolor="white", markeredgewidth=0.5, label=name)  # fmt: skip
    coordinates = np.concatenate([x[np.isfinite(x)], y[np.isfinite(y)], [0.0]])
    end = 1.08 * float(coordinates.max()) or 1.0
    axes.plot([0, end], [0, end], color="#6f6f6f", linewidth=0.9, linestyle=(0, (4, 2)), zorder=0)
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    _legend(axes, columns=3)
    words = {"xlabel": "measured, s", "ylabel": "predicted (simulated), s", "title": "Rollout time of each RL step"}
    return finish(axes, **words, grid="both")


def waterfall(steps: Sequence[tuple[str, float]], *, measured: bool, title: str, width_in: float = _WIDTH_IN) -> Figure:
    """Steps of (name, seconds) from top to bottom, each bar from where the one before ends, and their sum below.

    What is simulated is blue, the sum where it is `measured` orange, what is unexplained between the two grey. The
    axis begins near the first step's end where the others are small, and its bar is then broken.
    """
    names, seconds = [name for name, _ in steps], np.array([size for _, size in steps])
    ends = np.cumsum(seconds)
    begins, total, low = ends - seconds, ends[-1], np.minimum.accumulate(ends)[-1]
    spread = max(ends.max() - low, 1e-9)
    left = 0.0 if low < 2 * spread else low - 0.3 * spread
    blue, pale, gain, orange, grey = COLORS[0], COLORS[4], COLORS[2], COLORS[1], "#c9c9c9"
    axes = _panel(0.75 + 0.27 * (len(steps) + 1), width_in)
    looks = [blue, *(gain if size < 0 else pale for size in seconds[1:]), orange if measured else blue]
    if "unexplained" in names:
        looks[-2] = grey
    widths, starts = [*seconds, total], [*begins, 0.0]
    axes.barh(range(len(looks)), widths, left=starts, height=0.66, color=looks)
    for row, end in enumerate(ends):
        axes.plot([end, end], [row + 0.33, row + 0.67], color="#6f6f6f", linewidth=0.7, solid_capstyle="butt")
    places_after = 1 if total >= 100 else 2 if total >= 1 else 3
    texts = [f"{size:+.{places_after}f} s  {size / total:.0%}".replace("-", "−") for size in seconds]
    texts[0], last = (f"{size:.{places_after}f} s" for size in (ends[0], total))
    places = [ends[0], *np.maximum(begins, ends)[1:], total]
    for row, (place, text) in enumerate(zip(places, [*texts, last], strict=True)):
        bold = "bold" if row in (0, len(steps)) else "normal"
        axes.annotate(text, (place, row), (4, 0), textcoords="offset points", va="center", fontsize=9, fontweight=bold)
    if left:
        for row in (0, len(steps)):
            at = left + 0.09 * (ends.max() - left)
            axes.plot(at, row, marker=[(-1, -4), (1, 4)], markersize=16, color="white", markeredgewidth=2.5)
    axes.set_yticks(range(len(looks)), [*names, "measured" if measured else "simulated"], fontsize=9)
    axes.set_ylim(len(looks) - 0.4, -0.6)
    axes.set_xlim(left, ends.max() + (1.3 if width_in < 5 else 0.62) * (ends.max() - left) / 2)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=_ROUND))
    return finish(axes, xlabel="mean seconds of a rollout", title=title, grid="x")


def heat_maps(
    tables: Fields, *, xlabel: str, ylabel: str, title: str,
    texts: Fields | None = None,
) -> Figure:  # fmt: skip
    """A panel for each DataFrame, one above the other: a cell per value, which is written into it, or its text.

    Rows go down and columns across, named as the frame's; above 1 cells are blue, below it red, NaN is empty.
    """
    numbers = {name: np.asarray(table, dtype=np.float64) for name, table in tables.items()}
    every = np.concatenate([[0.0], *(np.abs(values - 1.0).ravel() for values in numbers.values())])
    away = 1.6 * float(np.nanmax(every)) or 1.0  # darker cells would hide their numbers
    rows = max((len(values) for values in numbers.values()), default=1)
    figure = Chart(figsize=(_WIDTH_IN, len(tables) * (0.9 + 0.34 * rows)), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(len(tables), 1, squeeze=False)[:, 0], numbers.items(), strict=True):
        axes.imshow(values, aspect="auto", cmap="RdYlBu", vmin=1.0 - away, vmax=1.0 + away)
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                text = f"{value:.2f}" if texts is None else texts[name].iat[row, column]
                axes.text(column, row, text, ha="center", va="center", fontsize=9)
        axes.set_xticks(range(values.shape[1]), [str(column) for column in tables[name].columns])
        axes.set_yticks(range(values.shape[0]), [str(row) for row in tables[name].index])
        finish(axes, xlabel=xlabel, ylabel=ylabel, title=f"{name}: {title}", grid=None)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a .png, .svg or .pdf in one move, parents made; same figure, same bytes.

    Raises ConfigError for another ending, InputError where the file cannot be written.
    """
    check_writable(path, *FORMATS)
    write_file(path, _bytes(figure, path.suffix[1:]))


def data_uri(figure: Figure) -> str:
    """The figure as the source of an <img>: a PNG."""
    return f"data:image/png;base64,{base64.b64encode(_bytes(figure, 'png', transparent=True)).decode()}"


def _bytes(figure: Figure, kind: str, *, transparent: bool = False, dpi: int = 160) -> bytes:
    buffer = io.BytesIO()
    # Settings of matplotlib are those of the process, and pages are made in several threads.
    with _DRAWING, matplotlib.rc_context(_VECTORS):
        if (engine := figure.get_layout_engine()) is not None:
            # Ticks depend on the size of a panel and the size on the ticks: a first layout may cut labels off.
            for _ in range(2):
                engine.execute(figure)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata, transparent=transparent)
    return buffer.getvalue()


def _floats(values: Any) -> np.ndarray:
    return np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)


def _round_ticks(axes: Axes, *across: Any) -> None:
    """Ticks of an x axis at round places, at whole ones where all values are."""
    whole = all(np.all(x == np.round(x)) for x in map(_floats, across))
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=_ROUND, integer=whole))


def _legend(axes: Axes, columns: int = 4) -> None:
    """A legend below the figure, in fewer columns where names are long."""
    names = axes.get_legend_handles_labels()[1]
    if not names:
        return
    figure = _figure(axes)
    letters = _LETTERS_PER_IN * figure.get_figwidth()
    fitting = int(letters / (max(map(len, names)) + _HANDLE_LETTERS))
    columns = max(1, min(len(names), columns, fitting))
    legend = figure.legend(loc="outside lower left", ncols=columns, fontsize=9, frameon=False, borderaxespad=0.2,
                           handlelength=2.4)  # fmt: skip
    figure.set_figheight(figure.get_figheight() + 0.19 * ((len(names) - 1) // columns))
    for text in legend.get_texts():
        text.set_text(textwrap.fill(text.get_text(), int(letters - _HANDLE_LETTERS)))


def finish(
    axes: Axes, *, title: str, xlabel: str, ylabel: str = "", grid: Literal["x", "y", "both"] | None = "y"
) -> Figure:
    """Title, labels, grid and type sizes of a panel in this look; returns its figure."""
    # Text wraps between words; only words that are too long are broken here.
    long_word = re.compile(rf"\S{{{_LABEL_LETTERS}}}(?=\S)")
    xlabel, ylabel, title = (long_word.sub(r"\g<0>\n", text) for text in (xlabel, ylabel, title))
    axes.set_xlabel(xlabel, fontsize=9, wrap=True)
    axes.set_ylabel(ylabel, fontsize=9, wrap=True)
    axes.set_title(title, loc="left", fontsize=10.5, wrap=True)
    axes.tick_params(labelsize=9)
    if grid is not None:
        axes.grid(axis=grid, color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return _figure(axes)


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure
