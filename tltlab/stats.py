"""How sure figures are: bootstrap intervals of pairs, Student's intervals of a few values, ICC, Kendall's tau.

Two policies simulated on the same responses, RL steps and seeds give pairs (a_i, b_i). Resampling pairs keeps what the
two have in common, so the interval is as narrow as the comparison is sharp.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import numpy as np

from .arrays import Floats
from .errors import ConfigError
from .records import Json, frozen

Pair = tuple[int, int]
Span = tuple[float, float]

LEVEL = 0.95
SIDE = 2
"""Fewest values before and behind a change: a single large one is none."""


@frozen
class Interval:
    """An estimate and its two-sided interval at `level`; low and high are NaN where one pair allows none."""

    estimate: float
    low: float
    high: float
    level: float = LEVEL

    def __format__(self, spec: str) -> str:
        """The estimate and its ends in a number's format: `f"{interval:.1f}"` is '1.2 (1.1 to 1.3)'."""
        if not spec:
            return str(self)
        return f"{self.estimate:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def interval_json(interval: Interval | None) -> Json | None:
    """An interval for JSON, which knows no NaN: ends that are unknown are None."""
    if interval is None:
        return None
    return {name: None if value != value else value for name, value in asdict(interval).items()}


def finite(value: float) -> float | None:
    """A number for JSON, which knows neither NaN nor infinity: None for these."""
    return value if math.isfinite(value) else None


def paired_interval(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    rng: np.random.Generator | int = 0,
) -> Interval:
    """The interval of sum(a) / sum(b) from pairs (a[i], b[i]), resampled by a generator or a seed.

    Bias-corrected and accelerated (BCa, Efron 1987), which keeps its level for the skewed ratios of heavy-tailed step
    times. Where BCa is undefined (every pair left out in turn gives the same estimate, or all resamples lie on one side
    of it) the percentile interval is taken, as `method` records. A tie in all pairs gives [1, 1]. A single pair has an
    estimate and no interval. With few pairs any bootstrap interval is too narrow: below ten, read it as a hint.

    Raises ConfigError for no pair, different lengths, values that are not finite, b <= 0 and a < 0.

    >>> paired_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    Interval(estimate=2.0, low=2.0, high=2.0, level=0.95)
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level is a probability between 0 and 1, got {level}")
    if num_resamples < 1:
        raise ConfigError(f"num_resamples must be at least 1, got {num_resamples}")
    first, second = _checked(a, b)

    def compare(a: Floats, b: Floats, axis: int = -1) -> Any:
        return a.sum(axis=axis) / b.sum(axis=axis)

    estimate = float(compare(first, second))
    if len(first) == 1:
        return Interval(estimate=estimate, low=math.nan, high=math.nan, level=level)
    ratios = first / second
    if np.ptp(ratios) <= 1e-12 * ratios.max():
        return Interval(estimate=estimate, low=estimate, high=estimate, level=level)
    # SciPy takes half a second to import; most intervals need only Student's quantiles.
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        # Undefined BCa ends are NaN, and handled below.
        warnings.simplefilter("ignore")
        resampled = bootstrap(
            (first, second), compare, paired=True, vectorized=True, n_resamples=num_resamples, confidence_level=level,
            method="BCa", rng=rng,
        )  # fmt: skip
    low, high = map(float, resampled.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)):
        tail = (1.0 - level) / 2.0
        low, high = map(float, np.quantile(resampled.bootstrap_distribution, [tail, 1.0 - tail]))
    return Interval(estimate=estimate, low=low, high=high, level=level)


FEW_PAIRS = 10
"""Pairs below which a bootstrap's interval is too narrow."""


def paired_ratio(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    *,
    level: float = LEVEL,
    rng: np.random.Generator | int = 0,
) -> Interval:
    """The interval of sum(a) / sum(b) for any number of pairs: `paired_interval` from `FEW_PAIRS` on, else Student's.

    The ratio r of n pairs has about the standard error of the residuals a - r b, s / (sqrt(n) mean(b)), and n - 1
    degrees of freedom. Neither sum is below 0, and so is no end. Raises ConfigError as `paired_interval` does.

    >>> ratio = paired_ratio([2.0, 4.0, 7.0], [1.0, 2.0, 3.0])
    >>> [round(x, 3) for x in (ratio.low, ratio.estimate, ratio.high)]
    [1.619, 2.167, 2.714]
    """
    first, second = _checked(a, b)
    if not 1 < len(first) < FEW_PAIRS:
        return paired_interval(first, second, level=level, rng=rng)
    ratio = float(first.sum() / second.sum())
    error = float(np.std(first - ratio * second, ddof=1)) / math.sqrt(len(first)) / float(second.mean())
    margin = student_margin(error, len(first) - 1, level)
    return Interval(estimate=ratio, low=max(0.0, ratio - margin), high=ratio + margin, level=level)


def student_margin(error: float, freedom: int, level: float = LEVEL) -> float:
    """Half the width of Student's interval at `level`, from a standard error with so many degrees of freedom.

    >>> round(student_margin(1.0, 2), 3)
    4.303
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1.0 + level) / 2.0)) * error


def mean_of_few(values: Sequence[float] | Floats, *, least_error: float = 0.0) -> Interval:
    """The mean of a few independent values with Student's interval, since bootstraps of so few are too narrow.

    Few values may agree by chance: `least_error` is the standard error that the mean has at least.

    >>> round(mean_of_few([1.0, 2.0, 3.0]).low, 3)
    -0.484
    """
    mean = float(np.mean(values))
    margin = math.nan
    if len(values) > 1:
        error = max(float(np.std(values, ddof=1)) / math.sqrt(len(values)), least_error)
        margin = student_margin(error, len(values) - 1)
    return Interval(estimate=mean, low=mean - margin, high=mean + margin)


def non_overlapping_pairs(spans: Sequence[Span]) -> list[Pair]:
    """All pairs i < j whose intervals do not overlap; an unknown interval (nan) overlaps with everything.

    >>> non_overlapping_pairs([(1.0, 2.0), (1.5, 3.0), (4.0, 5.0)])
    [(0, 2), (1, 2)]
    """
    return [
        (i, j) for i, j in combinations(range(len(spans)), 2) if spans[i][1] < spans[j][0] or spans[j][1] < spans[i][0]
    ]


def kendall_tau(
    measured: Sequence[float] | Floats, predicted: Sequence[float] | Floats, pairs: Sequence[Pair]
) -> float | None:
    """Kendall's tau over these pairs: those in the same order less those in the opposite one, over all; None for none.

    A tie in either counts as neither. Over all pairs, without ties, it is the usual tau.

    >>> kendall_tau([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [(0, 1), (0, 2), (1, 2)])
    0.3333333333333333
    """
    if not pairs:
        return None
    order = [float(np.sign((measured[i] - measured[j]) * (predicted[i] - predicted[j]))) for i, j in pairs]
    return math.fsum(order) / len(pairs)


def intraclass_correlation(between: float, within: float, size: float) -> float | None:
    """ICC(1), the share of the variance that groups of `size` explain, not below 0; None where nothing varies.

    One-way random effects (Shrout and Fleiss 1979), from the mean squares between and within groups.

    >>> intraclass_correlation(between=4.0, within=1.0, size=2)
    0.6
    """
    total = between + (size - 1) * within
    return max(0.0, (between - within) / total) if total else None


def _checked(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> tuple[Floats, Floats]:
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ConfigError(
            f"pairs are needed: two flat sequences of one length, got shapes {first.shape}, {second.shape}"
        )
    if not len(first):
        raise ConfigError("no pair to compare: both sequences are empty")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ConfigError("a pair has a value that is not finite: leave failed runs out of both sequences")
    if (second <= 0).any() or (first < 0).any():
        raise ConfigError("a ratio of sums needs a >= 0 and b > 0 in every pair, such as times or token counts")
    return first, second


def paired_speed_up(plain: Floats, seconds: Floats, seed: int) -> Interval:
    """How many times as fast `seconds` are, by RL step: the reciprocal of their ratio to `plain` and of its ends."""
    ratio = paired_ratio(seconds, plain, rng=seed)
    most = 1.0 / ratio.low if ratio.low else math.inf
    return replace(ratio, estimate=1.0 / ratio.estimate, low=1.0 / ratio.high, high=most)


def format_speed_up(interval: Interval) -> str:
    """
    >>> format_speed_up(Interval(estimate=1.5, low=1.2, high=float("inf")))
    '1.50x (95 % interval of draws only: 1.20x, no upper end)'
    """
    if interval.low != interval.low:
        return f"{interval.estimate:.2f}x"
    most = f" to {interval.high:.2f}x" if math.isfinite(interval.high) else ", no upper end"
    return f"{interval.estimate:.2f}x (95 % interval of draws only: {interval.low:.2f}x{most})"


def interval_ends(interval: Interval | None) -> dict[str, float | None] | None:
    """The interval for JSON, which knows neither NaN nor infinity."""
    if interval is None:
        return None
    return {"mean": interval.estimate, "low": finite(interval.low), "high": finite(interval.high)}


def change_point(values: Floats) -> int | None:
    """Where a series rises for good: the first index behind; None where it does not.

    The change is the split with the largest variance between both sides; at most one value in ten may overlap.
    """
    num = len(values)
    if num < 2 * SIDE + 1 or not np.isfinite(values).all():
        return None
    sums, at = np.cumsum(values), np.arange(SIDE, num - SIDE + 1)
    rise = (sums[-1] - sums[at - 1]) / (num - at) - sums[at - 1] / at
    best = int(at[np.argmax(np.sign(rise) * rise**2 * at * (num - at))])
    least = np.quantile(values[best:], 0.1, method="lower")
    return best if least > np.quantile(values[:best], 0.9, method="higher") else None
