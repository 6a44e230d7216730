"""Intervals of the drafter's benchmark, as JSON, which knows no NaN, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tltlab.stats import Interval


def to_json(found: Interval | None) -> dict[str, Any] | None:
    """An interval as a record; ends that are unknown are None."""
    if found is None:
        return None
    return {name: None if value != value else value for name, value in asdict(found).items()}


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
