"""Label-setting search for the cheapest buckets under a memory cap, from the largest batch down.

A label is a choice for all batches above b: seconds, bytes, the runners that are open, the strategy in force and the
rows so far. One label makes another superfluous when it is no slower and could copy whatever the other does next for no
more memory: it pays for the runners that only the other has open (at most their opening at b), for a row's end where
the other just goes on, and for that row. The rest is pruned by `bucket_bounds` against a plan found by a narrow search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tltlab.arrays import Floats, Ints, Words

from .bucket_bounds import Bounds, Problem

WIDTHS = (20, 300, 2000)
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Columns of all labels at one batch; `parent` is the row in the labels of the batch above."""

    seconds: Floats
    memory: Floats
    open: Words
    last: Ints
    num_rows: Ints
    parent: Ints
    bound: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Ints) -> Labels:
        return Labels(**{name: getattr(self, name)[rows] for name in self.__slots__})


def cheapest(problem: Problem, rest_s: Floats, max_rows: int) -> list[int] | None:
    """The strategy of each batch 1..B in the fastest plan that fits, of those the smallest; None where none fits.

    `rest_s`[b, k, s] are the least seconds of batches 1..b below a row of s, with at most k rows more.
    """
    bounds = Bounds.of(problem)
    best_s, choice = np.inf, None
    # A narrow search finds a good plan; a wider one that leaves nothing out below its seconds proves the best.
    for width in (*WIDTHS, None):
        found_s, choice, complete = _search(problem, bounds, rest_s, max_rows, best_s * (1.0 + 1e-9), width)
        if complete:
            break
        best_s = min(best_s, found_s)
    return choice


def _search(
    p: Problem, bounds: Bounds, rest_s: Floats, max_rows: int, most_s: float, width: int | None
) -> tuple[float, list[int] | None, bool]:
    """Seconds and choice of the best plan of at most `most_s`, and whether nothing was left out for the width."""
    none = np.zeros(1, np.int64)
    labels = Labels(
        seconds=np.zeros(1), memory=np.zeros(1), open=np.zeros(1, np.uint64), last=none - 1, num_rows=none, parent=none,
        bound=np.zeros(1),
    )  # fmt: skip
    steps, complete = [], True
    for i in reversed(range(p.seconds.shape[1])):
        labels = _bounded(p, bounds, rest_s, max_rows, _extended(p, labels, i), i, most_s)
        if width is not None and len(labels) > 4 * width:
            labels, complete = _narrowed(labels, 4 * width), False
        labels = _undominated(p, labels, i)
        if width is not None and len(labels) > width:
            labels, complete = _narrowed(labels, width), False
        if not len(labels):
            return np.inf, None, complete
        steps.append(labels)
    row = int(np.lexsort((labels.num_rows, labels.memory, labels.seconds))[0])
    best_s, choice = float(labels.seconds[row]), []
    for labels in reversed(steps):
        choice.append(int(labels.last[row]))
        row = int(labels.parent[row])
    return best_s, choice, complete


def _extended(p: Problem, labels: Labels, i: int) -> Labels:
    """Every label with every strategy at index i, as far as that fits."""
    opening = ((1.0 - p.has(labels.open)) * p.opening[:, i]) @ p.uses.T
    switches = labels.last[:, None] != np.arange(len(p.seconds))
    memory = labels.memory[:, None] + np.where(switches, p.end[:, i], p.stay[:, i]) + opening
    parent, last = np.nonzero(memory <= p.cap * (1.0 + ROUNDING))
    return Labels(
        seconds=labels.seconds[parent] + p.seconds[last, i],
        memory=memory[parent, last],
        open=labels.open[parent] | p.bits[last],
        last=last,
        num_rows=labels.num_rows[parent] + switches[parent, last],
        parent=parent,
        bound=labels.bound[parent],
    )


def _bounded(
    p: Problem, bounds: Bounds, rest_s: Floats, max_rows: int, labels: Labels, i: int, most_s: float
) -> Labels:
    """Labels that may still end within `most_s`, the cap and `max_rows`, with their bounds, the fastest first."""
    labels = labels.take(np.flatnonzero(labels.num_rows <= max_rows))
    if i == 0 or not len(labels):
        kept = np.flatnonzero(labels.seconds <= most_s)
        return labels.take(kept[np.lexsort((labels.memory[kept], labels.seconds[kept]))])
    rest = bounds.of_rest(labels.open, labels.last, i)
    priced = (rest[:, 1:] - bounds.prices * (p.cap - labels.memory)[:, None]).max(axis=1)
    least_s = rest_s[i, max_rows - labels.num_rows, labels.last]
    bound = labels.seconds + np.maximum(priced, least_s)
    fits = labels.memory + rest[:, 0] <= p.cap * (1.0 + ROUNDING)
    kept = np.flatnonzero(fits & (bound <= most_s))
    order = kept[np.lexsort((labels.memory[kept], labels.seconds[kept]))]
    return Labels(
        seconds=labels.seconds[order], memory=labels.memory[order], open=labels.open[order], last=labels.last[order],
        num_rows=labels.num_rows[order], parent=labels.parent[order], bound=bound[order],
    )  # fmt: skip


def _narrowed(labels: Labels, width: int) -> Labels:
    return labels.take(np.sort(np.argsort(labels.bound, kind="stable")[:width]))


def _undominated(p: Problem, labels: Labels, i: int) -> Labels:
    """`labels`, fastest first, without those that an earlier one can copy for no more memory; i is the last index."""
    if i:
        opening, ends = p.opening[:, i - 1], p.end[:, i - 1] - p.stay[:, i - 1]
    else:
        opening, ends = np.zeros(len(p.opening)), np.zeros(len(p.seconds))
    held = p.has(labels.open)
    price = held * opening
    whole, memory, last, num_rows = price.sum(axis=1), labels.memory, labels.last, labels.num_rows
    rows, at = np.arange(len(labels)), 0
    while at + 1 < len(rows):
        after = slice(at + 1, None)
        other = last[after] != last[at]
        extra = whole[after] - price[after] @ held[at] + np.where(other, ends[last[after]], 0.0)
        beaten = (memory[at] + extra <= memory[after]) & (num_rows[at] + other <= num_rows[after])
        if beaten.any():
            kept = np.concatenate([np.arange(at + 1), at + 1 + np.flatnonzero(~beaten)])
            rows, held, price, whole = rows[kept], held[kept], price[kept], whole[kept]
            memory, last, num_rows = memory[kept], last[kept], num_rows[kept]
        at += 1
    return labels.take(rows)
