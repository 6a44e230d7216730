"""lossless: rewards of GRPO runs with and without speculation, and sampled tokens against their exact distribution.

Rewards are of runs of the same seeds, one side with drafts by a bandit among a drafter that is trained meanwhile,
suffix drafts and none, the other decoding plainly. Tokens are `tltlab audit`, which finds small faults, on a model so
small that every outcome's probability is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars, lines
from tltlab.errors import ConfigError
from tltlab.stats import interval_json, mean_of_few

from . import Progress, models
from .harness import Case, Row
from .models import Count, RunSettings, RunsExperiment, Several, on_devices, sizes_of
from .result import with_interval

Part = Literal["rewards", "tokens"]
_SIDES = ("without", "with")
_REWARDS = {"held_out": "held-out reward at the end", "trained": "mean reward over the RL steps"}
SAME, DIFFERENT, UNKNOWN = "no difference", "different", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessSettings(RunSettings):
    """`parts` says what is run. Rewards: `steps` RL steps on `workers` engines with and without speculation, over
    `seeds` seeds, judged on `heldout` prompts. Tokens: `samples` responses in each case of the `drafters` that `tltlab
    audit` knows, every value of a factor once, or with `thorough` every pair of them; a sound engine fails any case at
    the rate `false_alarm_rate`.
    """

    parts: tuple[Part, ...] = ("rewards", "tokens")
    steps: Count = 6
    workers: Several = 2
    seeds: Count = 4
    heldout: Count = 512
    drafters: tuple[str, ...] = ("ngram", "suffix", "eagle")
    thorough: bool = False
    samples: Annotated[int, Field(ge=512)] = 4096
    false_alarm_rate: Annotated[float, Field(gt=0, le=0.5)] = 1e-3


class Lossless(RunsExperiment[LosslessSettings]):
    """A reading is what both sides of a seed were rewarded, or a row of an audited case."""

    Settings = LosslessSettings
    FAST: ClassVar = models.FAST | {"steps": 2, "seeds": 2, "heldout": 16, "drafters": ("ngram",), "samples": 512}

    def cases(self) -> Iterator[Case]:
        settings = self.settings
        if not settings.parts:
            raise ConfigError("parts is empty: give rewards, tokens or both")
        self.rewards: list[Row] = []
        if "tokens" in settings.parts:
            yield Case("tokens", "tltlab audit")
        if "rewards" in settings.parts:
            self.prepare(sizes_of(settings))
            for seed in range(self.seed, self.seed + settings.seeds):
                yield Case(f"rewards, seed {seed}", f"{settings.steps} RL steps without and with speculation", seed)

    def measure(self, case: Case) -> list[Row]:
        if case.given is None:
            return self._audited()
        self.rewards.append(self._rewarded(case.given))
        return []

    def _audited(self) -> list[Row]:
        import torch

        from tltlab.runtime.audit.run import run_audit

        torch.set_num_threads(1)
        found = run_audit(
            fast=not self.settings.thorough,
            drafters=list(self.settings.drafters),
            policy=None,
            vllm_args={},
            num_samples=self.settings.samples,
            false_alarm_rate=self.settings.false_alarm_rate,
            without_fix=False,
            seed=self.seed,
            progress=self.progress,
        )
        return [token_row(case) for case in found["cases"]]

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
        if not self.rewards:
            return list(readings)
        chances = {"held_out": self.settings.heldout, "trained": self.settings.steps * self.settings.prompts}
        compared = differences(self.rewards, chances)
        return [*(reward_row(kind, compared[kind], self.rewards) for kind in _REWARDS), *readings]

    def verdict(self, rows: pd.DataFrame) -> str:
        return verdict(rows.to_dict("records"))

    def picture(self, rows: pd.DataFrame) -> Figure:
        """Reward by RL step of both sides, mean and range over seeds; without rewards the audited cases' p-values."""
        if not self.rewards:
            tested = rows[rows["p_value"].notna()]
            return bars(
                tested["case"].tolist(), tested["p_value"].to_numpy(np.float64), title="Tokens, by audited case",
                xlabel="p-value of the first tokens jointly",
            )  # fmt: skip
        by_step = {
            f"{side} speculation": np.array([each[f"{side} by step"] for each in self.rewards]) for side in _SIDES
        }
        steps = range(self.settings.steps)
        return lines(
            {name: (steps, of.mean(0)) for name, of in by_step.items()},
            bands={name: (of.min(0), of.max(0)) for name, of in by_step.items()},
            xlabel="RL step", ylabel="reward", title="Reward, mean over seeds and their range",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        if self.rewards:
            yield (
                "rewards: the same model, prompts and seeds on both sides; samples differ by chance, so rewards may; "
                "intervals are Student's over seeds and no narrower than the sampling of prompts allows"
            )
        if "tokens" in self.settings.parts:
            yield (
                "tokens: p_value is of the first tokens jointly, p_ranks of each token's rank given those before it; a "
                f"sound engine is accused in any case at a rate of {self.settings.false_alarm_rate:g}"
            )


def rewards_of_run(
    recipe: Any, out: Path, steps: int, progress: Progress, *, at_start: bool = False
) -> tuple[dict[str, float], list[float]]:
    """A run's held-out reward at the end, `first` that at the start where asked, its mean over RL steps, and each."""
    from tltlab.runtime.run.grpo import GrpoRun

    with GrpoRun(recipe, out) as grpo:
        first = {"first": grpo.evaluate()} if at_start else {}
        for _ in range(steps):
            progress(str(grpo.step()))
        by_step = [report.reward_mean for report in grpo.reports]
        return first | {"held_out": grpo.evaluate(), "trained": float(np.mean(by_step))}, by_step


def differences(rows: Sequence[Mapping[str, Any]], prompts: Mapping[str, int]) -> dict[str, Any]:
    """With minus without, of each kind of reward, over seeds; `equal` is None from one seed: it allows no interval.

    `prompts`: on how many a reward is a mean, in each run. Its chance is known from that, and no interval is narrower.
    """
    intervals = {}
    for name, count in prompts.items():
        values = [row["with"][name] - row["without"][name] for row in rows]
        chance = [row[side][name] * (1 - row[side][name]) / count for row in rows for side in _SIDES]
        intervals[name] = mean_of_few(values, least_error=math.sqrt(max(sum(chance), 0.0)) / len(rows))
    has_interval = len(rows) > 1
    return {
        **{name: interval_json(interval) for name, interval in intervals.items()},
        "equal": all(interval.low <= 0 <= interval.high for interval in intervals.values()) if has_interval else None,
    }


def reward_row(kind: str, difference: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Row:
    """A row of the table: a reward with minus without, and Student's interval over seeds."""
    low, high = difference["low"], difference["high"]
    has_interval = low is not None and high is not None
    return {
        "kind": "reward",
        "case": _REWARDS[kind],
        "verdict": UNKNOWN if not has_interval else SAME if low <= 0 <= high else DIFFERENT,
        **{side: float(np.mean([run[side][kind] for run in runs])) for side in _SIDES},
        "difference": difference["estimate"],
        "low": low,
        "high": high,
        "samples": len(runs),
    }


def token_row(case: Mapping[str, Any]) -> Row:
    """A row of the table: one case of the audit; `detectable` is the total variation that it finds with power 0.9."""
    return {
        "kind": "tokens",
        "case": case["case"],
        "verdict": {"passed": SAME, "failed": DIFFERENT}.get(case["verdict"], case["verdict"]),
        "detectable": case["detectable_tv"],
        "p_value": case["p_value"],
        "p_ranks": (case["ranks"] or {}).get("p_value"),
        "samples": case["sample_size"],
        "drafted": case["num_drafted"],
        "kept": case["num_accepted"],
        "reason": case["reason"],
    }


def verdict(rows: Sequence[Mapping[Any, Any]]) -> str:
    """Whether anything differs, and how large a difference of tokens would have been seen."""
    verdicts = [row["verdict"] for row in rows]
    begins = "no difference was found" if SAME in verdicts else "nothing could be told"
    if DIFFERENT in verdicts:
        begins = f"a difference was found ({verdicts.count(DIFFERENT)} of {len(rows)} rows)"
    clauses = [
        f"{row['case']} with speculation minus without is "
        f"{with_interval(row['difference'], row['low'], row['high'], '+.3f')} over {row['samples']} seeds"
        for row in rows
        if row["kind"] == "reward"
    ]
    cases = [row for row in rows if row["kind"] == "tokens"]
    if cases:
        not_same = [f"{row['case']} ({row['verdict']})" for row in cases if row["verdict"] != SAME]
        seen = max((row["detectable"] for row in cases if pd.notna(row["detectable"])), default=math.nan)
        clauses.append(
            f"tokens follow their exact distribution in {len(cases) - len(not_same)} of {len(cases)} audited cases"
            + (f", not in {'; '.join(not_same)}" if not_same else "")
            + f", where a total variation of {seen:.2f} would have been seen"
        )
    return f"measured here, {begins}: {'; '.join(clauses)}."
