"""systems: rows of `tltlab compare` run on real engines here, each beside its prediction by `tltlab verify`.

Each row is a run of the same small recipe with `rollout.system`. A row with a part that no engine here has names the
part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars
from tltlab.config import faults_in
from tltlab.errors import ConfigError, TltlabError
from tltlab.planning.composition import System
from tltlab.planning.execution import missing_part, network_drafter
from tltlab.planning.systems import find_systems
from tltlab.traces.trace import read

from .harness import Case, Row
from .models import Count, RunsExperiment, Several, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemsSettings:
    """`steps` RL steps of each system in `only` (all that can run where it is empty), on `workers` engines.

    `model` is a folder of `tltlab make-model`, else one of `size` is trained; `head` a drafter of `tltlab
    train-drafter` for it, else one is warmed up in `warm_up_updates` where a system needs it. There are twice as many
    prompts as an RL step takes: those that learn from earlier epochs meet theirs from the third RL step on.
    """

    model: Path | None = None
    head: Path | None = None
    size: str = "tiny"
    prompts: Several = 6
    group_size: Several = 8
    cap: Count = 256
    steps: Annotated[int, Field(ge=3)] = 5
    workers: Count = 2
    warm_up_updates: Count = 100
    only: tuple[str, ...] = ()


class Systems(RunsExperiment[SystemsSettings]):
    """Its runs stay in `folder`/systems-runs."""

    Settings = SystemsSettings
    FAST: ClassVar = {"prompts": 4, "group_size": 4, "cap": 96, "steps": 4, "warm_up_updates": 20}

    def cases(self) -> list[Case]:
        systems, about = find_systems(self.settings.only or "all"), f"{self.settings.steps} RL steps"
        cases = [Case(system.name, missing_part(system) or about, system) for system in systems]
        sizes = sizes_of(self.settings, heldout=0, warm_up_texts=128)
        drafts = any(missing_part(case.given) is None and network_drafter(case.given) for case in cases)
        self.prepare(sizes, runs=self.folder / "systems-runs", drafts=drafts)
        return cases

    def measure(self, case: Case) -> list[Row]:
        system, out = case.given, self.out / f"{case.name}-{self.seed}"
        row: Row = {"system": system.name, "ran": False, "why_not": missing_part(system)}
        row |= dict.fromkeys(("predicted_s", "error", "error_at_speed"), float("nan"))
        if row["why_not"] is None:
            try:
                row |= self._ran(recipe_for(self.settings, system, self.model, self.head, out, self.seed), out)
                row |= self._predicted(out)
            except TltlabError as error:
                row["why_not"] = f"not predicted: {error}" if row["ran"] else str(error)
        return [row]

    def _predicted(self, out: Path) -> Row:
        """Predict each rollout of a run from its others; ConfigError where these are too few or too much alike."""
        from tltlab.sim.verification.rollouts import verify

        verification = verify(out)
        later = verification.rows[verification.rows["rl_step"] > 0]
        return {
            "predicted_s": float(later["predicted_s"].mean()),
            "error": verification.median_error,
            "error_at_speed": verification.median_error_at_step_time,
        }

    def _ran(self, recipe: Any, out: Path) -> Row:
        """Run the recipe; its seconds, tokens and staleness."""
        from tltlab.runtime.run.grpo import GrpoRun

        with GrpoRun(recipe, out) as grpo:
            reports = [grpo.step() for _ in range(self.settings.steps)][1:]
        tokens, rollout_s = sum(r.num_tokens for r in reports), sum(r.rollout_s for r in reports)
        last = reports[-1].metrics
        return {
            "ran": True,
            "rollout_s": rollout_s / len(reports),
            "tokens_per_s": tokens / rollout_s,
            "step_s": sum(r.seconds for r in reports) / len(reports),
            "policies_behind": last.get("staleness/mean", float(recipe.rollout.one_step_off)),
            "length_bias": last.get("trained/length_bias", 1.0),
            "rl_steps": len(read(out / "trace").rl_steps),
        }

    def table(self, readings: Sequence[Row]) -> Sequence[Row]:
        if not any(row["ran"] for row in readings):
            reasons = "; ".join(f"{row['system']} {row['why_not']}" for row in readings)
            raise ConfigError(f"no system of these can run here: {reasons}")
        return readings

    def verdict(self, rows: pd.DataFrame) -> str:
        ran, known = f"{int(rows['ran'].sum())} systems ran here", rows.dropna(subset="error")
        if known.empty:
            return f"{ran}; no rollout could be predicted."
        error, at_worst = known["error"].median(), known.iloc[int(known["error"].argmax())]
        return (
            f"{ran}; predicted rollout seconds err by {error:.1%} (median), {at_worst['error']:.1%} at worst "
            f"({at_worst['system']}), and with the machine's speed known by {known['error_at_speed'].median():.1%}."
        )

    def picture(self, rows: pd.DataFrame) -> Figure:
        known = rows.dropna(subset="error")
        return bars(
            known["system"].tolist(), known["error"].to_numpy(np.float64),
            xlabel="median error of predicted rollout seconds", title="Systems measured here against their prediction",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        return (
            "rollout_s and predicted_s are means over the RL steps from the second on, each predicted from the others "
            "of the same run (`tltlab verify`), so with its system's costs and acceptance; error_at_speed is the error "
            "where how fast the machine was in each RL step is known too",
            "rollout seconds compare only between systems that roll out the same work: not CoPRIS, SPEC-RL and AReaL, "
            "for which to compare tokens_per_s and step_s",
        )


def recipe_for(settings: SystemsSettings, system: System, model: Path, head: Path, out: Path, seed: int) -> Any:
    """The `Recipe` of a system's run, whose prompts are written beside `out`; ConfigError where it cannot run here."""
    from tltlab.runtime.models.runs import recipe_of, trained_beside

    out.parent.mkdir(parents=True, exist_ok=True)
    prompts = (model / "train.jsonl").read_text().splitlines()[: 2 * settings.prompts]
    data = out.with_name("prompts.jsonl")
    data.write_text("\n".join(prompts) + "\n")
    sizes, drafter = sizes_of(settings, heldout=0), None
    if network_drafter(system):
        drafter = trained_beside(head, sizes, "always" if system.idle_use else "never")
    with faults_in(f"recipe of {system.name}"):
        recipe = recipe_of(model, sizes, seed=seed, policy=None, drafter=drafter, train=data, system=system.name)
    return recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every": 0})})
