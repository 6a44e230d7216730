"""What runs of several trainers come to: seconds per RL step, who learned more, goals, and a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import bootstrap  # type: ignore[import-untyped, unused-ignore]

from bench.harness import Goals, Table, Text
from tltlab.stats import Interval, interval_json, mean_of_few

GOALS = {"trl": 20.0, "trl-vllm": 1.3}
"""How many times faster per RL step `tltlab train` shall be than each mode of TRL, on two CPU cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRun:
    """One run of one side: `seconds`, `rewards` (means) and `lengths` (mean response tokens), one of each per RL step.

    `whole_s` is the whole process with its start, `stages` the seconds of each part of our steps. `as_is` says how a
    side failed before it ran in another way, `error` how it failed for good; a side that failed has no steps.
    """

    side: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    whole_s: float | None = None
    heldout_reward: float | None = None
    as_is: str | None = None
    error: str | None = None


def steady(blocks: Sequence[SideRun], side: str) -> list[float]:
    """Seconds of a side's RL steps but the first of each run, in which compilers and caches warm up."""
    return [seconds for block in blocks if block.side == side for seconds in block.seconds[1:]]


def median_of(seconds: Sequence[float]) -> Interval:
    """The median with its interval over resampled RL steps."""
    return _resampled((seconds,), lambda a, axis=-1: np.median(a, axis=axis))


def ratio_of_medians(slow: Sequence[float], fast: Sequence[float]) -> Interval:
    """median(slow) / median(fast), RL steps of both resampled on their own: percentiles of 2000 resamples.

    >>> ratio_of_medians([40.0, 50.0, 60.0], [5.0, 5.0, 5.0]).estimate
    10.0
    """
    return _resampled((slow, fast), lambda a, b, axis=-1: np.median(a, axis=axis) / np.median(b, axis=axis))


def _resampled(samples: Sequence[Sequence[float]], statistic: Any) -> Interval:
    arrays = [np.asarray(sample, np.float64) for sample in samples]
    estimate = float(statistic(*arrays))
    if min(map(len, arrays)) < 2:
        return Interval(estimate=estimate, low=float("nan"), high=float("nan"), level=0.95, method="none")
    ends = bootstrap(
        arrays,
        statistic,
        n_resamples=2000,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(estimate=estimate, low=float(ends.low), high=float(ends.high), level=0.95, method="percentile")


def learned(blocks: Sequence[SideRun], side: str, heldout: int) -> dict[str, Any] | None:
    """How much more held-out reward `tltlab train` ends with than a side, over seeds that both ran; None without one.

    `difference` has Student's interval over seeds; each reward is a mean over `heldout` prompts, whose chance is known,
    and no interval is narrower than that. `equal` says whether it holds 0, and is None from one seed.
    """
    ended = {(block.side, block.seed): block.heldout_reward for block in blocks if block.heldout_reward is not None}
    pairs = [
        (ours, ended[side, seed]) for (name, seed), ours in ended.items() if name == "tltlab" and (side, seed) in ended
    ]
    if not pairs:
        return None
    chance = sum(reward * (1 - reward) / heldout for pair in pairs for reward in pair)
    interval = mean_of_few([a - b for a, b in pairs], least_error=math.sqrt(max(chance, 0.0)) / len(pairs))
    return {
        "against": side,
        "seeds": len(pairs),
        "difference": interval_json(interval),
        "equal": interval.low <= 0 <= interval.high if len(pairs) > 1 else None,
    }


def summarise(blocks: Sequence[SideRun], lines: Mapping[str, int], *, heldout: int) -> dict[str, Any]:
    """Figures of every side, `lines` being those that a user writes for it, who learned more, and the goals.

    Rewards of each step are means over a side's runs, and `heldout_reward` is one over `heldout` prompts each.
    `mean_response_tokens` is of the steps that the seconds are of: longer responses take longer.
    """
    sides = []
    for side, num_lines in lines.items():
        ran = [block for block in blocks if block.side == side and block.seconds]
        seconds = steady(ran, side)
        tokens = [length for block in ran for length in block.lengths[1:]]
        wholes = [block.whole_s for block in ran if block.whole_s is not None]
        ended = [block.heldout_reward for block in ran if block.heldout_reward is not None]
        sides.append(
            {
                "side": side,
                "runs": len(ran),
                "seconds": interval_json(median_of(seconds)) if seconds else None,
                "whole_seconds": float(np.mean(wholes)) if wholes else None,
                "first_seconds": float(np.mean([block.seconds[0] for block in ran])) if ran else None,
                "mean_response_tokens": float(np.mean(tokens)) if tokens else None,
                "rewards": np.mean([block.rewards for block in ran], axis=0).tolist() if ran else [],
                "heldout_reward": interval_json(mean_of_few(ended)) if ended else None,
                "stages": {
                    name: float(np.mean([value for block in ran for value in block.stages[name][1:]]))
                    for name in (ran[0].stages if seconds else {})
                },
                "lines": num_lines,
                "as_is": next((block.as_is for block in blocks if block.side == side and block.as_is), None),
                "error": next((block.error for block in blocks if block.side == side and block.error), None),
            }
        )
    ours = steady(blocks, "tltlab")
    goals = []
    for side, goal in GOALS.items():
        theirs = steady(blocks, side)
        if side in lines:
            ratio = ratio_of_medians(theirs, ours) if theirs and ours else None
            goals.append(
                {
                    "against": side,
                    "ratio": interval_json(ratio),
                    "wanted": goal,
                    "met": None if ratio is None else ratio.estimate >= goal,
                }
            )
    return {
        "sides": sides,
        "learned": [comparison for side in GOALS if side in lines and (comparison := learned(blocks, side, heldout))],
        "goals": goals,
        "blocks": [asdict(block) for block in blocks],
    }


TEXT: Text = (
    "{setting.prompts_per_step} x {setting.group_size} responses a step, cap {setting.max_response_tokens}, float32, "
    "{setting.steps} RL steps, {hardware}; seconds per step without the first of a run, and of the whole run",
    Table(
        "sides",
        ": {side}; s per step: {seconds}; first: {first_seconds:.2f}; whole: {whole_seconds:.2f}; "
        "tokens: {mean_response_tokens:.0f}; lines: {lines}; held-out: {heldout_reward}; as it is: {as_is}; "
        "did not run: {error}",
    ),
    Table(
        "sides",
        "s of a step: {side}; rollout: {stages.rollout_s:.2f}; reward: {stages.reward_s:.2f}; "
        "inference: {stages.inference_s:.2f}; train: {stages.train_s:.2f}; sync: {stages.sync_s:.2f}; "
        "rest: {stages.rest_s:.2f}",
    ),
    "held-out reward before training {start_heldout_reward:.2f}; then, tltlab less another side:",
    Table(
        "learned",
        "against: {against}; difference: {difference:.3f}; seeds: {seeds}; "
        ": {equal:equal within noise|different|one seed does not tell}",
    ),
    Goals("goals", "against {against}: {ratio} times, goal {wanted:g}"),
)
