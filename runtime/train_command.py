"""`tltlab train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tltlab.cli import Json, emit, progress


def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the recipe.")] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; must not hold a run.")] = Path("runs/run"),
    as_json: Json = False,
) -> None:
    """Train with GRPO on Ray and vLLM; every rollout is recorded in OUT/trace.

    Example: tltlab train recipe.toml train.steps=4 rollout.policy=policy.json --out runs/first
    """
    from .recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from .train import train as run

    summary = run(loaded, out, say=progress)
    text = f"{summary['grpo_steps']} steps into {out}"
    if summary["reward_first"] is not None:
        text += f"; held-out reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}"
    emit(summary, as_json=as_json, text=text)
