"""Measured iterations as columns, whether a run recorded them or a table holds them, and robust fits to them.

Fits are non-negative and linear. Robust: the shape from typical rows, the level from sums of all rows.

A busy machine makes some iterations many times longer. Least squares chases these rows; trimming them makes every sum
too small. So the shape is fitted to the rows that are near the median of their group, with relative errors, and then
one factor scales the fit to the sum of all rows: the time in outliers is spread in proportion. On synthetic rollouts
with 1 % Pareto outliers or slow stretches this keeps sums unbiased and errs 0.2 % in shape, least squares 2 to 6 %.
The factor is the median over blocks, such as the rollouts of each worker: one during which a neighbour held the machine
does not slow down the prediction of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from tltlab.arrays import Flags, Floats, Ints
from tltlab.records import frozen

from .evidence import CalibratedRange

BANDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper ends of the batch bands; the last is open."""
NUM_BANDS = len(BANDS)
REGIMES = ("plain", "speculative", "prefill")


def band(batch: Floats) -> Ints:
    """Which batch band each row falls in."""
    return np.searchsorted(BANDS[:-1], batch, side="left").astype(np.int64)


def regimes(prefill: Floats, spec: Flags) -> Ints:
    """Index into REGIMES: an iteration that prefills is of no other regime."""
    return np.where(prefill > 0, 2, spec.astype(np.int64))


_Record = TypeVar("_Record", bound=Any)
_ROUNDS = 6
_MADS = 4.0


@frozen
class Iterations:
    """One entry per iteration; contexts and verified tokens are sums over the batch.

    An iteration verified: `verified` tokens (`tokens_to_verify` per request) of drafts that are `depth` deep. Within
    its `seconds` it drafted: `next_depth` and `draft_s`, 0 where `draft_known` is False.
    `loaded`: a drafter was in memory in that RL step. `synchronous` is 1 where the engine waited for the host, 0 where
    it did not, NaN where that is not known. `block` numbers the rollouts of workers from 0.
    """

    rl_step: Ints
    worker: Ints
    batch: Floats
    context: Floats
    prefill: Floats
    tokens_to_verify: Floats
    verified: Floats
    depth: Ints
    loaded: Flags
    next_depth: Floats
    draft_s: Floats
    draft_known: Flags
    seconds: Floats
    synchronous: Floats
    block: Ints

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def spec(self) -> Flags:
        """Rows that verified a draft."""
        return self.depth > 0

    @property
    def regime(self) -> Ints:
        """Index into REGIMES of each row."""
        return regimes(self.prefill, self.spec | (self.tokens_to_verify > 1))

    @property
    def group(self) -> Ints:
        """Number of the regime and batch band, among whose rows outliers are sought."""
        return self.regime * NUM_BANDS + band(self.batch)

    def where(self, mask: Flags | Ints) -> Iterations:
        """Return the selected rows."""
        return chosen(self, mask)

    @property
    def covered(self) -> CalibratedRange:
        """The span of batch, tokens and context."""
        spans = {"batch": self.batch, "verified_tokens": self.verified, "context_tokens": self.context}
        return CalibratedRange(**{name: (float(x.min()), float(x.max())) for name, x in spans.items()})


def chosen(record: _Record, mask: Flags | Ints) -> _Record:
    """The record with the selected rows of its arrays."""
    arrays = ((f.name, getattr(record, f.name)) for f in fields(record))
    return replace(record, **{name: rows[mask] for name, rows in arrays if isinstance(rows, np.ndarray)})


@frozen
class RobustFit:
    """Coefficients per column, None where the data do not separate the column from those before it.

    `level` is the factor from typical rows to the sum of a block: 1.1 means a tenth of the time is in outliers.
    """

    coefficients: dict[str, float | None]
    level: float


def robust_fit(columns: dict[str, Floats], y: Floats, groups: Ints, blocks: Ints) -> RobustFit:
    """Fit y = sum of coefficient * column, all coefficients >= 0.

    `groups` numbers the rows of one kind: outliers are sought among these, so a rare kind of row is not taken for one.
    `blocks` numbers, from 0, the rows whose sum is to be right. Earlier columns win where columns are collinear.
    """
    names = identified(columns)
    coefficients: dict[str, float | None] = dict.fromkeys(columns)
    if not names:
        return RobustFit(coefficients=coefficients, level=1.0)
    x = np.column_stack([columns[name] for name in names])
    typical, weight = np.ones(len(y), dtype=bool), np.ones(len(y))
    solution = _least_squares(x, y, weight)
    for _ in range(_ROUNDS):
        predicted = np.maximum(x @ solution, 1e-9)
        typical = _near_median(y / predicted, groups)
        weight = 1.0 / predicted**2
        solution = _least_squares(x[typical], y[typical], weight[typical])
    level = _level(y, x @ solution, blocks)
    coefficients |= {name: float(c) * level for name, c in zip(names, solution, strict=True)}
    return RobustFit(coefficients=coefficients, level=level)


def _level(y: Floats, predicted: Floats, blocks: Ints) -> float:
    """The median over blocks of measured over predicted sum, a block counting by its predicted sum."""
    measured, expected = np.bincount(blocks, y), np.bincount(blocks, predicted)
    positive = expected > 0
    if not positive.any():
        return 1.0
    ratio, weight = measured[positive] / expected[positive], expected[positive]
    order = np.argsort(ratio)
    share = np.cumsum(weight[order]) - weight[order] / 2
    return float(np.interp(weight.sum() / 2, share, ratio[order]))


def identified(columns: dict[str, Floats]) -> list[str]:
    """Names of the columns that are not (nearly) a combination of those before them.

    >>> identified({"one": np.ones(3), "batch": np.array([1.0, 2, 3]), "double": np.array([2.0, 4, 6])})
    ['one', 'batch']
    """
    names: list[str] = []
    units: list[Floats] = []
    for name, column in columns.items():
        if norm := float(np.linalg.norm(column)):
            new = [*units, column / norm]
            # The last entry of R is what of the column lies outside the span of those before it.
            if abs(np.asarray(np.linalg.qr(np.column_stack(new), mode="r"))[-1, -1]) > 1e-3:
                names, units = [*names, name], new
    return names


def _near_median(ratio: Floats, groups: Ints) -> Flags:
    near = np.ones(len(ratio), dtype=bool)
    for group in np.unique(groups):
        rows = groups == group
        distance = np.abs(ratio[rows] - np.median(ratio[rows]))
        near[rows] = distance <= _MADS * max(1.4826 * float(np.median(distance)), 1e-6)
    return near


def _least_squares(x: Floats, y: Floats, weight: Floats) -> Floats:
    # Columns of like size: contexts are millions where intercepts are ones.
    scale = np.sqrt((weight[:, None] * x**2).sum(axis=0))
    scale[scale == 0] = 1.0
    root = np.sqrt(weight)
    return np.asarray(_not_negative(root[:, None] * (x / scale), root * y) / scale, np.float64)


def _not_negative(x: Floats, y: Floats) -> Floats:
    """The least squares solution of x c = y without coefficients below 0."""
    from scipy.optimize import nnls  # takes longer to import than most commands that reach this module take to start

    solution: Floats = nnls(x, y)[0]
    return solution


def non_negative(
    columns: dict[str, Floats], y: Floats, small: Sequence[Mapping[str, float]] = ()
) -> dict[str, float | None]:
    """Non-negative coefficients of least relative error of the columns against y.

    Each of `small` is a sum of coefficients, by their factors, that counts as an error a tenth its size: what the data
    leave open is decided by it. None for a column that is a combination of those before it.
    """
    rows = {
        name: np.concatenate([column / y, [0.1 * term.get(name, 0.0) for term in small]])
        for name, column in columns.items()
    }
    names = identified(rows)
    x = np.column_stack([rows[name] for name in names])
    scale = np.linalg.norm(x, axis=0)
    target = np.concatenate([np.ones(len(y)), np.zeros(len(small))])
    solution = _not_negative(x / scale, target) / scale
    return dict.fromkeys(columns) | {name: float(c) for name, c in zip(names, solution, strict=True)}
