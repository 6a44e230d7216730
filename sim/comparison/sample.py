"""As many RL steps as an answer needs, spread over the run: a figure from a sample, whose size it finds itself.

A comparison is off by what its costs are off by, and by the draw of its RL steps. More RL steps narrow the latter only:
a sample is large enough once its band is small beside that of the costs. RL steps of a run drift (lengths grow), so a
sample has the middle one of each of n parts of the run that are equally long. Three times as many parts have these
among their middles, so that a sample grows by adding to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tltlab.stats import Interval

FIRST, ALL_OF = 8, 24
"""RL steps to begin with, of a run of more than `ALL_OF`; of others all."""
SMALL, UNKNOWN = 1 / 3, 0.01
"""A band is small whose half-width is at most this share of the costs', and where that is not known, this itself."""

Answer = TypeVar("Answer")


def spread(rl_steps: Sequence[int], num: int) -> list[int]:
    """`num` of the RL steps, spread over the run.

    >>> spread(range(100), 4), set(spread(range(100), 4)) <= set(spread(range(100), 12))
    ([12, 37, 62, 87], True)
    """
    num = min(num, len(rl_steps))
    return [rl_steps[(2 * part + 1) * len(rl_steps) // (2 * num)] for part in range(num)]


def small(ratios: Iterable[Interval], cost_error: float | None) -> bool:
    """True if the interval of every ratio is small beside the error of the costs (None: not known), both relative."""
    most = UNKNOWN if cost_error is None else SMALL * cost_error
    return all((ratio.high - ratio.low) / 2 <= most * ratio.estimate for ratio in ratios if ratio.estimate > 0)


def from_a_sample(
    rl_steps: Sequence[int], answer: Callable[[list[int]], Answer], enough: Callable[[Answer], bool]
) -> Answer:
    """Answer from as many of these RL steps as are `enough`: 8, 24, 72, ..., all; from all of 24 or fewer."""
    num = FIRST if len(rl_steps) > ALL_OF else len(rl_steps)
    while True:
        found = answer(spread(rl_steps, num))
        if num >= len(rl_steps) or enough(found):
            return found
        num *= 3
