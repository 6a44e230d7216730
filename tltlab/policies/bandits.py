"""Bandits without buckets, the usual points of comparison for BEG-MAB, and Hedge, which sees what all drafters did."""

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
from .selector import Selector, refuse_other_arms, rng_state, set_rng_state
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
        # Checkpoints have had trees in another notation.
        refuse_other_arms([str(Strategy.parse(arm)) for arm in state["arms"]], [str(arm) for arm in self.strategies])
        self.order_ = deque(self.strategies[i] for i in state["order"])
        self.all_.refill(state["rewards"])
        for rewards in self.rewards_.values():
            rewards.clear()
        for arm, reward in zip(self.order_, state["rewards"], strict=True):
            self.rewards_[arm].append(reward)
        for arm in self.strategies:
            self._refresh(arm)
        self.reward_.load_state_dict(state["reward"])


class Hedge(Selector):
    """Exponential weights over drafters with full information (Not-a-Bandit / HedgeSpec, arXiv 2510.20064).

    What the target verified scores every drafter on the same text, so all learn from each iteration: drafter i loses
    l_i = 1 - accepted_i / deepest draft, and is drawn with weight exp(-eta sum l_i), eta = sqrt(8 ln N / t) in round t.
    Its expected loss exceeds the best drafter's by at most 2 sqrt(T ln N / 2) + sqrt(ln N / 8) after T rounds
    (Cesa-Bianchi and Lugosi 2006, theorem 2.3); the paper's own rate is not at hand. A caller that scores nothing
    (`StepOutcome.scored`) leaves it bandit feedback: the loss of what was drafted over its chance, as in Exp3.

    >>> hedge = Hedge([Strategy.chain(name, 4) for name in ("learned", "suffix")], rng=np.random.default_rng(0))
    >>> hedge.observe(hedge.strategies[0], StepOutcome(elapsed_s=0.01, batch=1, drafted=(4,), accepted=(1,),
    ...               scored={hedge.strategies[0]: 1.0, hedge.strategies[1]: 3.0}))
    >>> hedge.losses_, [round(p, 3) for p in hedge.chances]
    ([0.75, 0.25], [0.303, 0.697])
    """

    full_information = True

    def __init__(self, strategies: Sequence[Strategy], *, rng: np.random.Generator) -> None:
        self.strategies = checked_strategies(strategies)
        if not all(strategy.speculates for strategy in self.strategies):
            raise ConfigError("hedge: no speculation drafts nothing that could be scored: leave it out")
        self.rng = rng
        self.losses_ = [0.0] * len(self.strategies)
        self.rounds_ = 0

    @property
    def chances(self) -> list[float]:
        """With which each strategy is drawn next."""
        eta = math.sqrt(8.0 * math.log(len(self.strategies)) / (self.rounds_ + 1))
        least = min(self.losses_)
        weights = [math.exp(-eta * (loss - least)) for loss in self.losses_]
        return [weight / math.fsum(weights) for weight in weights]

    def choose(self, state: StepState) -> Strategy:
        chances = self.chances
        at = min(int(np.searchsorted(np.cumsum(chances), self.rng.random(), side="right")), len(chances) - 1)
        self.propensity_ = chances[at]
        return self.strategies[at]

    def observe(self, strategy: Strategy, outcome: StepOutcome) -> None:
        if strategy not in self.strategies:
            return
        deepest = max(arm.reach for arm in self.strategies)
        if outcome.scored:
            for at, arm in enumerate(self.strategies):
                self.losses_[at] += 1.0 - outcome.scored[arm] / deepest
        else:
            loss = 1.0 - (outcome.accept_length - 1.0) / deepest
            self.losses_[self.strategies.index(strategy)] += loss / self.propensity_
        self.rounds_ += 1

    def state_dict(self) -> dict[str, Any]:
        arms = [str(arm) for arm in self.strategies]
        return {"arms": arms, "losses": list(self.losses_), "rounds": self.rounds_, "rng": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; ConfigError when it belongs to other arms."""
        refuse_other_arms(state["arms"], [str(arm) for arm in self.strategies])
        self.losses_, self.rounds_ = list(state["losses"]), state["rounds"]
        set_rng_state(self.rng, state["rng"])
