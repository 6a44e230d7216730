"""`tltlab advise`: whether a trained drafter is worth its time here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import Json, emit, made_by
from tltlab.sim.config import SimulationConfig
from tltlab.sim.tuning.advice import advise as run

from . import options


def advise(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder.")],
    costs: options.Costs = None,
    acceptance: options.Acceptance = None,
    workers: options.Workers = None,
    spot_training: Annotated[
        str | None, typer.Option(help="A file of training's rates and costs, or tlt. [default: the trace's, else tlt]")
    ] = None,
    slowdown: Annotated[
        float | None,
        typer.Option(help="Share by which training stretches the rollout beside it. [default: the trace's, else 0]"),
    ] = None,
    rl_steps: Annotated[int, typer.Option(min=10, help="RL steps to look ahead.")] = 100,
    seeds: Annotated[int, typer.Option(min=2, help="Runs to play, each with its own luck.")] = 8,
    seed: options.Seed = 0,
    as_json: Json = False,
) -> None:
    """Say whether a trained drafter is worth its time here: frozen, trained in idle time, or trained with a gate.

    Net seconds of each RL step, simulated with the trace's own drift, acceptance and idle time; what the trace does not
    tell is assumed, and listed as such.

    Example: tltlab advise traces/h100-smoke
    """
    config = SimulationConfig(costs=costs, acceptance=acceptance, workers=workers, spot=spot_training, seed=seed)
    advice = run(trace, config, slowdown=slowdown, rl_steps=rl_steps, seeds=seeds)
    result = advice.json() | {"trace": str(trace), "seed": seed, **made_by("numpy", "simpy")}
    emit(result, as_json=as_json, text=advice.text())
