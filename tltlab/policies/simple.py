"""Selectors that do not learn: no speculation, one strategy, a table over batch sizes, and blind exploration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tltlab.errors import ConfigError
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector, rng_state, set_rng_state


class NoSpeculation(Selector):
    """Plain decoding, always."""

    strategies = (NO_SPECULATION,)
    memoryless = True

    def choose(self, state: StepState) -> Strategy:
        return NO_SPECULATION


class Fixed(Selector):
    """One strategy, always."""

    memoryless = True

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.strategies = (strategy,)

    def choose(self, state: StepState) -> Strategy:
        return self.strategy


class BatchTable(Selector):
    """A strategy for each range of batch sizes.

    `rows` are (min_batch, strategy) with ascending min_batch: row i holds for min_batch_i <= batch < min_batch_{i+1},
    the last one for all larger batches, the first one also for batches below it. The map that TLT's default settings
    amount to is such a table, since each of its buckets holds one strategy.

    >>> table = BatchTable([(1, Strategy.chain("ngram", 8)), (5, Strategy.chain("ngram", 2)), (33, NO_SPECULATION)])
    >>> str(table.choose(StepState(rl_step=0, batch=20)))
    'ngram:2'
    """

    memoryless = True

    def __init__(self, rows: Sequence[tuple[int, Strategy]]) -> None:
        self.thresholds = checked_thresholds([min_batch for min_batch, _ in rows])
        self.rows = tuple(strategy for _, strategy in rows)
        self.strategies = tuple(dict.fromkeys(self.rows))

    def choose(self, state: StepState) -> Strategy:
        self.bucket_ = bucket_of(self.thresholds, state.batch)
        return self.rows[self.bucket_]


class Explore(Selector):
    """Picks uniformly at random and holds the pick for `hold_iterations`: data for off-policy evaluation and for fits.

    A block longer than one iteration lets drafter caches and queued work settle. The propensity is 1/n throughout a
    block: the chance that this block got this strategy.
    """

    def __init__(self, strategies: Sequence[Strategy], hold_iterations: int = 20, *, rng: np.random.Generator) -> None:
        self.strategies = checked_strategies(strategies)
        if hold_iterations < 1:
            raise ConfigError(f"explore: hold_iterations must be at least 1, got {hold_iterations}")
        self.hold_iterations = hold_iterations
        self.rng = rng
        self.current_ = 0
        self.left_ = 0
        self.propensity_ = 1.0 / len(self.strategies)

    def choose(self, state: StepState) -> Strategy:
        if self.left_ == 0:
            self.current_ = int(self.rng.random() * len(self.strategies))
            self.left_ = self.hold_iterations
        self.left_ -= 1
        return self.strategies[self.current_]

    def state_dict(self) -> dict[str, Any]:
        return {"current": self.current_, "left": self.left_, "rng": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_ = state["current"]
        self.left_ = state["left"]
        set_rng_state(self.rng, state["rng"])


def bucket_of(thresholds: Sequence[int], batch: int) -> int:
    """Index of the bucket that holds `batch`: [t_i, t_{i+1} - 1], the last one open-ended, the first one down to 0.

    >>> [bucket_of((2, 5, 21), batch) for batch in (1, 2, 4, 5, 20, 21, 4096)]
    [0, 0, 0, 1, 1, 2, 2]
    """
    return max(bisect_right(thresholds, batch) - 1, 0)


def checked_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    """The thresholds as a tuple; ConfigError unless there is one and they are positive and ascend strictly."""
    if not thresholds:
        raise ConfigError("no batch ranges given: at least one (min_batch, ...) is needed")
    if thresholds[0] < 1 or any(a >= b for a, b in pairwise(thresholds)):
        raise ConfigError(f"min_batch must be at least 1 and ascend strictly, got {', '.join(map(str, thresholds))}")
    return tuple(thresholds)


def checked_strategies(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """The strategies as a tuple; ConfigError when there is none or one occurs twice."""
    if not strategies:
        raise ConfigError("no strategies given: at least one is needed, no speculation counts as one")
    repeated = [str(s) for i, s in enumerate(strategies) if s in strategies[:i]]
    if repeated:
        raise ConfigError(f"strategy {repeated[0]} is given twice in {', '.join(map(str, strategies))}")
    return tuple(strategies)
