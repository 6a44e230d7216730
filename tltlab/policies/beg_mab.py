"""BEG-MAB, the bucketed epsilon-greedy bandit of TLT (arXiv 2511.16665, section 5, Algorithm 1)."""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from tltlab.config import FiniteModel, InFile
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .reward import Reward, RewardKind, Statistic, Window
from .selector import Selector, StrategyField, as_tuples
from .simple import bucket_of, checked_strategies, checked_thresholds


class Bucket(FiniteModel):
    """`strategies` to choose from at batch sizes from `min_batch` up to the next bucket."""

    min_batch: int
    strategies: tuple[StrategyField, ...]


class BegMab(Selector, kind="beg-mab"):
    """The batch size picks a bucket of strategies; inside it, epsilon-greedy on the median of each arm's last rewards.

    `buckets` are (min_batch, strategies) with ascending min_batch t_i: bucket i holds batches t_i ... t_{i+1} - 1, the
    last one is open-ended, batches below t_1 use the first. In their place, `strategies` and `thresholds` give the
    paper's grouping (`paper_buckets`). `NO_SPECULATION` is an arm like any other. `epsilon` is the chance of a uniform
    pick within the bucket, `window` the number of rewards kept per arm, `reward` is explained in `Reward`.

    Rewards of an arm are pooled over all batch sizes of a bucket and filed under the bucket of the batch that ran; an
    outcome whose strategy is no arm there is dropped. An arm with fewer than `tries` rewards counts as best, ties go to
    the first in the list. The paper takes the median, and an arm once seen as it is. Where drafts are kept whole or not
    at all, medians can rank arms unlike their tokens per second; the `statistic` "mean" does not.
    With `reward="relative"` every bucket with a choice needs no speculation as an arm, and it is
    tried first there, since nothing else has a reward before.

    A chosen arm that worsens is noticed after window / 2 of its own iterations. Another one that improves is noticed
    only through exploration, after about window / 2 * |V| / epsilon: 4,500 iterations with three arms and the defaults.

    Algorithm 1 also keeps a window of accept lengths, which its choice never reads; it is left out here. We found no
    epsilon and no window in the paper: 0.1 and 300 are what the released code runs with.

    >>> deep, shallow = Strategy.chain("ngram", 8), Strategy.chain("ngram", 2)
    >>> bandit = BegMab([(1, [deep, shallow]), (9, [shallow, NO_SPECULATION])], rng=np.random.default_rng(0))
    >>> choice = bandit.choose(StepState(rl_step=0, batch=4))
    >>> str(choice.strategy), choice.bucket
    ('ngram:8', 0)
    """

    by_arm = True

    def __init__(
        self,
        buckets: Annotated[Sequence[tuple[int, Sequence[Strategy]]], InFile(tuple[Bucket, ...], as_tuples)] = (),
        strategies: Sequence[StrategyField] = (),
        thresholds: Sequence[int] = (),
        epsilon: float = 0.1,
        window: int = 300,
        reward: RewardKind = "paper",
        statistic: Statistic = "median",
        tries: int = 1,
        *,
        rng: np.random.Generator,
    ):
        if bool(buckets) == bool(strategies or thresholds):
            raise ConfigError("beg-mab takes either buckets, or strategies and thresholds")
        buckets = buckets or paper_buckets(strategies, thresholds)
        if not 0.0 <= epsilon <= 1.0:
            raise ConfigError(f"epsilon is a probability, between 0 and 1, got {epsilon}")
        if not 1 <= tries <= max(window, 1):
            raise ConfigError(f"tries must be at least 1 and at most the window, {window}, got {tries}")
        self.thresholds = checked_thresholds([min_batch for min_batch, _ in buckets])
        self.arms = tuple(checked_strategies(tuple(strategies)) for _, strategies in buckets)
        self.strategies = tuple(dict.fromkeys(arm for arms in self.arms for arm in arms))
        self.epsilon = epsilon
        self.window = window
        self.tries = tries
        self.rng = rng
        self.reward_ = Reward(reward)
        self.windows_ = tuple({arm: Window(window, statistic) for arm in arms} for arms in self.arms)
        self._choices = tuple(self._choices_of(bucket) for bucket in range(len(self.arms)))
        for min_batch, arms in zip(self.thresholds, self.arms, strict=True):
            if self.reward_.learns_plain and len(arms) > 1 and NO_SPECULATION not in arms:
                raise ConfigError(
                    f"reward 'relative' compares with plain decoding, but the bucket from batch {min_batch} has no "
                    f"such arm: add no speculation to {', '.join(map(str, arms))}"
                )

    def choose(self, state: StepState) -> Choice:
        bucket = bucket_of(self.thresholds, state.batch)
        explored, best = self._choices[bucket]
        if len(best) == 1:
            return best[0]
        at = greedy = self._best(bucket)
        if self.rng.random() < self.epsilon:
            at = int(self.rng.random() * len(best))
        return best[at] if at == greedy else explored[at]

    def _choices_of(self, bucket: int) -> tuple[list[Choice], list[Choice]]:
        """A bucket's arms where another one is best, and where each is best itself."""
        arms = self.arms[bucket]
        each = self.epsilon / len(arms)
        chances = (each, 1.0 if len(arms) == 1 else each + (1.0 - self.epsilon))
        explored, best = ([Choice(arm, chance, bucket) for arm in arms] for chance in chances)
        return explored, best

    def _best(self, bucket: int) -> int:
        if self.reward_.learns_plain and not self.windows_[bucket][NO_SPECULATION].values:
            return self.arms[bucket].index(NO_SPECULATION)
        best, most = 0, -math.inf
        for at, window in enumerate(self.windows_[bucket].values()):
            if len(window.values) < self.tries:
                return at
            if window.value > most:
                best, most = at, window.value
        return best

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        reward = self.reward_(choice.strategy, outcome)
        window = self.windows_[bucket_of(self.thresholds, outcome.batch)].get(choice.strategy)
        if window is not None and reward is not None:
            window.push(reward)
        if self.reward_.learns_plain:
            self.reward_.learn(choice.strategy, outcome)

    def reward(self, choice: Choice, outcome: StepOutcome) -> float | None:
        """The reward that `observe` would learn from this outcome; ask before `observe`."""
        return self.reward_(choice.strategy, outcome)

    def state_dict(self) -> Json:
        windows = [[list(window.values) for window in windows.values()] for windows in self.windows_]
        return super().state_dict() | {"windows": windows, "reward": self.reward_.state_dict()}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        for windows, rewards in zip(self.windows_, state["windows"], strict=True):
            for window, values in zip(windows.values(), rewards, strict=True):
                window.refill(values)
        self.reward_.load_state_dict(state["reward"])

    @property
    def arm_names(self) -> list[list[str]]:
        return [[str(arm) for arm in arms] for arms in self.arms]


def paper_buckets(strategies: Sequence[Strategy], thresholds: Sequence[int]) -> list[tuple[int, list[Strategy]]]:
    """Buckets as in the paper: strategies grouped by tokens_to_verify, most tokens to the smallest batches.

    There must be one threshold per group, else ConfigError. Chain drafts of different depth differ in
    tokens_to_verify, so this grouping leaves them one arm a bucket, and so nothing to choose.

    >>> trees = [Strategy("learned", 8, 4, 48), Strategy("learned", 6, 4, 48), Strategy("learned", 4, 4, 16)]
    >>> [(min_batch, len(arms)) for min_batch, arms in paper_buckets(trees, [1, 8])]
    [(1, 2), (8, 1)]
    """
    groups: dict[int, list[Strategy]] = {}
    for strategy in sorted(strategies, key=lambda s: -s.tokens_to_verify):
        groups.setdefault(strategy.tokens_to_verify, []).append(strategy)
    if len(groups) != len(thresholds):
        raise ConfigError(
            f"each distinct tokens_to_verify needs one batch threshold: got {len(groups)} of the former "
            f"({', '.join(map(str, groups))}) and {len(thresholds)} of the latter "
            f"({', '.join(map(str, thresholds))})"
        )
    return list(zip(thresholds, groups.values(), strict=True))
