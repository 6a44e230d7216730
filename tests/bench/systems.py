"""Systems of the literature on engines here: the same GRPO run under each, beside what is predicted of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import Progress, Table, Text, reward_difference
from bench.models import own_model
from tltlab.config import faults_in
from tltlab.errors import ConfigError, TltlabError
from tltlab.files import write_json
from tltlab.planning.composition import System
from tltlab.planning.execution import missing_part, network_drafter
from tltlab.planning.systems import find_systems
from tltlab.records import Json
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.runs import Sizes, recipe_of, trained_beside, warmed_up
from tltlab.runtime.ray.start import ray_running
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.sim.verification.rollouts import verify

RESULT = "systems.json"
Row = Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSizes(Sizes):
    """`steps` RL steps of each system, at least three, over `seeds` seeds.

    There are twice as many prompts as an RL step takes: what learns from earlier epochs meets its prompts again from
    the third RL step on.
    """

    seeds: int = 1


FULL = SystemSizes(
    model="tiny", workers=2, prompts_per_step=4, max_response_tokens=256, steps=5, warm_up_texts=128,
    warm_up_updates=100,
)  # fmt: skip
FAST = replace(FULL, group_size=4, max_response_tokens=96, steps=4, warm_up_updates=20, heldout=32)


def bench_systems(
    names: Sequence[str], sizes: SystemSizes, *, model: Path | None, out: Path, seed: int, progress: Progress
) -> Json:
    """Run the same recipe under every system that engines here have, and predict each rollout from the run's others.

    `rows`: a run each; `why_not` names a part that no engine here has, or the fault. `rewards`: how much more held-out
    reward each system ends with than the first, over seeds. Runs stay in `out`, and the result in its systems.json.
    ConfigError where no system can run, or `out` holds runs.
    """
    systems = find_systems(names or "all")
    able = [system for system in systems if missing_part(system) is None]
    if not able:
        raise ConfigError("; ".join(f"{system.name}: {missing_part(system)}" for system in systems))
    if (out / "runs").exists():
        raise ConfigError(f"{out / 'runs'} holds an earlier benchmark; name another folder with --out")
    torch.set_num_threads(1)
    model = own_model(model, out, size=sizes.model, progress=progress)
    rows = [{"system": system.name, "why_not": missing_part(system)} for system in systems if system not in able]
    with ray_running():
        head = out / f"head-{model.name}"
        if any(map(network_drafter, able)):
            warmed_up(model, head, sizes, progress)
        for number in range(seed, seed + sizes.seeds):
            for system in able:
                progress(f"{system.name}, seed {number}: {sizes.steps} RL steps")
                rows.append(measured(system, sizes, model, head, out / "runs" / f"{system.name}-{number}", number))
                write_json(out / RESULT, {"rows": rows})
    found = [row for row in rows if row.get("error") is not None]
    result = {
        "model": str(model), "steps": sizes.steps, "seeds": sizes.seeds, "heldout": sizes.heldout,
        "hardware": hardware(), "versions": versions(), "rows": rows,
        "rewards": rewards(rows, able[0].name, sizes.heldout),
        "error": float(np.median([row["error"] for row in found])) if found else None,
        "error_at_speed": float(np.median([row["error_at_speed"] for row in found])) if found else None,
    }  # fmt: skip
    write_json(out / RESULT, result)
    return result


def measured(system: System, sizes: SystemSizes, model: Path, head: Path, out: Path, seed: int) -> Row:
    """Run a system into the folder `out`, and predict its rollouts; `why_not` names what fails.

    Seconds, tokens and `predicted_s` are of the RL steps from the second on.
    """
    row: Row = {"system": system.name, "seed": seed, "why_not": None}
    try:
        recipe = recipe_for(sizes, system, model, head, out, seed)
        with GrpoRun(recipe, out) as run:
            reports = [run.step() for _ in range(sizes.steps)][1:]
            row["heldout_reward"] = run.evaluate()
        tokens, rollout_s = sum(r.num_tokens for r in reports), sum(r.rollout_s for r in reports)
        last = reports[-1].metrics
        row |= {
            "rollout_s": rollout_s / len(reports),
            "tokens_per_s": tokens / rollout_s,
            "step_s": sum(r.seconds for r in reports) / len(reports),
            "policies_behind": last.get("staleness/mean", float(recipe.rollout.one_step_off)),
            "length_bias": last.get("trained/length_bias", 1.0),
        }
        verification = verify(out)
        later = verification.rows[verification.rows["rl_step"] > 0]
        row |= {
            "predicted_s": float(later["predicted_s"].mean()),
            "error": verification.median_error,
            "error_at_speed": verification.median_error_at_step_time,
        }
    except TltlabError as error:
        row["why_not"] = f"not predicted: {error}" if "rollout_s" in row else str(error)
    return row


def recipe_for(sizes: SystemSizes, system: System, model: Path, head: Path, out: Path, seed: int) -> Recipe:
    """The recipe of a system's run, whose prompts are written beside `out`; ConfigError where it cannot run here."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prompts = (model / "train.jsonl").read_text().splitlines()[: 2 * sizes.prompts_per_step]
    data = out.with_name("prompts.jsonl")
    data.write_text("\n".join(prompts) + "\n")
    drafter = None
    if network_drafter(system):
        drafter = trained_beside(head, sizes, "always" if system.idle_use else "never")
    with faults_in(f"recipe of {system.name}"):
        recipe = recipe_of(model, sizes, seed=seed, drafter=drafter, train=data, system=system.name)
    return recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every": 0})})


def rewards(rows: Sequence[Mapping[str, Any]], first: str, num_prompts: int) -> list[Row]:
    """Return how much more held-out reward each system ends with than `first`, over the seeds that both have."""
    ended: dict[str, dict[int, float]] = {}
    for row in rows:
        if not math.isnan(row.get("heldout_reward", math.nan)):
            ended.setdefault(row["system"], {})[row["seed"]] = row["heldout_reward"]
    plain, found = ended.pop(first, {}), []
    for system, of in ended.items():
        if pairs := [(of[seed], plain[seed]) for seed in of.keys() & plain.keys()]:
            found.append({"system": system, "over": first, **reward_difference(pairs, num_prompts)})
    return found


TEXT: Text = (
    "{steps} RL steps, {hardware}; seconds of the second RL step on; predicted: each rollout from the others of its "
    "run, and where the machine's speed is known too",
    Table(
        "rows",
        "system: {system}; seed: {seed}; rollout s: {rollout_s:.2f}; predicted: {predicted_s:.2f}; error: {error:.1%}; "
        "at its speed: {error_at_speed:.1%}; tokens/s: {tokens_per_s:.0f}; step s: {step_s:.2f}; "
        "behind: {policies_behind:.2f}; length bias: {length_bias:.2f}; reward: {heldout_reward:.2f}; "
        "why not: {why_not}",
    ),
    "predicted rollout seconds err by {error:.1%} in the median run, {error_at_speed:.1%} at the machine's speed; "
    "seconds compare only where systems roll out the same work: not partial rollouts, SPEC-RL, AReaL, DLER, BroRL",
    Table(
        "rewards",
        "held-out reward: {system}; over: {over}; difference: {difference:.3f}; seeds: {seeds}; "
        ": {equal:equal within noise|different|one seed does not tell}",
    ),
)
