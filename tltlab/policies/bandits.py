"""Bandits without buckets, the usual points of comparison for BEG-MAB, and Hedge over drafters."""

import math
from collections.abc import Sequence

import numpy as np

from tltlab.errors import ConfigError
from tltlab.state import Choice, StepOutcome, StepState

from .beg_mab import BegMab
from .reward import RewardKind, Statistic
from .selector import Selector, StrategyField
from .simple import checked_strategies


class EpsilonGreedy(BegMab, kind="epsilon-greedy"):
    """Epsilon-greedy over one set of strategies at all batch sizes: BEG-MAB with a single bucket.

    `statistic` summarises an arm's last `window` rewards. With one bucket the paper's reward (tokens per second)
    depends more on the batch size than on the arm; `relative` does not.
    """

    def __init__(
        self,
        strategies: Sequence[StrategyField],
        epsilon: float = 0.1,
        window: int = 300,
        reward: RewardKind = "paper",
        statistic: Statistic = "mean",
        *,
        rng: np.random.Generator,
    ):
        super().__init__([(1, strategies)], (), (), epsilon, window, reward, statistic, rng=rng)


class Ucb1(EpsilonGreedy, kind="ucb1"):
    """UCB1 over each arm's last `window` rewards: the arm with the highest mean + bonus, no randomness.

    The bonus is exploration * spread * sqrt(2 ln N / n) for an arm with n rewards in its window, after N of all arms.
    UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1) assumes rewards in [0, 1]; for rewards that span another range
    Hoeffding's bound scales with that range, hence `spread`, the largest minus the smallest reward in the windows.
    Added to raw tokens per second, which run into the thousands, the unscaled bonus of about 1 would never change a
    choice. An arm that worsens is noticed within its own window; one that improves when its bonus has grown enough.
    Unseen arms first, ties to the first in the list; with relative rewards (see `Reward`) no speculation goes before
    the other unseen arms.
    """

    state_names = ("rounds_",)

    def __init__(
        self,
        strategies: Sequence[StrategyField],
        exploration: float = 1.0,
        window: int = 300,
        reward: RewardKind = "paper",
    ):
        if not 0.0 <= exploration < math.inf:
            raise ConfigError(f"ucb1: exploration must be a number from 0 up, got {exploration}")
        super().__init__(strategies, 0.0, window, reward, rng=np.random.default_rng(0))
        self.exploration = exploration
        self.rounds_ = 0

    def _best(self, bucket: int) -> int:
        windows = list(self.windows_[bucket].values())
        if not windows[best := super()._best(bucket)].values:
            return best
        lows, highs = zip(*(window.range for window in windows), strict=True)
        scale = self.exploration * (max(highs) - min(lows)) * math.sqrt(2.0 * math.log(max(self.rounds_, 1)))
        bounds = [window.value + scale / math.sqrt(len(window.values)) for window in windows]
        return bounds.index(max(bounds))

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        self.rounds_ += choice.strategy in self.strategies and self.reward(choice, outcome) is not None
        super().observe(choice, outcome)


class Hedge(Selector, kind="hedge"):
    """Exponential weights over drafters (Not-a-Bandit / HedgeSpec, arXiv 2510.20064), with bandit feedback.

    The paper scores every drafter on the verified text. Engines report the drafter that drafted, so only that one
    learns: it loses (1 - accepted / deepest draft) / propensity, an unbiased estimate as in Exp3 (Auer et al. 2002).
    Drafter i is drawn with weight exp(-eta * its losses), eta = sqrt(8 ln N / t) in round t.

    >>> from tltlab.strategy import Strategy
    >>> hedge = Hedge([Strategy.chain(name, 4) for name in ("learned", "suffix")], rng=np.random.default_rng(0))
    >>> chosen = hedge.choose(StepState(rl_step=0, batch=1))
    >>> hedge.observe(chosen, StepOutcome(elapsed_s=0.01, batch=1, drafted=(4,), accepted=(1,)))
    >>> hedge.losses_
    [0.0, 1.5]
    """

    state_names = ("losses_", "rounds_")
    by_arm = True

    def __init__(self, strategies: Sequence[StrategyField], *, rng: np.random.Generator):
        self.strategies = checked_strategies(strategies)
        if not all(strategy.speculates for strategy in self.strategies):
            raise ConfigError("hedge: no speculation drafts nothing: leave it out")
        self.rng = rng
        self.losses_ = [0.0] * len(self.strategies)
        self.rounds_ = 0

    @property
    def chances(self) -> list[float]:
        """Probability of each strategy in the next draw."""
        eta = math.sqrt(8.0 * math.log(len(self.strategies)) / (self.rounds_ + 1))
        least = min(self.losses_)
        weights = [math.exp(-eta * (loss - least)) for loss in self.losses_]
        return [weight / math.fsum(weights) for weight in weights]

    def choose(self, state: StepState) -> Choice:
        chances = self.chances
        at = min(int(np.searchsorted(np.cumsum(chances), self.rng.random(), side="right")), len(chances) - 1)
        return Choice(self.strategies[at], chances[at])

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        if choice.strategy not in self.strategies:
            return
        loss = 1.0 - (outcome.accept_length - 1.0) / max(arm.reach for arm in self.strategies)
        self.losses_[self.strategies.index(choice.strategy)] += loss / choice.propensity
        self.rounds_ += 1
