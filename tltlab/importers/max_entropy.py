"""Lengths that agree with a log's mean, shortest, longest and share of cut responses, and assume nothing else."""

from __future__ import annotations

import numpy as np

from tltlab.arrays import Floats, Ints

_STEEPEST = 700.0
"""Largest decay over the range, in nats: e^-700 is the last that a double holds."""


def max_entropy_lengths(
    num: int, *, mean: float, least: int | None = None, most: int | None = None, cut: float = 0.0,
    cap: int | None = None,
) -> Ints:  # fmt: skip
    """`num` lengths in tokens, ascending, whose sum is `mean` times `num`, rounded.

    The maximum-entropy distribution on `least` (unknown: 1) .. `most` with this mean is the exponential cut off at both
    ends (Jaynes 1957; Cover and Thomas, chapter 12); the lengths are its quantiles, so they are the same each time.
    One response has the length `least` and one `most`, the extremes that the log states. Round(`cut` x
    `num`) of them have the length `cap`, `most` by default. Without `most` the distribution has no upper end below
    `cap`, and the longest is its last quantile. Raises ValueError where no such lengths exist.

    >>> max_entropy_lengths(4, mean=30.0, least=10, most=80).tolist()
    [10, 12, 18, 80]
    """
    low = 1 if least is None else least
    if num < 1 or low < 1 or (most is not None and most < low):
        raise ValueError(f"{num} lengths from {low} to {most} tokens")
    if (longest := max(mean, low, most or 0, cap or 0)) >= 1 << 31:
        raise ValueError(f"no response has {longest:.3g} tokens")
    total = round(mean * num)
    end = most if cap is None else cap
    num_cut = 0 if end is None else min(num, round(cut * num))
    fixed: list[int] = [] if end is None else [end] * num_cut
    if most is not None and not num_cut:
        fixed.append(most)
    if least is not None and len(fixed) < num and least != most:
        fixed.append(least)
    fixed = fixed[:num]
    free = num - len(fixed)
    free_total = total - sum(fixed)
    if most is not None:
        # A response at the cap counts as cut, so the others stay below it.
        high = max(low, most - 1) if num_cut and most == end else most
    else:
        # Practically no end: at 30 times the mean an exponential has 1e-13 of its mass left.
        high = (cap - 1 if num_cut else cap) if cap is not None else low + max(1, int(30 * (free_total / max(free, 1))))
    if (free == 0 and abs(free_total) > num) or (free and not free * low <= free_total <= free * high):
        raise ValueError(
            f"{num} responses of {low} to {most} tokens, {num_cut} of them cut at {end}, have no mean of {mean:g}"
        )
    drawn = _quantiles(free, free_total / free, float(low), float(high)) if free else np.zeros(0)
    return np.sort(np.concatenate([_round_to_total(drawn, free_total), np.asarray(fixed, np.int64)])).astype(np.int64)


def _quantiles(num: int, mean: float, low: float, high: float) -> Floats:
    """Middles of `num` equal parts of the truncated exponential's mass, its decay such that their mean is `mean`."""
    at = (np.arange(num) + 0.5) / num
    width = high - low
    if width <= 0 or mean <= low:
        return np.full(num, low)
    if mean >= high:
        return np.full(num, high)

    def lengths(decay: float) -> Floats:
        """`decay` is in nats over the whole range; below zero long lengths are the likelier ones."""
        if abs(decay) < 1e-9:
            return low + width * at
        values: Floats = low - width / decay * np.log1p(at * np.expm1(-decay))
        return np.clip(values, low, high)

    def off(decay: float) -> float:
        return float(lengths(decay).mean()) - mean

    from scipy.optimize import brentq  # takes longer to import than most commands that get here by way of others

    if off(_STEEPEST) >= 0:
        return lengths(_STEEPEST)
    if off(-_STEEPEST) <= 0:
        return lengths(-_STEEPEST)
    return lengths(float(brentq(off, -_STEEPEST, _STEEPEST, xtol=1e-12)))


def _round_to_total(values: Floats, total: int) -> Ints:
    """Whole numbers nearest to `values`, in their range, that sum to `total`: the largest remainders are rounded up."""
    if not len(values):
        return np.zeros(0, np.int64)
    whole = np.floor(values).astype(np.int64)
    missing = total - int(whole.sum())
    increment, remainder = divmod(missing, len(whole))
    order = np.argsort(whole - values, kind="stable")
    whole += increment
    whole[order[:remainder]] += 1
    return np.sort(whole)
