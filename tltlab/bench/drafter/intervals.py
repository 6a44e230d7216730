"""Figures of the drafter's benchmark for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
