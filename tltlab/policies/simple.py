"""Selectors without rewards: no speculation, one strategy, a table over batch sizes, a ladder, blind exploration."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import numpy as np

from tltlab.config import FiniteModel, InFile
from tltlab.errors import ConfigError
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector, StrategyField, as_tuples

_SLACK = 0.5
"""Tokens by which an average may fall short of a whole draft that still counts as kept."""


class NoSpeculation(Selector, kind="none"):
    """Plain decoding, always."""

    strategies = (NO_SPECULATION,)
    memoryless = True

    def choose(self, state: StepState) -> Strategy:
        return NO_SPECULATION


class Fixed(Selector, kind="fixed"):
    """One strategy, always."""

    memoryless = True

    def __init__(self, strategy: StrategyField):
        self.strategy = strategy
        self.strategies = (strategy,)

    def choose(self, state: StepState) -> Strategy:
        return self.strategy


class TableRow(FiniteModel):
    """`strategy` from `min_batch` requests up to the next row."""

    min_batch: int
    strategy: StrategyField


class BatchTable(Selector, kind="table"):
    """A strategy for each range of batch sizes.

    `rows` are (min_batch, strategy) with ascending min_batch: row i holds for min_batch_i <= batch < min_batch_{i+1},
    the last one for all larger batches, the first one also for batches below it. The map that TLT's default settings
    amount to is such a table, since each of its buckets holds one strategy.

    >>> table = BatchTable([(1, Strategy.chain("ngram", 8)), (5, Strategy.chain("ngram", 2)), (33, NO_SPECULATION)])
    >>> str(table.choose(StepState(rl_step=0, batch=20)).strategy)
    'ngram:2'
    """

    memoryless = True

    def __init__(self, rows: Annotated[Sequence[tuple[int, Strategy]], InFile(tuple[TableRow, ...], as_tuples)]):
        self.thresholds = checked_thresholds([min_batch for min_batch, _ in rows])
        self.rows = tuple(strategy for _, strategy in rows)
        self.strategies = tuple(dict.fromkeys(self.rows))
        least = (0, *self.thresholds[1:])
        self._choices = tuple(
            Choice(row, bucket=i, learns=False, stays=True, least_batch=least[i]) for i, row in enumerate(self.rows)
        )

    def choose(self, state: StepState) -> Choice:
        return self._choices[bucket_of(self.thresholds, state.batch)]


class AcceptLadder(Selector, kind="ladder"):
    """Drafts deeper while drafts are kept, shallower while they are not: a step up or down at a time.

    `strategies` ascend in draft depth; the first is where it starts. a is an exponential average of the accepted tokens
    per draft, each iteration with weight `ema`. After `warmup` iterations, and every `hold` after that, it climbs where
    a > depth - 0.5 and descends where a <= depth of the rung below - 0.5 - `hysteresis`. Outcomes of another
    rung than the current one, chosen before the last step, count for nothing.

    >>> ladder = AcceptLadder([Strategy.chain("learned", d) for d in (1, 3)], ema=1.0, warmup=1, hold=1)
    >>> for accepted in (1.0, 3.0, 0.0):
    ...     chosen = ladder.choose(StepState(rl_step=0, batch=1))
    ...     ladder.observe(Choice(chosen), StepOutcome(elapsed_s=0.01, batch=1, drafted=(3,), accepted=(accepted,)))
    ...     print(chosen)
    learned:1
    learned:3
    learned:3
    >>> str(ladder.choose(StepState(rl_step=0, batch=1)))
    'learned:1'
    """

    state_names = ("ladder_step_", "left_", "average_")

    def __init__(
        self,
        strategies: Sequence[StrategyField],
        ema: float = 0.2,
        warmup: int = 10,
        hold: int = 5,
        hysteresis: float = 0.25,
    ):
        self.strategies = checked_strategies(strategies)
        depths = [s.draft_depth for s in self.strategies]
        if any(a >= b for a, b in pairwise(depths)):
            raise ConfigError(f"ladder: draft depths must ascend strictly, got {', '.join(map(str, depths))}")
        if not 0.0 < ema <= 1.0 or warmup < 1 or hold < 1 or hysteresis < 0:
            raise ConfigError(
                f"ladder: ema must be in (0, 1], warmup and hold at least 1, hysteresis at least 0, got {ema}, "
                f"{warmup}, {hold} and {hysteresis}"
            )
        self.ema, self.warmup, self.hold = ema, warmup, hold
        self.hysteresis = hysteresis
        self.ladder_step_ = 0
        self.left_ = warmup
        self.average_: float | None = None

    def choose(self, state: StepState) -> Strategy:
        return self.strategies[self.ladder_step_]

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        if choice.strategy != self.strategies[self.ladder_step_] or outcome.batch < 1:
            return
        accepted = outcome.accept_length - 1.0
        before = accepted if self.average_ is None else self.average_
        self.average_ = before + self.ema * (accepted - before)
        self.left_ -= 1
        if self.left_ > 0:
            return
        self.left_ = self.hold
        depths = [s.draft_depth for s in self.strategies]
        if self.average_ > depths[self.ladder_step_] - _SLACK and self.ladder_step_ + 1 < len(depths):
            self.ladder_step_ += 1
        elif self.ladder_step_ and self.average_ <= depths[self.ladder_step_ - 1] - _SLACK - self.hysteresis:
            self.ladder_step_ -= 1


class Explore(Selector, kind="explore"):
    """Picks uniformly at random and holds the pick for `hold_iterations`: data for fits and off-policy estimates.

    A block longer than one iteration lets drafter caches and queued work settle. The propensity is 1/n throughout a
    block: the chance that this block got this strategy.
    """

    state_names = ("current_", "left_")

    def __init__(self, strategies: Sequence[StrategyField], hold_iterations: int = 20, *, rng: np.random.Generator):
        self.strategies = checked_strategies(strategies)
        if hold_iterations < 1:
            raise ConfigError(f"explore: hold_iterations must be at least 1, got {hold_iterations}")
        self.hold_iterations = hold_iterations
        self.rng = rng
        self.current_ = 0
        self.left_ = 0

    def choose(self, state: StepState) -> Choice:
        if self.left_ == 0:
            self.current_ = int(self.rng.random() * len(self.strategies))
            self.left_ = self.hold_iterations
        self.left_ -= 1
        return Choice(self.strategies[self.current_], 1.0 / len(self.strategies))


def bucket_of(thresholds: Sequence[int], batch: int) -> int:
    """Index of the bucket that holds `batch`: [t_i, t_{i+1} - 1], the last one open-ended, the first one down to 0.

    >>> [bucket_of((2, 5, 21), batch) for batch in (1, 2, 4, 5, 20, 21, 4096)]
    [0, 0, 0, 1, 1, 2, 2]
    """
    above = bisect_right(thresholds, batch)
    return above - 1 if above else 0


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
