"""How far predictions agree with repeated measurements: intervals, pairs that are surely different, Kendall's tau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.stats import t

from .errors import ConfigError

FloatArray = npt.NDArray[np.float64]
Pair = tuple[int, int]
Span = tuple[float, float]

LEVEL = 0.95


def mean_interval(values: Sequence[float] | FloatArray, level: float = LEVEL) -> Span:
    """Student's interval of the mean of repeated measurements; (nan, nan) for a single one.

    Raises ConfigError for no value and for values that are not finite.

    >>> mean_interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    known = np.asarray(values, np.float64)
    if not len(known) or not np.isfinite(known).all():
        raise ConfigError(f"an interval needs finite measurements, got {known.tolist()}")
    if len(known) == 1:
        return math.nan, math.nan
    half = float(t.ppf((1.0 + level) / 2.0, len(known) - 1) * known.std(ddof=1) / math.sqrt(len(known)))
    mean = float(known.mean())
    return mean - half, mean + half


def pairs_apart(spans: Sequence[Span]) -> list[Pair]:
    """All pairs i < j whose intervals do not overlap; an unknown interval (nan) overlaps with everything.

    >>> pairs_apart([(1.0, 2.0), (1.5, 3.0), (4.0, 5.0)])
    [(0, 2), (1, 2)]
    """
    return [
        (i, j) for i, j in combinations(range(len(spans)), 2) if spans[i][1] < spans[j][0] or spans[j][1] < spans[i][0]
    ]


def pairs_apart_by_round(measured: FloatArray, level: float = LEVEL) -> list[Pair]:
    """All pairs of rows whose mean difference over the columns has an interval without 0.

    `measured` has a row per policy and a column per round. Policies of one round roll out the same prompts, so
    differences within rounds are sharper than intervals of each policy.
    """
    found = []
    for i, j in combinations(range(len(measured)), 2):
        low, high = mean_interval(measured[i] - measured[j], level)
        if low > 0.0 or high < 0.0:
            found.append((i, j))
    return found


def kendall_tau(
    measured: Sequence[float] | FloatArray, predicted: Sequence[float] | FloatArray, pairs: Sequence[Pair]
) -> float | None:
    """Kendall's tau over these pairs: those in the same order less those in the opposite one, over all; None for none.

    A tie in either counts as neither. Over all pairs, without ties, it is the usual tau.

    >>> kendall_tau([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [(0, 1), (0, 2), (1, 2)])
    0.3333333333333333
    """
    if not pairs:
        return None
    order = [
        float(np.sign((measured[i] - measured[j]) * (predicted[i] - predicted[j]))) for i, j in pairs
    ]  # fmt: skip
    return math.fsum(order) / len(pairs)
