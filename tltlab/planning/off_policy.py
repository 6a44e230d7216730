"""Off-policy evaluation: another policy's mean reward, from the decisions that one policy logged with their chances.

With weights w_i = pi(a_i | s_i) / propensity_i over n logged decisions:

    ips    sum(w r) / n                      Horvitz and Thompson 1952: unbiased, of high variance
    snips  sum(w r) / sum(w)                 Swaminathan and Joachims 2015: self-normalised, slightly biased, calmer
    dr     mean(q(s, pi) + w (r - q(s, a)))  Dudik et al. 2014: unbiased, and calm where the reward model q is good

What is estimated is the mean reward of a decision in the states that the log met and in which the logging policy chose
at random. It is no forecast of a rollout's time: a policy that changes which batch sizes come up meets other states.
Where the logging policy had no choice, nothing can be said about any other; those decisions are left out and counted.

Decisions in a row share drafters, prompts and the held choice, so intervals come from resampling whole clusters of RL
step and worker, with Hesterberg's (2015) widening for few of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import norm

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.policies.policy import PolicySource, load_policy
from tltlab.policies.reward import RewardKind
from tltlab.stats import student_margin
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace, read

from .decisions import Logged, logged_decisions
from .targets import Chances, chances

NUM_FOLDS = 5
MIN_ESS_SHARE = 0.05
MAX_UNCOVERED_SHARE = 0.05
MIN_CLUSTERS = 8
CERTAIN = 0.999
MAX_WEIGHT_SHARE = 0.05
MAX_ALIKE_SHARE = 0.8
MIN_ALIKE = 50
MIN_CELL = 5
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimator's mean reward and its interval; NaN where nothing logged could be used."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the log says about a policy.

    `estimates` are by estimator, `logged` is the logging policy's own mean reward on the same decisions. `effective` is
    Kish's effective sample size, sum(w)^2 / sum(w^2); `uncovered_share` the policy's probability on strategies that the
    log never tried at such batch sizes; `mean_weight` is near 1 where the log covers the policy. `warnings` say why not
    to trust the estimates.
    """

    estimates: dict[str, Estimate]
    logged: Estimate
    num_decisions: int
    num_without_choice: int
    num_clusters: int
    effective: float
    mean_weight: float
    max_weight_share: float
    uncovered_share: float
    level: float
    warnings: tuple[str, ...]


def evaluate(
    trace: str | Path | Trace,
    policy: PolicySource,
    *,
    reward: RewardKind = "relative",
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Evaluation:
    """Estimate a policy's mean reward from a trace's decisions; they are given as `load_policy` and `read` take them.

    `reward` is `relative`, the speed-up over plain decoding at the same batch, or `paper`, tokens per second. Raises
    ConfigError where the log chose nothing at random and where the policy cannot be evaluated from a log.
    """
    everything, _ = logged_decisions(read(trace), reward)
    folds = folds_of(everything)
    pi = chances(load_policy(policy), everything, folds)
    return estimate(everything, pi, folds, level=level, num_resamples=num_resamples, rng=np.random.default_rng(seed))


def folds_of(log: Sequence[Logged]) -> list[int]:
    """The fold of each decision: whole RL steps, or whole workers' where there is one RL step only."""
    several = len({d.state.rl_step for d in log}) > 1
    keys = [d.state.rl_step if several else d.state.worker for d in log]
    number = {key: i % NUM_FOLDS for i, key in enumerate(sorted(set(keys)))}
    return [number[key] for key in keys]


def estimate(
    log: Sequence[Logged],
    pi: Sequence[Chances],
    folds: Sequence[int],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    rng: np.random.Generator,
) -> Evaluation:
    """The three estimates from decisions and the policy's chances `pi` in their states.

    The reward model predicts each fold from the others, so that no decision's own reward helps to predict it.
    """
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level is a probability between 0 and 1, got {level}")
    chosen = [i for i, d in enumerate(log) if d.at_random]
    if not chosen:
        raise ConfigError(
            "the log's policy chose nothing at random (every propensity is 1), so it says nothing about others: "
            "record with the policy 'explore', or a bandit with epsilon > 0"
        )
    rewards = np.array([log[i].reward for i in chosen])
    probabilities = np.array([pi[i].get(log[i].strategy, 0.0) for i in chosen])
    weights = probabilities / np.array([log[i].propensity for i in chosen])
    of_policy, of_logged = _predicted(log, pi, folds, chosen)
    cluster = _clusters([log[i] for i in chosen])
    ones = np.ones(len(chosen))
    sums = {
        "ips": (weights * rewards, ones),
        "snips": (weights * rewards, weights),
        "dr": (of_policy + weights * (rewards - of_logged), ones),
        "logged": (rewards, ones),
    }
    num_clusters = int(cluster.max()) + 1
    counts = rng.multinomial(num_clusters, np.full(num_clusters, 1.0 / num_clusters), size=num_resamples)
    intervals = {
        name: _interval(_summed(cluster, top), _summed(cluster, bottom), counts, level)
        for name, (top, bottom) in sums.items()
    }
    # Correct chances must hardly ever be called wrong.
    weight = _interval(_summed(cluster, weights), _summed(cluster, ones), counts, CERTAIN)
    total, squares = float(weights.sum()), float((weights**2).sum())
    evaluation = Evaluation(
        logged=intervals.pop("logged"),
        estimates=intervals,
        num_decisions=len(chosen),
        num_without_choice=len(log) - len(chosen),
        num_clusters=num_clusters,
        effective=total**2 / squares if squares else 0.0,
        mean_weight=total / len(chosen),
        max_weight_share=float(weights.max()) / total if total else 0.0,
        uncovered_share=_uncovered([log[i] for i in chosen], [pi[i] for i in chosen]),
        level=level,
        warnings=(),
    )
    return _warned(evaluation, weight, _alike([log[i] for i in chosen]))


def _predicted(
    log: Sequence[Logged], pi: Sequence[Chances], folds: Sequence[int], chosen: Sequence[int]
) -> tuple[Floats, Floats]:
    """q(s, pi) and q(s, a) of the chosen decisions, each from the mean rewards of the other folds."""
    if len(set(folds)) == 1:
        raise ConfigError("the log has one worker in one RL step: a reward model needs others to learn from")
    means = {fold: _means([d for d, of in zip(log, folds, strict=True) if of != fold]) for fold in set(folds)}

    def q(i: int, strategy: Strategy) -> float:
        by_cell, band = means[folds[i]], _band(log[i].state.batch)
        return by_cell.get((band, strategy), by_cell.get((band, None), 0.0))

    of_policy = [math.fsum(chance * q(i, strategy) for strategy, chance in pi[i].items()) for i in chosen]
    return np.array(of_policy), np.array([q(i, log[i].strategy) for i in chosen])


def _means(log: Sequence[Logged]) -> dict[tuple[int, Strategy | None], float]:
    """The mean reward by band of batch sizes and strategy (None: of all there), where enough decisions tell it."""
    rewards: dict[tuple[int, Strategy | None], list[float]] = {}
    for d in log:
        for strategy in (d.strategy, None):
            rewards.setdefault((_band(d.state.batch), strategy), []).append(d.reward)
    return {cell: math.fsum(values) / len(values) for cell, values in rewards.items() if len(values) >= MIN_CELL}


def _clusters(log: Sequence[Logged]) -> Ints:
    keys = [(d.state.rl_step, d.state.worker) for d in log]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return np.array([number[key] for key in keys])


def _summed(cluster: Ints, values: Floats) -> Floats:
    return np.bincount(cluster, values).astype(np.float64)


def _interval(top: Floats, bottom: Floats, counts: Ints, level: float) -> Estimate:
    """sum(top) / sum(bottom) over clusters, and the expanded percentile interval of its bootstrap."""
    num_clusters = len(top)
    if not bottom.sum():
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    value = float(top.sum() / bottom.sum())
    if num_clusters == 1:
        return Estimate(value=value, low=math.nan, high=math.nan)
    drawn_top, drawn_bottom = counts @ top, counts @ bottom
    drawn = drawn_top[drawn_bottom > 0] / drawn_bottom[drawn_bottom > 0]
    # Hesterberg 2015, section 4.3: percentiles that give the t interval's width where all is normal.
    quantile = student_margin(math.sqrt(num_clusters / (num_clusters - 1)), num_clusters - 1, level)
    tail = float(norm.cdf(-quantile))
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return Estimate(value=value, low=float(low), high=float(high))


def _band(batch: int) -> int:
    return max(batch, 1).bit_length()


def _uncovered(log: Sequence[Logged], pi: Sequence[Chances]) -> float:
    tried = {(_band(d.state.batch), d.strategy) for d in log}
    shares = [
        math.fsum(p for s, p in of.items() if (_band(d.state.batch), s) not in tried)
        for d, of in zip(log, pi, strict=True)
    ]
    return float(np.mean(shares))


def _alike(log: Sequence[Logged]) -> float:
    """How often a worker's n-th choice is that of its RL step before, among choices of chance 1/2 and less."""
    by_worker: dict[int, dict[int, list[Logged]]] = {}
    for d in log:
        by_worker.setdefault(d.state.worker, {}).setdefault(d.state.rl_step, []).append(d)
    pairs = [
        first.strategy == second.strategy
        for steps in by_worker.values()
        for rows in pairwise(steps.values())
        for first, second in zip(*rows, strict=False)
        if max(first.propensity, second.propensity) <= 0.5
    ]
    return float(np.mean(pairs)) if len(pairs) >= MIN_ALIKE else 0.0


def _warned(evaluation: Evaluation, weight: Estimate, alike: float) -> Evaluation:
    warnings = []
    if alike > MAX_ALIKE_SHARE:
        warnings.append(
            f"{alike:.0%} of a worker's choices are those of its RL step before: one seed made them all, so "
            "RL steps are not independent and the intervals too narrow"
        )
    if evaluation.uncovered_share > MAX_UNCOVERED_SHARE:
        warnings.append(
            f"{evaluation.uncovered_share:.0%} of the policy's choices are strategies that the log never tried at such "
            "batch sizes: their reward is unknown"
        )
    if evaluation.effective < MIN_ESS_SHARE * evaluation.num_decisions:
        warnings.append(
            f"the {evaluation.num_decisions} decisions are worth {evaluation.effective:.0f} of the policy's own "
            f"({evaluation.effective / evaluation.num_decisions:.1%}): log with more exploration"
        )
    # Recorded chances are single-precision numbers.
    if weight.low > 1.0 + ROUNDING or weight.high < 1.0 - ROUNDING:
        warnings.append(
            f"the weights average {weight.value:.2f} [{weight.low:.2f}, {weight.high:.2f}] where 1 is due: overlap is "
            "too weak, or the logged chances are wrong"
        )
    if evaluation.max_weight_share > MAX_WEIGHT_SHARE:
        warnings.append(f"one decision has {evaluation.max_weight_share:.0%} of all weight")
    if evaluation.num_clusters < MIN_CLUSTERS:
        warnings.append(
            f"{evaluation.num_clusters} clusters of RL step and worker: with fewer than {MIN_CLUSTERS} an interval is "
            "a hint"
        )
    return replace(evaluation, warnings=tuple(warnings))
