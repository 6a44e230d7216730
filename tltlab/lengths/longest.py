"""The longest response of another RL step by a fitted tail, with its prediction interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tltlab.arrays import Floats

from .model import LengthModel

LEVEL = 0.9
_NORMAL = NormalDist()
_SCORES = np.linspace(-9.0, 9.0, 9001)
_FAR = 5.0


@dataclass(frozen=True, kw_only=True)
class Longest:
    """Tokens of the longest of `num_responses` in another RL step: the median, and the ends of the `level` interval.

    The interval has the chance of that step's draws, the variation between the `num_steps` RL steps that the law was
    fitted to, and the error of its tail. No end is beyond the cap.
    """

    num_responses: int
    num_steps: int
    level: float
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"longest of {self.num_responses} responses in another RL step: {self.median:.0f} tokens, {self.level:.0%} "
            f"prediction interval {self.low:.0f} to {self.high:.0f}"
        )


@dataclass(frozen=True, kw_only=True)
class Makespan:
    """Seconds of another RL step's rollout: the median, and the ends of the `level` prediction interval."""

    num_steps: int
    level: float
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"makespan of another RL step: {self.median:.4g} s, {self.level:.0%} prediction interval {self.low:.4g} to "
            f"{self.high:.4g} s"
        )


def makespan(steps: Sequence[tuple[Floats, Floats, float]], ahead: Longest) -> Makespan | None:
    """Predict the makespan of another RL step from `steps`: tokens and ends of their responses, and their makespans.

    In the tail a response's end is straight in its tokens, with the slope of the longest eighth of each RL step. The
    longest response of another RL step adds its tokens times the slope to what precedes it, whose variation between
    the RL steps is added in quadrature. None where no RL step has times, or times do not rise with tokens.

    >>> ahead = Longest(num_responses=2, num_steps=2, level=0.9, median=300.0, low=200.0, high=500.0)
    >>> seen = [(np.array([100.0, most]), np.array([2.0, most / 100 + 1]), most / 100 + 1) for most in (200.0, 400.0)]
    >>> print(makespan(seen, ahead))
    makespan of another RL step: 4 s, 90% prediction interval 3 to 6 s
    """
    tokens_off, ends_off = [], []
    for tokens, ends, _ in steps:
        last = np.argsort(tokens)[-max(2, len(tokens) // 8) :]
        tokens_off.append(tokens[last] - tokens[last].mean())
        ends_off.append(ends[last] - ends[last].mean())
    off = np.concatenate([*tokens_off, np.zeros(0)])
    squares = float(off @ off)
    slope = float(off @ np.concatenate(ends_off)) / squares if squares > 0 else 0.0
    if slope <= 0:
        return None
    before = np.array([seconds - slope * tokens.max() for tokens, _, seconds in steps])
    spread = _NORMAL.inv_cdf((1 + ahead.level) / 2) * (float(before.std(ddof=1)) if len(before) > 1 else 0.0)
    median, low, high = (float(before.mean()) + slope * tokens for tokens in (ahead.median, ahead.low, ahead.high))
    return Makespan(
        num_steps=len(steps),
        level=ahead.level,
        median=median,
        low=max(0.0, median - math.hypot(median - low, spread)),
        high=median + math.hypot(high - median, spread),
    )


def step_score(law: LengthModel, tokens: float, num_responses: int, rl_step: int = 0, *, cut: bool = False) -> float:
    """Standard normal score of an RL step's longest response: 0 where the law's median maximum is met.

    The chance, under the law, that the longest of `num_responses` independent responses is no longer, as a score. The
    score of a response that was `cut` is the mean of the scores beyond.
    """
    from scipy.special import log_ndtr

    reached = np.searchsorted(law.log_tokens(_SCORES, rl_step), math.log(tokens))
    log_chance = num_responses * float(log_ndtr(_SCORES[min(int(reached), len(_SCORES) - 1)]))
    chance = min(max(math.exp(max(log_chance, -700.0)), 1e-300), 1 - 1e-12)
    score = min(max(_NORMAL.inv_cdf(chance), -_FAR), _FAR)
    return min(_NORMAL.pdf(score) / (1 - _NORMAL.cdf(score)), _FAR) if cut else score


def longest(law: LengthModel, num_responses: int, *, rl_step: int = 0) -> Longest:
    """Predict the longest of `num_responses` in another RL step.

    The predictive distribution is Student's over scores. `law.step_scores` has the score of each RL step that the law
    was fitted to; with k of them and one step of mean 0 and variance 1 in advance, which is the law taken at its word,
    there are k + 1 degrees of freedom, and the mean's error adds 1 / (k + 1) of the variance. The error of the tail's
    shape adds the square of what it moves. Without such scores the interval is the law's own and that error.

    >>> from tltlab.lengths.model import LengthModel
    >>> law = LengthModel(quantiles=((0.5, 800), (0.9, 3200)), prompt_share=0.1, max_response_tokens=16384)
    >>> print(longest(law, 512))
    longest of 512 responses in another RL step: 16384 tokens, 90% prediction interval 12244 to 16384
    """
    mean, variance, freedom = _spread(law.step_scores)
    center = _length_at(law, mean, num_responses, rl_step)
    variance += _tail_variance(law, center, num_responses, rl_step)
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) if freedom else _NORMAL.inv_cdf((1 + LEVEL) / 2)
    ends = (mean - half * math.sqrt(variance), mean, mean + half * math.sqrt(variance))
    low, median, high = (_length_at(law, score, num_responses, rl_step) for score in ends)
    return Longest(
        num_responses=num_responses, num_steps=len(law.step_scores), level=LEVEL, low=low, median=median, high=high
    )


def _spread(scores: Sequence[float]) -> tuple[float, float, int]:
    """Mean, variance of another score and degrees of freedom; 0 of them is a normal distribution."""
    num = len(scores)
    if not num:
        return 0.0, 1.0, 0
    mean = sum(scores) / (num + 1)
    squares = sum((score - mean) ** 2 for score in scores) + mean**2
    return mean, (1 + squares) / (num + 1) * (1 + 1 / (num + 1)), num + 1


def _tail_variance(law: LengthModel, tokens: float, num_responses: int, rl_step: int) -> float:
    """Squared score by which the median maximum moves when the tail's shape is off by its standard error."""
    tail = law.tail
    if tail is None or not tail.shape_error or tokens >= law.max_response_tokens:
        return 0.0
    moved = []
    for error in (-tail.shape_error, tail.shape_error):
        # Shape and scale are estimated together: correlation of their errors as Smith (1987) has it.
        new = {"shape": min(tail.shape + error, 0.99), "scale": tail.scale * math.exp(-error / (1 + tail.shape))}
        other = law.model_copy(update={"tail": tail.model_copy(update=new)})
        moved.append(step_score(other, tokens, num_responses, rl_step))
    return ((moved[1] - moved[0]) / 2) ** 2


def _length_at(law: LengthModel, score: float, num_responses: int, rl_step: int) -> float:
    """Tokens, cut at the cap, of the longest response at a score of the RL step."""
    from scipy.special import log_ndtr

    beyond = -math.expm1(float(log_ndtr(score)) / num_responses)
    own = -_NORMAL.inv_cdf(beyond) if beyond < 1 - 1e-15 else -_FAR
    logs: Floats = law.log_tokens(np.array([own]), rl_step)
    cap = float(law.max_response_tokens)
    return min(math.exp(min(max(float(logs[0]), 0.0), math.log(cap))), cap)
