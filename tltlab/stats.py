"""Paired bootstrap intervals: how sure a comparison is that was made with common random numbers.

Two policies simulated on the same responses, RL steps and seeds give pairs (a_i, b_i). Resampling pairs keeps what the
two have in common, so the interval is as narrow as the comparison is sharp.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from .errors import ConfigError

FloatArray = npt.NDArray[np.float64]
Statistic = Literal["ratio_of_sums", "mean_difference"]
Method = Literal["bca", "percentile", "t", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its two-sided interval at `level`; low and high are NaN where one pair allows none (`none`)."""

    estimate: float
    low: float
    high: float
    level: float
    method: Method


def paired_interval(
    a: Sequence[float] | FloatArray,
    b: Sequence[float] | FloatArray,
    *,
    statistic: Statistic = "ratio_of_sums",
    level: float = 0.95,
    num_resamples: int = 2000,
    rng: np.random.Generator,
) -> Interval:
    """The interval of sum(a) / sum(b), or of mean(a - b), from pairs (a[i], b[i]).

    Bias-corrected and accelerated (BCa, Efron 1987), which keeps its level for the skewed ratios of heavy-tailed step
    times. Where BCa is undefined (every pair left out in turn gives the same estimate, or all resamples lie on one side
    of it) the percentile interval, `method` says so. A tie in all pairs gives [1, 1] or [0, 0]. A single pair has an
    estimate and no interval. With few pairs any bootstrap interval is too narrow: below ten, read it as a hint.

    Raises ConfigError for no pair, different lengths, values that are not finite, and for ratios b <= 0 or a < 0.

    >>> paired_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], rng=np.random.default_rng(0))
    Interval(estimate=2.0, low=2.0, high=2.0, level=0.95, method='percentile')
    """
    if statistic not in get_args(Statistic):
        raise ConfigError(f"no statistic named {statistic!r}; there are {', '.join(get_args(Statistic))}")
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level is a probability between 0 and 1, got {level}")
    if num_resamples < 1:
        raise ConfigError(f"num_resamples must be at least 1, got {num_resamples}")
    first, second = _checked(a, b, statistic)
    compare = _ratio_of_sums if statistic == "ratio_of_sums" else _mean_difference
    estimate = float(compare(first, second))
    if len(first) == 1:
        return Interval(estimate=estimate, low=math.nan, high=math.nan, level=level, method="none")
    apart = first / second if statistic == "ratio_of_sums" else first - second
    if np.ptp(apart) <= 1e-12 * np.abs(apart).max():
        return Interval(estimate=estimate, low=estimate, high=estimate, level=level, method="percentile")
    return _resampled(first, second, compare, estimate, level, num_resamples, rng)


def _resampled(
    first: FloatArray,
    second: FloatArray,
    compare: Any,
    estimate: float,
    level: float,
    num_resamples: int,
    rng: np.random.Generator,
) -> Interval:
    with warnings.catch_warnings():
        # Undefined BCa ends are NaN, and handled below.
        warnings.simplefilter("ignore")
        found = bootstrap(
            (first, second),
            compare,
            paired=True,
            vectorized=True,
            n_resamples=num_resamples,
            confidence_level=level,
            method="BCa",
            rng=rng,
        )
    low, high = map(float, found.confidence_interval)
    method: Method = "bca"
    if not (math.isfinite(low) and math.isfinite(high)):
        tail = (1.0 - level) / 2.0
        low, high = map(float, np.quantile(found.bootstrap_distribution, [tail, 1.0 - tail]))
        method = "percentile"
    return Interval(estimate=estimate, low=low, high=high, level=level, method=method)


def _ratio_of_sums(a: FloatArray, b: FloatArray, axis: int = -1) -> Any:
    return a.sum(axis=axis) / b.sum(axis=axis)


def _mean_difference(a: FloatArray, b: FloatArray, axis: int = -1) -> Any:
    return (a - b).mean(axis=axis)


def _checked(
    a: Sequence[float] | FloatArray, b: Sequence[float] | FloatArray, statistic: str
) -> tuple[FloatArray, FloatArray]:
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ConfigError(
            f"pairs are needed: two flat sequences of one length, got shapes {first.shape}, {second.shape}"
        )
    if not len(first):
        raise ConfigError("no pair to compare: both sequences are empty")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ConfigError("a pair has a value that is not finite: leave failed runs out of both sequences")
    if statistic == "ratio_of_sums" and ((second <= 0).any() or (first < 0).any()):
        raise ConfigError("a ratio of sums needs a >= 0 and b > 0 in every pair, such as times or token counts")
    return first, second
