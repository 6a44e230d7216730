"""staleness: the same GRPO run with a drafter that is trained throughout, for the first RL steps only, and not at all.

Speculation is lossless, so the policy goes the same way in all three, except for chance. Accept lengths are of what
engines kept of the drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tltlab.charts import lines
from tltlab.coordination.schedule import ScheduleConfig
from tltlab.errors import ConfigError, RunError
from tltlab.stats import paired_interval
from tltlab.traces.trace import Trace, read

from . import models
from .harness import Case, Row
from .models import Count, RunSettings, RunsExperiment, Several, on_devices, sizes_of
from .result import with_interval

FROZEN, STOPPED, ADAPTIVE = "frozen", "stopped", "adaptive"
_ENOUGH_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSettings(RunSettings):
    """`steps` RL steps of each run, `stop_after` the ones in which the stopped one still trains, over `seeds` seeds.

    Rollouts run on `workers` engines; their idle ones train.
    """

    steps: Several = 12
    stop_after: Count = 4
    seeds: Count = 1
    workers: Several = 4


class Staleness(RunsExperiment[StalenessSettings]):
    """A model that is trained stays in `folder`/models. RunError where nothing was drafted."""

    Settings = StalenessSettings
    FAST: ClassVar = models.FAST | {"steps": 3, "stop_after": 1, "workers": 2}

    def cases(self) -> Iterator[Case]:
        settings, stops = self.settings, {FROZEN: 0, STOPPED: self.settings.stop_after, ADAPTIVE: self.settings.steps}
        if settings.stop_after >= settings.steps:
            raise ConfigError(f"stop_after={settings.stop_after} must be below steps={settings.steps}")
        self.prepare(sizes_of(settings, heldout=0))
        for seed in range(self.seed, self.seed + settings.seeds):
            for name, stop in stops.items():
                yield Case(name, f"seed {seed}, training in the first {stop} RL steps", (seed, stop))

    def measure(self, case: Case) -> list[Row]:
        return live_rows(self.rolled_out(case.name, *case.given), case.name, case.given[0])

    def rolled_out(self, name: str, seed: int, stop: int) -> Trace:
        """A run whose idle workers train the drafter in the first `stop` RL steps, and never after."""
        from tltlab.runtime.models.runs import fixed_depth, recipe_of, trained_beside
        from tltlab.runtime.run.grpo import GrpoRun

        out = self.out / f"{name}-{seed}"
        policy = fixed_depth(self.out / "policy.json", self.settings.draft_depth)
        drafter = trained_beside(self.head, self.sizes).model_copy(update={"annotate": 0})
        recipe = recipe_of(self.model, self.sizes, seed=seed, policy=policy, drafter=drafter)
        with GrpoRun(on_devices(recipe, self.settings), out) as grpo:
            for rl_step in range(self.settings.steps):
                if rl_step == stop:
                    drafting: Any = grpo.drafting
                    drafting.schedule.config = ScheduleConfig(kind="never")
                self.progress(str(grpo.step()))
        return read(out / "trace")

    def verdict(self, rows: pd.DataFrame) -> str:
        late = rows[rows["rl_step"] > self.settings.stop_after]
        num = int((late["run"] == STOPPED).sum())
        few = "; too few RL steps for a conclusion" if num < _ENOUGH_STEPS else ""
        return (
            f"measured here, a drafter trained in its first {self.settings.stop_after} RL steps and then left alone "
            f"keeps {kept(late, STOPPED)} times the accept length of one trained throughout over {num} RL steps after "
            f"that (never trained {kept(late, FROZEN)}){few}."
        )

    def picture(self, rows: pd.DataFrame) -> Figure:
        by_step = rows.groupby(["run", "rl_step"])["accept_length"].mean()
        return lines(
            {name: (by_step.loc[name].index, by_step.loc[name]) for name in (ADAPTIVE, STOPPED, FROZEN)},
            xlabel="RL step", ylabel="tokens per draft",
            title=f"Accept length of live drafts; stopped: trained in the first {self.settings.stop_after} RL steps",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        return (
            f"{self.model}: runs of the same seed have the same prompts, model and first drafter; what training "
            f"leaves serves from the next RL step on, at depth {self.settings.draft_depth}; idle workers train as long "
            "as they are idle, so drafter_updates differ from run to run",
            "accept_length is tokens per verified draft, bonus included; intervals are of 95 % over RL steps, too "
            "narrow below ten; target_moved is how far the update after the RL step moved the policy, in nats a token",
        )


def live_rows(trace: Trace, name: str, seed: int) -> list[Row]:
    """A row per RL step: the drafter's age and updates, what was kept of its drafts, how far the policy then moved."""
    from tltlab.runtime.drafter.offline.runs import live_drafts
    from tltlab.runtime.models.runs import DRAFTER

    assert trace.steps is not None
    steps: Any = trace.steps.set_index("rl_step").to_dict("index")
    drafts = live_drafts(trace, DRAFTER)
    if not drafts:
        raise RunError(f"the learned drafter drafted nothing in the run {name}")
    return [
        {
            "run": name,
            "seed": seed,
            "rl_step": step.rl_step,
            "drafter_age": int(steps[step.rl_step]["drafter_age"]),
            "drafter_updates": int(steps[step.rl_step]["drafter_updates"]),
            "accept_length": step.accept_length,
            "drafts": step.drafts,
            "target_moved": float(steps[step.rl_step]["drift_kl"]),
        }
        for step in drafts
    ]


def kept(rows: pd.DataFrame, name: str) -> str:
    """Accept lengths of a run over those of the one trained throughout; the interval is over RL steps of all seeds."""
    both = rows.pivot(index=["seed", "rl_step"], columns="run", values="accept_length")
    pairs = both.reindex(columns=[name, ADAPTIVE]).dropna().to_numpy()
    if not len(pairs):
        return "an unknown number of"
    ratio = paired_interval(pairs[:, 0], pairs[:, 1], rng=np.random.default_rng(0))
    return with_interval(ratio.estimate, ratio.low, ratio.high)
