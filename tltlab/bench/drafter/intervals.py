"""Figures of the drafter's benchmark for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_text(found: Mapping[str, Any] | None) -> str:
    """An estimate with its ends."""
    if found is None:
        return "unknown"
    if found["low"] is None or found["high"] is None:
        return f"{found['estimate']:.3f} (no interval from one value)"
    return f"{found['estimate']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def decimals(value: float | None) -> str:
    """A figure of two decimals, a dash where it is unknown."""
    return "-" if value is None else f"{value:.2f}"
