"""Does the machinery change what is learned? GRPO with all of it and with none, from the same seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.train.figures import as_text
from tltlab.console import table
from tltlab.experiments.lossless import differences, rewards_of_run
from tltlab.runtime.models.runs import Progress, adaptive_policy, recipe_of, trained_beside

from .runs import BenchSizes

WORKERS = 2


def bench_reward(
    model: Path, head: Path, out: Path, sizes: BenchSizes, *, seed: int, progress: Progress
) -> dict[str, Any]:
    """Held-out reward after some GRPO steps, several seeds: speculation by a bandit among the trained drafter, suffix
    drafts and none, with training in idle time, against plain decoding.

    `held_out` and `trained` are the differences, with minus without, of the reward on held-out prompts at the end and
    of the mean over the RL steps, with Student's interval over seeds; `equal` says whether both hold 0.
    """
    policy = adaptive_policy(out / "policy.json", sizes.draft_depth)
    rows = []
    for number in range(seed, seed + sizes.reward_seeds):
        drafter = trained_beside(head, sizes)
        recipes = {
            "without": recipe_of(model, sizes, seed=number, policy=None, drafter=None, workers=WORKERS),
            "with": recipe_of(model, sizes, seed=number, policy=policy, drafter=drafter, workers=WORKERS),
        }
        row: dict[str, Any] = {"seed": number}
        for name, recipe in recipes.items():
            progress(f"{name} the machinery, seed {number}")
            folder = out / f"{name}-{number}"
            row[name], _ = rewards_of_run(recipe, folder, sizes.reward_steps, progress, at_start=True)
        rows.append(row)
    return {
        "steps": sizes.reward_steps,
        "seeds": sizes.reward_seeds,
        "heldout": sizes.heldout,
        **differences(rows, {"held_out": sizes.heldout, "trained": sizes.reward_steps * sizes.prompts_per_step}),
        "rows": rows,
    }


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['steps']} GRPO steps, {result['seeds']} seed(s), {result['heldout']} held-out prompts"]
    rows = []
    for row in result["rows"]:
        without, all_ = row["without"], row["with"]
        rewards = (without["first"], without["held_out"], all_["held_out"], without["trained"], all_["trained"])
        rows.append((row["seed"], *(f"{reward:.3f}" for reward in rewards)))
    lines.append(table(("seed", "before", "without", "with", "in training without", "with"), rows, left=0))
    equal = {True: "equal within noise", False: "different", None: "one seed does not tell"}[result["equal"]]
    lines.append(
        f"with minus without: held out {as_text(result['held_out'])}, in training {as_text(result['trained'])}: {equal}"
    )
    return "\n".join(lines)
