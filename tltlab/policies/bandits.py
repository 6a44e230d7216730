"""Bandits without buckets, the usual points of comparison for BEG-MAB."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tltlab.errors import ConfigError
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .beg_mab import BegMab
from .reward import Reward, RewardKind, Statistic, Window
from .selector import Selector
from .simple import checked_strategies


class EpsilonGreedy(BegMab):
    """Epsilon-greedy over one set of strategies at all batch sizes: BEG-MAB with a single bucket.

    `statistic` summarises an arm's last `window` rewards. With one bucket the paper's reward (tokens per second) says
    more about the batch size than about the arm; `relative` does not.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        epsilon: float = 0.1,
        window: int = 300,
        reward: RewardKind = "paper",
        plain_rate: Mapping[int, float] | None = None,
        statistic: Statistic = "mean",
        *,
        rng: np.random.Generator,
    ) -> None:
        super().__init__([(1, strategies)], epsilon, window, reward, plain_rate, statistic, rng=rng)


class Ucb1(Selector):
    """UCB1 over the last `window` rewards: the arm with the highest mean + bonus, no randomness.

    The bonus is exploration * spread * sqrt(2 ln N / n) for an arm with n of the N rewards in the window. UCB1 (Auer,
    Cesa-Bianchi and Fischer 2002, figure 1) assumes rewards in [0, 1]; for rewards that span another range Hoeffding's
    bound scales with that range, hence `spread`, the largest minus the smallest reward in the window. Added to raw
    tokens per second, which run into the thousands, the unscaled bonus of about 1 would never change a choice. One
    window over all arms makes it follow drift (Garivier and Moulines 2011, SW-UCB): an arm that drops out of it counts
    as unseen and is tried again. Unseen arms first, ties to the first in the list; with a learned plain rate
    (see `Reward`) no speculation goes before the other unseen arms.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        exploration: float = 1.0,
        window: int = 300,
        reward: RewardKind = "paper",
        plain_rate: Mapping[int, float] | None = None,
    ) -> None:
        self.strategies = checked_strategies(strategies)
        if not 0.0 <= exploration < math.inf:
            raise ConfigError(f"ucb1: exploration must be a number from 0 up, got {exploration}")
        self.exploration = exploration
        self.reward_ = Reward(reward, plain_rate)
        if self.reward_.learns_plain and len(self.strategies) > 1 and NO_SPECULATION not in self.strategies:
            raise ConfigError(
                f"reward 'relative' compares with plain decoding: add no speculation to "
                f"{', '.join(map(str, self.strategies))}, or give plain_rate"
            )
        self.all_ = Window(window)
        self.order_: deque[Strategy] = deque()
        self.rewards_: dict[Strategy, deque[float]] = {arm: deque() for arm in self.strategies}
        self.mean_ = dict.fromkeys(self.strategies, math.inf)
        self.bucket_ = 0

    def choose(self, state: StepState) -> Strategy:
        if self.reward_.learns_plain and len(self.strategies) > 1 and not self.rewards_[NO_SPECULATION]:
            return NO_SPECULATION
        scale = self.exploration * self.all_.spread * math.sqrt(2.0 * math.log(max(len(self.order_), 1)))
        return max(self.strategies, key=lambda arm: self._score(arm, scale))

    def _score(self, arm: Strategy, scale: float) -> float:
        count = len(self.rewards_[arm])
        return self.mean_[arm] + scale / math.sqrt(count) if count else math.inf

    def observe(self, strategy: Strategy, outcome: StepOutcome) -> None:
        reward = self.reward_(strategy, outcome)
        if reward is not None and strategy in self.rewards_:
            self._push(strategy, reward)
        self.reward_.learn(strategy, outcome)

    def _push(self, arm: Strategy, reward: float) -> None:
        if len(self.order_) == self.all_.size:
            oldest = self.order_.popleft()
            self.rewards_[oldest].popleft()
            self._refresh(oldest)
        self.order_.append(arm)
        self.all_.push(reward)
        self.rewards_[arm].append(reward)
        self._refresh(arm)

    def _refresh(self, arm: Strategy) -> None:
        rewards = self.rewards_[arm]
        self.mean_[arm] = math.fsum(rewards) / len(rewards) if rewards else math.inf

    def reward(self, strategy: Strategy, outcome: StepOutcome) -> float | None:
        """The reward that `observe` would learn from this outcome; ask before `observe`."""
        return self.reward_(strategy, outcome)

    def state_dict(self) -> dict[str, Any]:
        index = {arm: i for i, arm in enumerate(self.strategies)}
        return {
            "arms": [str(arm) for arm in self.strategies],
            "order": [index[arm] for arm in self.order_],
            "rewards": list(self.all_.values),
            "reward": self.reward_.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; ConfigError when it belongs to other arms."""
        names = [str(arm) for arm in self.strategies]
        # Checkpoints have had trees in another notation.
        if [str(Strategy.parse(arm)) for arm in state["arms"]] != names:
            raise ConfigError(f"the saved state has the arms {state['arms']}, this policy has {names}")
        self.order_ = deque(self.strategies[i] for i in state["order"])
        self.all_.refill(state["rewards"])
        for rewards in self.rewards_.values():
            rewards.clear()
        for arm, reward in zip(self.order_, state["rewards"], strict=True):
            self.rewards_[arm].append(reward)
        for arm in self.strategies:
            self._refresh(arm)
        self.reward_.load_state_dict(state["reward"])
