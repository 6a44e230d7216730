"""`tltlab verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tltlab.calibrate import parse_rl_steps
from tltlab.cli import Json, emit
from tltlab.trace import read

from .verify import text
from .verify import verify as run_verify


def verify(
    run: Annotated[Path, typer.Argument(help="A RUN folder, or a recorded trace of shipped policies.")],
    rl_steps: Annotated[
        str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one. [default: all]")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Other RL steps to fit on, the nearest.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Sampled simulations per prediction.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled acceptance and drawn lengths.")] = 0,
    as_json: Json = False,
) -> None:
    """Predict every RL step of a run from the other ones, and compare with what was measured.

    Example: tltlab verify demo --json
    """
    chosen = parse_rl_steps(rl_steps, read(run).rl_steps)
    found = run_verify(run, rl_steps=chosen, window=window, samples=samples, seed=seed)
    emit(found.json(), as_json=as_json, text=text(found))
