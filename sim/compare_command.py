"""`tltlab compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from tltlab.calibrate import parse_rl_steps
from tltlab.cli import Json, emit
from tltlab.errors import ConfigError
from tltlab.policy import load_policy
from tltlab.trace import read

from .placement import PLACEMENTS
from .scenario import Scenario


def compare(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder, or a CSV of lengths.")],
    policies: Annotated[
        str, typer.Option(help="Names, files or package.module:Class, with commas between; the first is the baseline.")
    ] = "none,table,beg-mab",
    workers: Annotated[int | None, typer.Option(help="Rollout workers. [default: the manifest's]")] = None,
    costs: Annotated[str | None, typer.Option(help="Cost file or preset.")] = None,
    acceptance: Annotated[str | None, typer.Option(help="constant:A, geometric:ALPHA, trace, or a file.")] = None,
    placement: Annotated[str, typer.Option(help=f"One of {', '.join(PLACEMENTS)}.")] = "contiguous",
    mode: Annotated[str, typer.Option(help="fluid (expected tokens) or sampled.")] = "fluid",
    rl_steps: Annotated[str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1. [default: all]")] = None,
    repeats: Annotated[int, typer.Option(help="Seeds, each the same for all policies.")] = 1,
    decision_block: Annotated[
        int, typer.Option(help="Iterations per decision of a learning policy; more is faster.")
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes that share the policies.")] = 1,
    ray_address: Annotated[
        str | None, typer.Option("--ray", help="Run on a Ray cluster instead: auto, local, or its address.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of policies and of sampled acceptance.")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate several policies on one trace with common random numbers; ratios with paired 95 % intervals.

    Regret is against a clairvoyant bound over all strategies of all these policies.

    Example: tltlab compare traces/tiny --policies none,table,beg-mab --mode sampled --repeats 5
    """
    from .compare import compare as run

    source = read(trace)
    chosen = {name: load_policy(name) for name in policies.split(",") if name}
    if len(chosen) < 2:
        raise ConfigError(f"--policies {policies!r}: give at least two to compare")
    scenario = Scenario.of(
        source,
        costs=costs,
        acceptance=acceptance,
        workers=workers,
        placement=placement,
        mode=mode,
        seed=seed,
        rl_steps=parse_rl_steps(rl_steps, source.rl_steps),
        decision_block=decision_block,
    )
    found = run(scenario, chosen, repeats=repeats, jobs=jobs, ray_address=ray_address)
    rows = json.loads(found.to_json(orient="records"))
    emit({"policies": rows, "num_rl_steps": len(scenario.steps)}, as_json=as_json, text=table(found))


def table(found: pd.DataFrame) -> str:
    """The comparison for people."""
    lines = [f"{'policy':32s}{'makespan s':>12s}{'ratio':>8s}{'95 % interval':>18s}{'regret':>9s}"]
    for row in found.to_dict("records"):
        regret = "" if pd.isna(row["regret"]) else f"{row['regret']:9.1%}"
        one = pd.isna(row["ratio_low"])
        interval = "one RL step only" if one else f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        lines.append(f"{row['policy']:32s}{row['makespan_s']:12.4g}{row['ratio']:8.3f}{interval:>18s}{regret}")
    return "\n".join(lines)
