"""systems: rows of `tltlab compare` run on real engines here, each beside what `tltlab verify` predicts of its run.

A row that is a composition of what the runtime has is a run of the same small recipe with the changes in `CHANGES`, and
with the policy of the table where the system drafts. What cannot run says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.acceptance.load import load_acceptance
from tltlab.charts import bars
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError, TltlabError
from tltlab.planning.system_binding import bind
from tltlab.planning.systems import SYSTEMS
from tltlab.policies.policy import Policy
from tltlab.traces.trace import read

from .harness import Case, Row, chosen
from .models import Count, RunsExperiment, Several, sizes_of

ONE_STEP_OFF = "one-step-off"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "tlt": {},
    "tlt-base": {},
    "vllm-dynamic": {},
    "vllm-static": {},
    "das": {},
    "seer-drafts": {},
    "histospec": {},
    "copris": {"partial": {"concurrency": 1.5}},
    "spec-rl": {"reuse": {"leniency": math.exp(0.5), "residual": "none"}},
    "spec-rl-exact": {"reuse": {"leniency": 1.0, "residual": "exact"}},
    ONE_STEP_OFF: {"one_step_off": True},
    "areal": {"staleness": 1},
}
"""Of `[rollout]`, by system; CoPRIS's concurrency is in responses that an RL step trains."""
TRAINED_BESIDE = ("tlt",)
"""Of those with a draft head: idle workers go on training it, in every rollout."""
_PARTS = ("dvi", "diffuspec", "seer", "rlhfuse", "rhymerl", "streamrl", "streamrl-async", "april", "rollpacker")
WHY_NOT: Mapping[str, str] = {
    **dict.fromkeys(_PARTS, "is simulated only: the runtime has no such drafter, buffer, placement or fusion"),
    "vllm-adaptive": "needs costs and acceptance of its own engine, which a first run measures",
    "sglang-adaptive": "is another engine's",
    "hedgespec": "needs several trained draft heads beside one target, and an engine here has one",
    "open-r1": "needs devices of the trainer's own to differ from VeRL's row; here both share two cores",
    "dler": "is a workload: train.algorithm = 'dler' with a lower cap",
    "brorl": "is a workload: a larger rollout.group_size",
}


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
        about = f"{self.settings.steps} RL steps"
        every = [Case(name, WHY_NOT.get(name, about)) for name in (*SYSTEMS, ONE_STEP_OFF)]
        cases = chosen("system", every, self.settings.only)
        sizes, drafts = sizes_of(self.settings, heldout=0, warm_up_texts=128), any(learns(case.name) for case in cases)
        self.prepare(sizes, runs=self.folder / "systems-runs", drafts=drafts)
        return cases

    def measure(self, case: Case) -> list[Row]:
        name, out = case.name, self.out / f"{case.name}-{self.seed}"
        row: Row = {"system": name, "ran": name in CHANGES, "why_not": WHY_NOT.get(name)}
        if row["ran"]:
            try:
                row |= self._ran(recipe_for(self.settings, name, self.model, self.head, out, self.seed), out)
            except TltlabError as error:
                row |= {"ran": False, "why_not": str(error)}
        return [row]

    def _ran(self, recipe: Any, out: Path) -> Row:
        """What a run took, and what is predicted of it."""
        from tltlab.runtime.run.grpo import GrpoRun
        from tltlab.sim.verification.rollouts import verify

        with GrpoRun(recipe, out) as grpo:
            reports = [grpo.step() for _ in range(self.settings.steps)][1:]
        verification = verify(out)
        later = verification.rows[verification.rows["rl_step"] > 0]
        tokens, rollout_s = sum(r.num_tokens for r in reports), sum(r.rollout_s for r in reports)
        last = reports[-1].metrics
        return {
            "rollout_s": rollout_s / len(reports),
            "predicted_s": float(later["predicted_s"].mean()),
            "error": verification.median_error,
            "error_at_speed": verification.median_error_at_step_time,
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
        ran = rows[rows["ran"]].sort_values("error")
        return (
            f"{len(ran)} systems ran here; predicted rollout seconds err by {ran['error'].median():.1%} (median), "
            f"{ran['error'].iloc[-1]:.1%} at worst ({ran['system'].iloc[-1]}), and with the machine's speed known by "
            f"{ran['error_at_speed'].median():.1%}."
        )

    def picture(self, rows: pd.DataFrame) -> Figure:
        ran = rows[rows["ran"]]
        return bars(
            ran["system"].tolist(), ran["error"].to_numpy(np.float64),
            xlabel="median error of predicted rollout seconds", title="Systems measured here against their prediction",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        return (
            "rollout_s and predicted_s are means over the RL steps from the second on, each predicted from the others "
            "of the same run (`tltlab verify`), so with its system's costs and acceptance; error_at_speed is the error "
            "where how fast the machine was in each RL step is known too",
            "rollout seconds compare only between systems that roll out the same work: not CoPRIS, SPEC-RL and AReaL, "
            "for which tokens_per_s and step_s say more",
        )


def policy_of(name: str) -> Policy | None:
    """The policy of a system that drafts, as the table has it; None for one that does not."""
    system = SYSTEMS.get(name)
    if system is None or not system.drafters:
        return None
    # Costs are what a length-aware budget is made of; which acceptance makes no difference to what is drafted by.
    return bind(system, load_costs("cpu-small"), load_acceptance("geometric:0.6")).policy


def learns(name: str) -> bool:
    """Whether a system drafts with a trained head."""
    policy = policy_of(name)
    return policy is not None and any(policy.registry.network_levels(s) for s in policy.strategies)


def recipe_for(settings: SystemsSettings, name: str, model: Path, head: Path, out: Path, seed: int) -> Any:
    """The `Recipe` of a system's run, whose prompts and policy are written beside `out`."""
    from tltlab.runtime.models.runs import recipe_of, trained_beside
    from tltlab.runtime.recipe.recipe import Recipe

    out.parent.mkdir(parents=True, exist_ok=True)
    prompts = (model / "train.jsonl").read_text().splitlines()[: 2 * settings.prompts]
    data = out.with_name("prompts.jsonl")
    data.write_text("\n".join(prompts) + "\n")
    policy, path, drafter = policy_of(name), None, None
    depth = max([1, *(s.draft_depth for s in policy.strategies)]) if policy is not None else 1
    sizes = sizes_of(settings, heldout=0, draft_depth=depth)
    if policy is not None:
        path = out.with_name(f"{name}.json")
        policy.write(path)
    if learns(name):
        drafter = trained_beside(head, sizes, "always" if name in TRAINED_BESIDE else "never")
    fields = json.loads(recipe_of(model, sizes, seed=seed, policy=path, drafter=drafter, train=data).model_dump_json())
    changes = json.loads(json.dumps(CHANGES[name]))
    if partial := changes.get("partial"):
        partial["concurrency"] = int(partial["concurrency"] * settings.prompts * settings.group_size)
    fields["rollout"] |= changes
    fields["checkpoint"]["every"] = 0
    return Recipe.model_validate(fields)
