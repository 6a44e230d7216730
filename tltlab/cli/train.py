"""`tltlab train`."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tltlab.console import emit, progress
from tltlab.errors import ConfigError
from tltlab.options import ALLOW_CODE_OPTION, command, option

if TYPE_CHECKING:
    from tltlab.runtime.recipe.recipe import Recipe


@command
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A TOML recipe, or the name of one that comes with tltlab.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the recipe.")] = None,
    out: Path | None = option("The run's folder; must not hold a run. [default: runs/run]"),
    resume: Path | None = option("Resume the run in this folder, by its own recipe."),
    allow_other_data: bool = option("With --resume: with other prompts, answers, model or reward than before.", False),
    replay_decisions: Path | None = option("A trace whose strategies the policy follows while there are any."),
    dry_run: bool = option("Check the recipe; print actors, memory, disk, simulated hours. Start nothing.", False),
    lengths: Path | None = option("With --dry-run: responses of this file or trace instead of each regime's."),
    allow_code: list[str] | None = ALLOW_CODE_OPTION,
) -> None:
    """Train with GRPO on Ray and vLLM; every rollout is recorded in OUT/trace.

    Examples: tltlab train recipe.toml train.steps=4 rollout.policy=policy.json --out runs/first
    tltlab train --resume runs/first train.steps=8
    tltlab train qwen2.5-7b-tlt --dry-run
    """
    from tltlab.doctor.signatures import diagnose
    from tltlab.own import code_allowed
    from tltlab.runtime.recipe.checks import check, enough_gpus, with_prompts
    from tltlab.runtime.recipe.dry_run import plan_of
    from tltlab.runtime.recipe.recipe import load_recipe, resumed_recipe
    from tltlab.runtime.run.checkpoints import newest_whole, step_of

    if lengths is not None and not dry_run:
        raise ConfigError(f"--lengths {lengths} is for --dry-run")
    changes = overrides or []
    if resume is not None:
        if recipe is not None and "=" not in recipe:
            raise ConfigError(f"--resume {resume} continues by the run's own recipe: leave out {recipe}")
        if out is not None:
            raise ConfigError(f"--resume {resume} continues in that folder: leave out --out {out}")
        changes = [recipe, *changes] if recipe else changes
        loaded = resumed_recipe(resume, changes, allow_code or (), allow_other_data=allow_other_data)
        folder = resume
    elif allow_other_data:
        raise ConfigError("--allow-other-data is for --resume")
    elif recipe is None:
        raise ConfigError("train needs a recipe, or --resume with a run's folder")
    else:
        loaded, folder = load_recipe(recipe, changes), out or Path("runs/run")
    with code_allowed(allow_code or ()):
        check(loaded, folder, resume=resume is not None, replay=replay_decisions, tries=True)
        if dry_run:
            loaded, notes = with_prompts(loaded)
            plan = plan_of(loaded)
            plan = replace(plan, notes=(*plan.notes, *notes))
            from tltlab.forecast import forecast

            start = ["--resume", str(resume)] if resume is not None else [str(recipe), "--out", str(folder)]
            command = shlex.join(["tltlab", "train", *start, *(change for change in changes if change != recipe)])
            ahead = forecast(loaded, plan, folder, command, lengths)
            emit(asdict(plan) | {"forecast": ahead.as_json()}, f"{plan.text()}\n{ahead.text()}")
            return
        enough_gpus(loaded)
        from tltlab.runtime.run.grpo import train as run

        try:
            how = {"resume": resume is not None, "allow_other_data": allow_other_data}
            summary = run(loaded, folder, replay=replay_decisions, **how)
        except KeyboardInterrupt:
            if (folder / "run.json").is_file():
                newest = newest_whole(folder / "checkpoints")
                since = "its start, as there is no checkpoint" if newest is None else f"RL step {step_of(newest)}"
                progress(f"{folder} continues from {since}: {resuming(loaded, folder, replay_decisions)}")
            raise
    text = f"{summary['grpo_steps']} steps into {folder}"
    if None not in (summary["reward_first"], summary["reward_last"]):
        text += f"; held-out reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}"
    if headline := diagnose(folder).headline():
        text += f"\n{headline} See tltlab doctor {folder}."
    more = resuming(loaded, folder, replay_decisions, f"train.steps={2 * summary['grpo_steps']}")
    emit(summary, f"{text}\nwith more RL steps: {more}")


def resuming(recipe: Recipe, run: Path, replay: Path | None, *overrides: str) -> str:
    """The command by which a run continues, with the permissions that it needs."""
    from tltlab.runtime.recipe.user_code import code_of

    options = [f"--allow-code={name}" for name in dict.fromkeys(code_of(recipe))]
    if replay is not None:
        options.append(f"--replay-decisions={replay}")
    return shlex.join(["tltlab", "train", "--resume", str(run), *options, *overrides])
