"""What runs of several trainers come to: seconds per RL step, ratios with intervals, goals, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import bootstrap  # type: ignore[import-untyped, unused-ignore]

from tltlab.bootstrap import Interval

from .bench_intervals import decimals, to_json

GOALS = {"trl": 20.0, "trl-vllm": 1.3}
"""How many times faster per RL step `tltlab train` shall be than each mode of TRL, on two CPU cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
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


def steady(blocks: Sequence[Block], side: str) -> list[float]:
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
    found = bootstrap(
        arrays,
        statistic,
        n_resamples=2000,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(estimate=estimate, low=float(found.low), high=float(found.high), level=0.95, method="percentile")


def summarise(blocks: Sequence[Block], lines: Mapping[str, int]) -> dict[str, Any]:
    """Figures of every side, `lines` being those that a user writes for it, and whether the goals are met.

    Rewards of each step are means over a side's runs. `mean_response_tokens` is of the steps
    that the seconds are of: longer responses take longer.
    """
    sides = []
    for side, written in lines.items():
        ran = [block for block in blocks if block.side == side and block.seconds]
        seconds = steady(ran, side)
        tokens = [length for block in ran for length in block.lengths[1:]]
        wholes = [block.whole_s for block in ran if block.whole_s is not None]
        heldout = [block.heldout_reward for block in ran if block.heldout_reward is not None]
        sides.append(
            {
                "side": side,
                "runs": len(ran),
                "seconds": to_json(median_of(seconds)) if seconds else None,
                "whole_seconds": float(np.mean(wholes)) if wholes else None,
                "first_seconds": float(np.mean([block.seconds[0] for block in ran])) if ran else None,
                "mean_response_tokens": float(np.mean(tokens)) if tokens else None,
                "rewards": np.mean([block.rewards for block in ran], axis=0).tolist() if ran else [],
                "heldout_reward": float(np.mean(heldout)) if heldout else None,
                "stages": {
                    name: float(np.mean([value for block in ran for value in block.stages[name][1:]]))
                    for name in (ran[0].stages if seconds else {})
                },
                "lines": written,
                "as_is": next((block.as_is for block in blocks if block.side == side and block.as_is), None),
                "error": next((block.error for block in blocks if block.side == side and block.error), None),
            }
        )
    ours = steady(blocks, "tltlab")
    goals = []
    for side, wanted in GOALS.items():
        theirs = steady(blocks, side)
        if side in lines:
            ratio = ratio_of_medians(theirs, ours) if theirs and ours else None
            goals.append(
                {
                    "against": side,
                    "ratio": to_json(ratio),
                    "wanted": wanted,
                    "met": None if ratio is None else ratio.estimate >= wanted,
                }
            )
    return {"sides": sides, "goals": goals, "blocks": [asdict(block) for block in blocks]}


def text(found: Mapping[str, Any]) -> str:
    """A result for a terminal: a row per side, then how many times faster ours is, and where its time goes."""
    setting = found["setting"]
    responses = f"{setting['prompts_per_step']} x {setting['group_size']}"
    lines = [
        f"{responses} responses a step, cap {setting['max_response_tokens']}, float32, {setting['steps']} RL steps, "
        f"{found['hardware']}; seconds per step without the first of a run, and of the whole run with its start",
        f"{'':10s}{'s per step':>24s}{'first':>8s}{'whole':>9s}{'tokens':>8s}{'lines':>7s}{'held-out':>10s}"
        "  reward by step",
    ]
    for side in found["sides"]:
        rewards = " ".join(decimals(reward) for reward in side["rewards"])
        lines.append(
            f"{side['side']:10s}{_interval(side['seconds']):>24s}{decimals(side['first_seconds']):>8s}"
            f"{decimals(side['whole_seconds']):>9s}"
            f"{decimals(side['mean_response_tokens']):>8s}{side['lines']:7d}{decimals(side['heldout_reward']):>10s}"
            f"  {rewards}"
        )
    lines.append(f"held-out reward before training {found['start_heldout_reward']:.2f}")
    for side in found["sides"]:
        if side["as_is"]:
            lines.append(f"{side['side']} as it is: {side['as_is']}")
        if side["as_is"] and not side["error"]:
            lines.append(f"{side['side']} above: with vLLM on torch's linear, which lets TRL write weights on CPU")
        if side["error"]:
            lines.append(f"{side['side']} did not run: {side['error']}")
        if side["stages"]:
            whole = sum(side["stages"].values())
            shares = ", ".join(f"{name[:-2]} {value / whole:.0%}" for name, value in side["stages"].items())
            lines.append(f"{side['side']}: {shares}")
    for goal in found["goals"]:
        said = "unknown" if goal["met"] is None else "met" if goal["met"] else "MISSED"
        lines.append(f"{said:8s}against {goal['against']}: {_interval(goal['ratio'])} times, goal {goal['wanted']:g}")
    return "\n".join(lines)


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    ends = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['estimate']:.2f}{ends}"
