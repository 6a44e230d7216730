"""lossless: rewards of GRPO runs with and without speculation, and sampled tokens against their exact distribution.

Rewards are as in `tltlab bench drafter --parts reward`: runs of the same seeds, one side with drafts by a bandit among
a drafter that is trained meanwhile, suffix drafts and none, the other decoding plainly. Tokens are `tltlab audit`: a
model so small that every outcome's probability is known. The first says what a user would see, the second is the test
that would find small faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars, lines
from tltlab.errors import ConfigError
from tltlab.stats import interval_json, mean_of_few

from . import Progress, models
from .models import Count, RunSettings, on_devices, prepared
from .result import ExperimentResult, with_interval

Part = Literal["rewards", "tokens"]
_SIDES = ("without", "with")
_REWARDS = {"held_out": "held-out reward at the end", "trained": "mean reward over the RL steps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessSettings(RunSettings):
    """`parts` says what is run. Rewards: `steps` RL steps on `workers` engines with and without speculation, over
    `seeds` seeds, judged on `heldout` prompts. Tokens: `samples` responses in each case of the `drafters` that `tltlab
    audit` knows, every value of a factor once, or with `thorough` every pair of them; a sound engine fails any case at
    the rate `false_alarm_rate`.
    """

    parts: tuple[Part, ...] = ("rewards", "tokens")
    steps: Count = 6
    workers: Annotated[int, Field(ge=2)] = 2
    seeds: Count = 4
    heldout: Count = 512
    drafters: tuple[str, ...] = ("ngram", "suffix", "eagle")
    thorough: bool = False
    samples: Annotated[int, Field(ge=512)] = 4096
    false_alarm_rate: Annotated[float, Field(gt=0, le=0.5)] = 1e-3


FAST: Mapping[str, Any] = models.FAST | {
    "steps": 2, "seeds": 2, "heldout": 16, "drafters": ("ngram",), "samples": 512,
}  # fmt: skip


def run(settings: LosslessSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models."""
    if not settings.parts:
        raise ConfigError("parts is empty: give rewards, tokens or both")
    tokens = _tokens(settings, seed, progress) if "tokens" in settings.parts else {"cases": []}
    rewards, curves = _rewards(settings, folder, seed, progress) if "rewards" in settings.parts else ([], _NO_CURVES)
    rows = [*rewards, *map(token_row, tokens["cases"])]
    return ExperimentResult(
        verdict=verdict(rows),
        rows=pd.DataFrame(rows),
        figure=_picture(curves, rows),
        prediction=False,
        notes=_notes(settings, rewards, tokens["cases"]),
    )


def _tokens(settings: LosslessSettings, seed: int, progress: Progress) -> dict[str, Any]:
    """What `tltlab audit` reports."""
    import torch

    from tltlab.runtime.audit.run import run_audit

    torch.set_num_threads(1)
    return dict(
        run_audit(
            fast=not settings.thorough,
            drafters=list(settings.drafters),
            policy=None,
            vllm_args={},
            num_samples=settings.samples,
            false_alarm_rate=settings.false_alarm_rate,
            without_fix=False,
            seed=seed,
            progress=progress,
        )
    )


_NO_CURVES = pd.DataFrame({"side": [], "seed": [], "rl_step": [], "reward": []})


def _rewards(
    settings: LosslessSettings, folder: Path, seed: int, progress: Progress
) -> tuple[list[dict[str, Any]], pd.DataFrame]:
    """Rows of the differences, and the reward of every RL step of every run."""
    with prepared(settings, folder, progress, workers=settings.workers, heldout=settings.heldout) as work:
        from tltlab.runtime.models.runs import adaptive_policy, recipe_of, trained_beside

        policy = adaptive_policy(work.out / "policy.json", settings.draft_depth)
        drafted = {"policy": policy, "drafter": trained_beside(work.head, work.sizes)}
        options: dict[str, dict[str, Any]] = {"without": {"policy": None, "drafter": None}, "with": drafted}
        runs, curves = [], []
        for number in range(seed, seed + settings.seeds):
            rewards = {}
            for side in _SIDES:
                progress(f"{side} speculation: {settings.steps} RL steps, seed {number}")
                recipe = on_devices(recipe_of(work.model, work.sizes, seed=number, **options[side]), settings)
                rewards[side], by_step = rewards_of_run(recipe, work.out / f"{side}-{number}", settings.steps, progress)
                curves += [
                    {"side": side, "seed": number, "rl_step": step, "reward": reward}
                    for step, reward in enumerate(by_step)
                ]
            runs.append(rewards)
    chances = {"held_out": settings.heldout, "trained": settings.steps * settings.prompts}
    compared = differences(runs, chances)
    return [reward_row(kind, compared[kind], runs) for kind in _REWARDS], pd.DataFrame(curves)


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
        chance = [row[side][name] * (1 - row[side][name]) / count for row in rows for side in ("with", "without")]
        intervals[name] = mean_of_few(values, least_error=math.sqrt(max(sum(chance), 0.0)) / len(rows))
    has_interval = len(rows) > 1
    return {
        **{name: interval_json(interval) for name, interval in intervals.items()},
        "equal": all(interval.low <= 0 <= interval.high for interval in intervals.values()) if has_interval else None,
    }


def reward_row(kind: str, difference: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the table: a reward with minus without, and Student's interval over seeds."""
    low, high = difference["low"], difference["high"]
    has_interval = low is not None and high is not None
    return {
        "kind": "reward",
        "case": _REWARDS[kind],
        "verdict": "unknown" if not has_interval else "no difference" if low <= 0 <= high else "different",
        **{side: float(np.mean([run[side][kind] for run in runs])) for side in _SIDES},
        "difference": difference["estimate"],
        "low": low,
        "high": high,
        "samples": len(runs),
    }


def token_row(case: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: one case of the audit; `detectable` is the total variation that it finds with power 0.9."""
    ranks = case["ranks"] or {}
    return {
        "kind": "tokens",
        "case": case["case"],
        "verdict": {"passed": "no difference", "failed": "different"}.get(case["verdict"], case["verdict"]),
        "detectable": case["detectable_tv"],
        "p_value": case["p_value"],
        "p_ranks": ranks.get("p_value"),
        "samples": case["sample_size"],
        "drafted": case["num_drafted"],
        "kept": case["num_accepted"],
        "reason": case["reason"],
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether anything differs, and how large a difference of tokens would have been seen."""
    different = [row for row in rows if row["verdict"] == "different"]
    undecided = [row for row in rows if row["verdict"] not in ("different", "no difference")]
    clauses = []
    for row in (row for row in rows if row["kind"] == "reward"):
        clauses.append(
            f"{row['case']} with speculation minus without is "
            f"{with_interval(row['difference'], row['low'], row['high'], '+.3f')} over {row['samples']} seeds"
        )
    cases = [row for row in rows if row["kind"] == "tokens"]
    if cases:
        wrong = [row["case"] for row in cases if row["verdict"] == "different"]
        open_ = [row["case"] for row in cases if row in undecided]
        least = [row["detectable"] for row in cases if row["detectable"] is not None]
        fine = len(cases) - len(wrong) - len(open_)
        clause = f"tokens follow their exact distribution in {fine} of {len(cases)} audited cases"
        clause += f", not in {'; '.join(wrong)}" if wrong else ""
        clause += f", not tested in {'; '.join(open_)}" if open_ else ""
        if least:
            clause += f" (a total variation of {max(least):.2f} would have been seen in each that is sampled)"
        clauses.append(clause)
    if different:
        begins = f"a difference was found ({len(different)} of {len(rows)} rows)"
    elif len(undecided) == len(rows):
        begins = "nothing could be told"
    else:
        begins = "no difference was found"
    return f"measured here, {begins}: {'; '.join(clauses)}."


def _notes(
    settings: LosslessSettings, rewards: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    notes = []
    if rewards:
        notes.append(
            f"rewards: {settings.steps} GRPO steps of {settings.prompts} x {settings.group_size} responses, the same "
            "model, prompts and seeds on both sides; samples differ by chance, so rewards may; intervals are Student's "
            "over seeds and no narrower than the sampling of prompts allows"
            + (", wide as seeds are few" if settings.seeds < 5 else "")
            + "; each leaves out 0 by luck once in twenty times"
        )
    if cases:
        notes.append(
            "tokens: p_value is of the first tokens jointly, p_ranks of each token's rank given those before it; a "
            f"sound engine is accused in any case at a rate of {settings.false_alarm_rate:g}"
        )
    return tuple(notes)


def _picture(curves: pd.DataFrame, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Reward by RL step of both sides, mean and range over seeds; without rewards the p-values of the audited cases."""
    if curves.empty:
        cases = [row for row in rows if row["p_value"] is not None]
        return bars(
            [row["case"] for row in cases], np.array([row["p_value"] for row in cases]),
            xlabel="p-value of the first tokens jointly", title="Sampled tokens against their exact distribution",
        )  # fmt: skip
    by_step = {f"{side} speculation": curves[curves["side"] == side].groupby("rl_step")["reward"] for side in _SIDES}
    return lines(
        {name: (of.mean().index, of.mean()) for name, of in by_step.items()},
        bands={name: (of.min(), of.max()) for name, of in by_step.items()},
        xlabel="RL step", ylabel="reward", title="Reward, mean over seeds and their range",
    )  # fmt: skip
