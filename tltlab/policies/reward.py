"""The reward of an iteration for bandits, and the window that summarises an arm's latest rewards."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Literal

from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.state import StepOutcome
from tltlab.strategy import Strategy

RewardKind = Literal["paper", "relative"]
Statistic = Literal["median", "mean"]
PLAIN_WINDOW = 32


class Window:
    """Median or mean of the last `size` values pushed, +infinity while empty, so that an unseen arm looks best.

    A push costs one binary search and a short move in a sorted list (median) or one exact sum (mean): a few
    microseconds at 300 values. Sums are exact, so a window refilled from `values` gives the same bits.

    >>> window = Window(3)
    >>> for value in (9.0, 1.0, 2.0, 3.0):
    ...     window.push(value)
    >>> window.value
    2.0
    """

    __slots__ = ("_sorted", "size", "statistic", "value", "values")

    def __init__(self, size: int, statistic: Statistic = "median"):
        if size < 1:
            raise ConfigError(f"window must be at least 1, got {size}")
        self.size = size
        self.statistic = statistic
        self.values: deque[float] = deque()
        self.value = math.inf
        self._sorted: list[float] = []

    def push(self, value: float) -> None:
        values, ordered = self.values, self._sorted
        if len(values) == self.size:
            del ordered[bisect_left(ordered, values.popleft())]
        values.append(value)
        insort(ordered, value)
        if self.statistic == "mean":
            self.value = math.fsum(values) / len(values)
        else:
            half = len(ordered) // 2
            self.value = ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])

    def refill(self, values: Iterable[float]) -> None:
        """Forget everything, then push `values`, oldest first."""
        self.values.clear()
        self._sorted.clear()
        self.value = math.inf
        for value in values:
            self.push(value)

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value; there must be one."""
        return self._sorted[0], self._sorted[-1]


class Reward:
    """Turns an iteration's outcome into a number to maximise; None where the iteration teaches nothing.

    `paper` is TLT's Algorithm 1: tokens per second, (sum accepted / b + 1) * b / elapsed. Inside a bucket it mixes up
    arm and batch size: the arm that happened to run at the larger batches looks better.

    `relative` divides by the rate of plain decoding at the same batch size, which leaves the speed-up over plain
    decoding, accept_length * plain_s(b) / elapsed. plain_s(b), the seconds of a plain iteration, is learned: the median
    of the last 32 plain iterations at batch b. Between known batch sizes it is interpolated linearly, beyond them the
    nearest one's time holds (plain decoding is memory-bound there). While no plain iteration was seen at all, an
    iteration that speculated has no reward and a plain one has 1.

    Iterations that also prefilled, and those without a measured time, have no reward.

    >>> Reward("paper")(NO_SPECULATION, StepOutcome(elapsed_s=0.01, batch=4))
    400.0
    """

    def __init__(self, kind: RewardKind = "paper"):
        self.kind = kind
        self.learns_plain = kind == "relative"
        self._windows: dict[int, Window] = {}
        self._plain_s: dict[int, float] = {}
        self._batches: list[int] = []

    def __call__(self, strategy: Strategy, outcome: StepOutcome) -> float | None:
        if outcome.had_prefill or outcome.elapsed_s <= 0.0 or outcome.batch < 1:
            return None
        if self.kind == "paper":
            return outcome.accept_length * outcome.batch / outcome.elapsed_s
        if not self._batches:
            return None if strategy.speculates else 1.0
        return outcome.accept_length * self.plain_s(outcome.batch) / outcome.elapsed_s

    def learn(self, strategy: Strategy, outcome: StepOutcome) -> None:
        """Take a plain iteration's time, for rewards that learn plain times. Call it after the reward was taken."""
        if not (strategy.speculates or outcome.had_prefill) and outcome.elapsed_s > 0.0 and outcome.batch >= 1:
            self._push(outcome.batch, [outcome.elapsed_s])

    def plain_s(self, batch: int) -> float:
        """Seconds of a plain iteration at `batch`; at least one batch size must be known."""
        batches, plain_s = self._batches, self._plain_s
        i = bisect_left(batches, batch)
        if i == len(batches):
            return plain_s[batches[-1]]
        above = batches[i]
        if above == batch or i == 0:
            return plain_s[above]
        below = batches[i - 1]
        share = (batch - below) / (above - below)
        return (1.0 - share) * plain_s[below] + share * plain_s[above]

    def state_dict(self) -> Json:
        return {"plain_s": [[batch, list(self._windows[batch].values)] for batch in sorted(self._windows)]}

    def load_state_dict(self, state: Json) -> None:
        self._windows.clear()
        self._plain_s.clear()
        self._batches.clear()
        for batch, values in state["plain_s"]:
            self._push(batch, values)

    def _push(self, batch: int, values: Iterable[float]) -> None:
        window = self._windows.get(batch)
        if window is None:
            window = self._windows[batch] = Window(PLAIN_WINDOW)
            insort(self._batches, batch)
        for value in values:
            window.push(value)
        self._plain_s[batch] = window.value
