"""lossless: rewards of GRPO runs with and without speculation.

Rewards are of runs of the same seeds, one side with drafts by a bandit among a drafter that is trained meanwhile,
suffix drafts and none, the other decoding plainly. `tltlab audit` holds sampled tokens against their exact
distribution, which finds smaller faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tltlab.charts import lines
from tltlab.stats import finite, mean_of_few

from . import Progress, models
from .harness import Case, Row
from .models import Count, RunSettings, RunsExperiment, Several, on_devices, sizes_of
from .result import with_interval

_SIDES = ("without", "with")
_REWARDS = {"held_out": "held-out reward at the end", "trained": "mean reward over the RL steps"}
SAME, DIFFERENT, UNKNOWN = "no difference", "different", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessSettings(RunSettings):
    """`steps` RL steps on `workers` engines with and without speculation, for `seeds` seeds and `heldout` prompts."""

    steps: Count = 6
    workers: Several = 2
    seeds: Count = 4
    heldout: Count = 512


class Lossless(RunsExperiment[LosslessSettings]):
    """A reading has the rewards of both sides of a seed."""

    Settings = LosslessSettings
    FAST: ClassVar = models.FAST | {"steps": 2, "seeds": 2, "heldout": 16}

    def cases(self) -> Iterator[Case]:
        settings = self.settings
        self.prepare(sizes_of(settings))
        for seed in range(self.seed, self.seed + settings.seeds):
            yield Case(f"seed {seed}", f"{settings.steps} RL steps without and with speculation", seed)

    def measure(self, case: Case) -> list[Row]:
        return [self._rewarded(case.given)]

    def _rewarded(self, seed: int) -> Row:
        """Rewards by side, and those of each RL step as "SIDE by step"."""
        from tltlab.runtime.models.runs import adaptive_policy, recipe_of, trained_beside

        settings = self.settings
        policy = adaptive_policy(self.out / "policy.json", settings.draft_depth)
        options: dict[str, Row] = {
            "without": {"policy": None, "drafter": None},
            "with": {"policy": policy, "drafter": trained_beside(self.head, self.sizes)},
        }
        rewards: Row = {}
        for side in _SIDES:
            recipe = on_devices(recipe_of(self.model, self.sizes, seed=seed, **options[side]), settings)
            found = rewards_of_run(recipe, self.out / f"{side}-{seed}", settings.steps, self.progress)
            rewards[side], rewards[f"{side} by step"] = found
        return rewards

    def table(self, readings: Sequence[Row]) -> list[Row]:
        self.rewards = readings
        chances = {"held_out": self.settings.heldout, "trained": self.settings.steps * self.settings.prompts}
        return [reward_row(kind, chances[kind], readings) for kind in _REWARDS]

    def verdict(self, rows: pd.DataFrame) -> str:
        return verdict(rows.to_dict("records"))

    def picture(self, rows: pd.DataFrame) -> Figure:
        """Reward by RL step of both sides, mean and range over seeds."""
        by_step = {f"{side} speculation": np.array([r[f"{side} by step"] for r in self.rewards]) for side in _SIDES}
        steps = range(self.settings.steps)
        return lines(
            {name: (steps, of.mean(0)) for name, of in by_step.items()},
            bands={name: (of.min(0), of.max(0)) for name, of in by_step.items()},
            xlabel="RL step", ylabel="reward", title="Reward, mean over seeds and their range",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        return (
            "the same model, prompts and seeds on both sides; samples differ by chance, so rewards may; intervals are "
            "Student's over seeds and no narrower than the sampling of prompts allows",
        )


def rewards_of_run(recipe: Any, out: Path, steps: int, progress: Progress) -> tuple[dict[str, float], list[float]]:
    """A run's held-out reward at the end, its mean over RL steps, and that of each RL step."""
    from tltlab.runtime.run.grpo import GrpoRun

    with GrpoRun(recipe, out) as grpo:
        for _ in range(steps):
            progress(str(grpo.step()))
        by_step = [report.reward_mean for report in grpo.reports]
        return {"held_out": grpo.evaluate(), "trained": float(np.mean(by_step))}, by_step


def reward_row(kind: str, num_prompts: int, runs: Sequence[Mapping[str, Any]]) -> Row:
    """A row of the table: a reward with minus without, and Student's interval over seeds; one seed allows none.

    The reward is a mean over `num_prompts` in each run. Its chance is known from that, and no interval is narrower.
    """
    values = [run["with"][kind] - run["without"][kind] for run in runs]
    chance = sum(run[side][kind] * (1 - run[side][kind]) / num_prompts for run in runs for side in _SIDES)
    difference = mean_of_few(values, least_error=math.sqrt(max(chance, 0.0)) / len(runs))
    low, high = finite(difference.low), finite(difference.high)
    return {
        "case": _REWARDS[kind],
        "verdict": UNKNOWN if low is None or high is None else SAME if low <= 0 <= high else DIFFERENT,
        **{side: float(np.mean([run[side][kind] for run in runs])) for side in _SIDES},
        "difference": difference.estimate,
        "low": low,
        "high": high,
        "samples": len(runs),
    }


def verdict(rows: Sequence[Mapping[Any, Any]]) -> str:
    """Return whether anything differs, in a sentence."""
    verdicts = [row["verdict"] for row in rows]
    begins = "no difference was found" if SAME in verdicts else "nothing could be decided"
    if DIFFERENT in verdicts:
        begins = f"a difference was found ({verdicts.count(DIFFERENT)} of {len(rows)} rows)"
    clauses = [
        f"{row['case']} with speculation minus without is "
        f"{with_interval(row['difference'], row['low'], row['high'], '+.3f')} over {row['samples']} seeds"
        for row in rows
    ]
    return f"measured here, {begins}: {'; '.join(clauses)}."
