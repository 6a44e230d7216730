"""Non-negative linear fits of durations: robust ones, and curves that only grow as columns of such fits.

Robust: the shape from typical rows, the level from sums of all rows.

A busy machine makes some iterations many times longer. Least squares chases these rows; trimming them makes every sum
too small. So the shape is fitted to the rows that are near the median of their group, with relative errors, and then
one factor scales the fit to the sum of all rows: the time in outliers is spread in proportion. On synthetic rollouts
with 1 % Pareto outliers or slow stretches this keeps sums unbiased and errs 0.2 % in shape, least squares 2 to 6 %.
The factor is the median over blocks, such as the rollouts of each worker: one during which a neighbour held the machine
does not slow down the prediction of all others.

A piecewise linear curve that never falls is its first value plus ramps, one between each two knots, with coefficients
that are not negative. So is a sum of such curves: isotonic smoothing and regression at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from tltlab.arrays import Flags, Floats, Ints
from tltlab.costs.table import AttentionKnot, TokenKnot
from tltlab.records import frozen

LEAST_S = 1e-9
_ROUNDS = 6
_MADS = 4.0


@frozen
class Fit:
    """Coefficients per column, None where the data do not separate the column from those before it.

    `level` is the factor from typical rows to the sum of a block: 1.1 means a tenth of the time is in outliers.
    """

    coefficients: dict[str, float | None]
    level: float


def fit(columns: dict[str, Floats], y: Floats, groups: Ints, blocks: Ints) -> Fit:
    """Fit y = sum of coefficient * column, all coefficients >= 0.

    `groups` numbers the rows of one kind: outliers are sought among these, so a rare kind of row is not taken for one.
    `blocks` numbers, from 0, the rows whose sum is to be right. Earlier columns win where columns are collinear.
    """
    names = identified(columns)
    coefficients: dict[str, float | None] = dict.fromkeys(columns)
    if not names:
        return Fit(coefficients=coefficients, level=1.0)
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
    return Fit(coefficients=coefficients, level=level)


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
    basis: list[Floats] = []
    for name, column in columns.items():
        norm = float(np.linalg.norm(column))
        residual = column / norm if norm > 0 else column
        for _ in range(2):  # Gram-Schmidt once more: rounding of the first pass would pass for a new direction.
            for direction in basis:
                residual = residual - (residual @ direction) * direction
        if norm > 0 and float(np.linalg.norm(residual)) > 1e-3:
            names.append(name)
            basis.append(residual / np.linalg.norm(residual))
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


def forward_columns(tokens: Floats, knots: Floats) -> dict[str, Floats]:
    """Seconds that grow with the tokens: a constant and the ramps."""
    return {"forward": np.ones_like(tokens)} | _ramps("forward", tokens, knots)


def fixed_columns(batch: Floats, knots: Floats) -> dict[str, Floats]:
    """Seconds that grow with the requests, from nothing at the first knot."""
    return _ramps("fixed", batch, knots)


def context_columns(batch: Floats, context: Floats, knots: Floats) -> dict[str, Floats]:
    """Seconds per token of context in every request, growing with the requests; `context` is the sum over these."""
    ramps = _ramps("context", batch, np.concatenate([[0.0], knots]))
    return {name: ramp * context / batch for name, ramp in ramps.items()}


def forward_bends(tokens: Floats, seconds: Floats, knots: Floats) -> list[dict[str, float]]:
    """How far the curve of `forward_columns` is from straight at each inner knot, for `non_negative`'s `small`.

    Its distance from the line through its neighbours, as a share of the median seconds of the rows at that knot.
    """
    bends = []
    for low, middle, high in zip(knots, knots[1:], knots[2:], strict=False):
        share = (middle - low) / (high - low)
        typical_s = float(np.median(seconds[tokens == middle]))
        bends.append({f"forward {middle:g}": (1 - share) / typical_s, f"forward {high:g}": -share / typical_s})
    return bends


def forward_knots(coefficients: dict[str, float | None], at: Floats) -> tuple[TokenKnot, ...]:
    """The fitted curve of `forward_columns`."""
    seconds = np.maximum(_values_at(coefficients, "forward", at), LEAST_S)
    return tuple(TokenKnot(tokens=float(m), seconds=float(s)) for m, s in zip(at, seconds, strict=True))


def attention_knots(
    coefficients: dict[str, float | None], at: Floats, per_context_s: float | None = None
) -> tuple[AttentionKnot, ...]:
    """The fitted curves of `fixed_columns` and `context_columns`, or one slope for all batches in place of these."""
    fixed = _values_at(coefficients, "fixed", at)
    slopes = _values_at(coefficients, "context", np.concatenate([[0.0], at]))[1:] / at
    if per_context_s is not None:
        slopes = np.full_like(at, per_context_s)
    return tuple(
        AttentionKnot(batch=int(b), fixed_s=float(f), per_context_s=float(s))
        for b, f, s in zip(at, fixed, slopes, strict=True)
    )


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


def _ramps(name: str, x: Floats, knots: Floats) -> dict[str, Floats]:
    return {f"{name} {high:g}": np.clip((x - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)}


def _values_at(coefficients: dict[str, float | None], name: str, knots: Floats) -> Floats:
    """The curve's values at the knots: sums of its ramps up to there."""
    return np.cumsum([coefficients.get(name) or 0.0, *(coefficients.get(f"{name} {x:g}") or 0.0 for x in knots[1:])])
