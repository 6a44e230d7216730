"""Non-negative linear fits of noisy durations: the shape from typical rows, the level from sums of all rows.

A busy machine makes some iterations many times longer. Least squares chases these rows; trimming them makes every sum
too small. So the shape is fitted to the rows that are near the median of their group, with relative errors, and then
one factor scales the fit to the sum of all rows: the time in outliers is spread in proportion. On synthetic rollouts
with 1 % Pareto outliers or slow stretches this keeps sums unbiased and errs 0.2 % in shape, least squares 2 to 6 %.
The factor is the median over blocks, such as the rollouts of each worker: one during which a neighbour held the machine
does not slow down the prediction of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LinearRegression

from tltlab.arrays import Flags, Floats, Ints

_ROUNDS = 6
_MADS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients per column, None where the data cannot tell the column from those before it.

    `level` is the factor from typical rows to the sum of a block: 1.1 means a tenth of the time is in outliers.
    """

    coefficients: dict[str, float | None]
    level: float


def fit(columns: dict[str, Floats], y: Floats, groups: Ints, blocks: Ints) -> Fit:
    """Fit y = sum of coefficient * column, all coefficients >= 0.

    `groups` numbers the rows of one kind: outliers are sought among these, so a rare kind of row is not taken for one.
    `blocks` numbers, from 0, the rows whose sum is to be right. Earlier columns win where columns are collinear.
    """
    if len(y) == 0:
        return Fit(coefficients=dict.fromkeys(columns), level=1.0)
    used = identified(columns)
    coefficients: dict[str, float | None] = dict.fromkeys(columns)
    if not used:
        return Fit(coefficients=coefficients, level=1.0)
    x = np.column_stack([columns[name] for name in used])
    kept, weight = np.ones(len(y), dtype=bool), np.ones(len(y))
    found = _least_squares(x, y, weight)
    for _ in range(_ROUNDS):
        predicted = np.maximum(x @ found, 1e-9)
        kept = _near_median(y / predicted, groups)
        weight = 1.0 / predicted**2
        found = _least_squares(x[kept], y[kept], weight[kept])
    level = _level(y, x @ found, blocks)
    coefficients |= {name: float(c) * level for name, c in zip(used, found, strict=True)}
    return Fit(coefficients=coefficients, level=level)


def _level(y: Floats, predicted: Floats, blocks: Ints) -> float:
    """The median over blocks of measured over predicted sum, a block counting by its predicted sum."""
    measured, expected = np.bincount(blocks, y), np.bincount(blocks, predicted)
    seen = expected > 0
    if not seen.any():
        return 1.0
    ratio, weight = measured[seen] / expected[seen], expected[seen]
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
        left = column / norm if norm > 0 else column
        for _ in range(2):  # Gram-Schmidt once more: rounding of the first pass would pass for a new direction.
            for direction in basis:
                left = left - (left @ direction) * direction
        if norm > 0 and float(np.linalg.norm(left)) > 1e-3:
            names.append(name)
            basis.append(left / np.linalg.norm(left))
    return names


def _near_median(ratio: Floats, groups: Ints) -> Flags:
    kept = np.ones(len(ratio), dtype=bool)
    for group in np.unique(groups):
        rows = groups == group
        off = np.abs(ratio[rows] - np.median(ratio[rows]))
        kept[rows] = off <= _MADS * max(1.4826 * float(np.median(off)), 1e-6)
    return kept


def _least_squares(x: Floats, y: Floats, weight: Floats) -> Floats:
    # Columns of like size: contexts are millions where intercepts are ones.
    scale = np.sqrt((weight[:, None] * x**2).sum(axis=0))
    scale[scale == 0] = 1.0
    model = LinearRegression(positive=True, fit_intercept=False).fit(x / scale, y, sample_weight=weight)
    found: Floats = np.asarray(model.coef_, np.float64) / scale
    return found
