"""Intervals of the drafter's benchmark, as JSON, which knows no NaN, and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]

from tltlab.stats import Interval


def to_json(found: Interval | None) -> dict[str, Any] | None:
    """An interval as a record; ends that are unknown are None."""
    if found is None:
        return None
    return {name: None if value != value else value for name, value in asdict(found).items()}


def mean_of_few(values: Sequence[float], *, least_error: float = 0.0, level: float = 0.95) -> Interval:
    """The mean of a few independent values with Student's interval, since bootstraps of so few are too narrow.

    Few values may agree by luck: `least_error` is the standard error that the mean has at least.

    >>> mean_of_few([1.0, 2.0, 3.0]).low
    -0.4841377118...
    """
    mean = float(np.mean(values))
    margin = math.nan
    if len(values) > 1:
        error = max(float(np.std(values, ddof=1)) / math.sqrt(len(values)), least_error)
        margin = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return Interval(estimate=mean, low=mean - margin, high=mean + margin, level=level, method="none")


def mean_over_orders(groups: Sequence[Sequence[float]], level: float = 0.95) -> Interval:
    """The mean of values measured in different orders, each order weighing the same, with Student's interval.

    What an order does to all its values so cancels, and does not widen the interval: its spread is that within orders.
    Orders without a value are left out; at least one value is needed.
    """
    used = [np.asarray(group, np.float64) for group in groups if len(group)]
    mean = float(np.mean([group.mean() for group in used]))
    freedom = sum(len(group) - 1 for group in used)
    margin = math.nan
    if freedom > 0:
        spread = sum(float(((group - group.mean()) ** 2).sum()) for group in used) / freedom
        error = math.sqrt(spread * sum(1 / len(group) for group in used)) / len(used)
        margin = float(stdtrit(freedom, (1 + level) / 2)) * error
    return Interval(estimate=mean, low=mean - margin, high=mean + margin, level=level, method="none")


def as_text(found: Mapping[str, Any] | None, *, sign: int = 1) -> str:
    """An estimate with its ends, all times `sign`."""
    if found is None:
        return "unknown"
    estimate = sign * found["estimate"]
    if found["low"] is None or found["high"] is None:
        return f"{estimate:.3f} (no interval from one value)"
    low, high = sorted((sign * found["low"], sign * found["high"]))
    return f"{estimate:.3f} [{low:.3f}, {high:.3f}]"


def decimals(value: float | None) -> str:
    """A figure of two decimals, a dash where it is unknown."""
    return "-" if value is None else f"{value:.2f}"
