"""Longest response and makespan of another RL step, predicted from a few RL steps of recorded rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from bench.harness import Table
from tltlab.lengths.fit import outlook
from tltlab.sim.simulate import simulate
from traces_of_lengths import of_samples

from .measurements import measured_table

FILE = "rl_rollout_lengths.parquet"
CAPS = {"dapo_qwen2.5_32b_math_A": 20480, "qwen2.5vl7b_video": 16000}
SEEN = (3, 5, 8)
DRAWS = 12
COSTS, WORKERS = "h100-qwen2.5-7b", 2

TEXT = Table(
    "lengths",
    "rollouts: {workload}; another step's: {what}; from: {seen}; RL steps seen: {num_seen}; predictions: {n_points}; "
    "in 90 % interval: {inside:.0%}; below: {below:.0%}; above: {above:.0%}; median error: {bias:+.0%}",
    left=3,
)
"""`bias` is the median of predicted median / measured - 1."""


def rows(data: Path) -> list[dict[str, object]]:
    """Coverage by workload: RL steps seen are drawn at random, or are consecutive and the next ones are predicted.

    Makespans are simulated without speculation. ConfigError where the file is missing.
    """
    table = measured_table(
        data / FILE, ("step", "sample", "prompt_tokens", "response_tokens"), ("workload", "prompt_id")
    )
    found = pd.DataFrame([row for name in CAPS for row in _predictions(table[table["workload"] == name], name)])
    by = ["workload", "what", "seen", "num_seen"]
    grouped = found.groupby(by, sort=False)
    means = grouped[["inside", "below", "above"]].mean().assign(n_points=grouped.size(), bias=grouped["off"].median())
    return means.reset_index().to_dict("records")  # type: ignore[return-value]


def _predictions(rows: pd.DataFrame, name: str) -> Iterator[dict[str, object]]:
    trace = of_samples(
        rows["response_tokens"], CAPS[name], prompt_id=rows["prompt_id"], sample=rows["sample"], rl_step=rows["step"],
        prompt_tokens=rows["prompt_tokens"],
    )  # fmt: skip
    rng = np.random.default_rng(1)
    steps = trace.rl_steps
    timed = {
        step.requests.rl_step: (step.requests.trained_tokens.astype(float), step.finish_s, float(step.makespan_s))
        for step in simulate(trace, "none", costs=COSTS, workers=WORKERS).rollouts
    }
    for num in (num for num in SEEN if num < len(steps)):
        drawn = [sorted(rng.choice(steps, num, replace=False).tolist()) for _ in range(DRAWS)]
        runs = [steps[first : first + num] for first in range(len(steps) - num)]
        for how, chosen in (*(("random", each) for each in drawn), *(("before", each) for each in runs)):
            ahead = outlook(trace.select(chosen), [timed[step] for step in chosen])
            others = [s for s in steps if (s not in chosen if how == "random" else chosen[-1] < s <= chosen[-1] + num)]
            for what, found, at in (("longest", ahead.longest, 0), ("makespan", ahead.makespan, 2)):
                for step in others if found is not None else []:
                    value = float(np.max(timed[step][at]))
                    assert found is not None
                    below, above = value < 0.999 * found.low, value > 1.001 * found.high
                    yield {
                        "workload": name, "what": what, "seen": how, "num_seen": num, "below": below, "above": above,
                        "inside": not below and not above, "off": found.median / value - 1,
                    }  # fmt: skip
