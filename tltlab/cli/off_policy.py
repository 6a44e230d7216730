"""`tltlab off-policy`: what another policy would have earned, from a log of decisions made at random."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tltlab.calibration.api import parse_rl_steps
from tltlab.console import AllowCode, Json, emit, table
from tltlab.errors import ConfigError
from tltlab.planning.off_policy import Estimate, Evaluation, evaluate
from tltlab.policies.policy import SHIPPED, load_policy
from tltlab.policies.reward import RewardKind
from tltlab.policies.specs import code_allowed
from tltlab.stats import finite
from tltlab.traces.trace import read


def off_policy(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder with decisions.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy file, shipped name or package.module:Class; may be repeated."),
    ] = None,
    reward: Annotated[
        str, typer.Option(help="relative (speed-up over plain decoding at that batch) or paper (tokens per second).")
    ] = "relative",
    rl_steps: Annotated[
        str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one. [default: all]")
    ] = None,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Estimate a policy's mean reward from the decisions that another policy logged with their chances.

    Inverse propensity weights (ips), self-normalised (snips) and doubly robust (dr), each with an interval over RL
    steps and workers. The mean is over the states that the log met; it says nothing about those that the policy would
    have led to.

    Example: tltlab off-policy traces/tiny --policy table --json
    """
    if reward not in get_args(RewardKind):
        raise ConfigError(f"no reward named {reward!r}; there are {', '.join(get_args(RewardKind))}")
    kind: RewardKind = "paper" if reward == "paper" else "relative"
    source = read(trace)
    steps = parse_rl_steps(rl_steps, source.rl_steps)
    source = source if steps is None else source.select(steps)
    if not policy:
        raise ConfigError(f"which policy? give --policy: a file or one of {', '.join(SHIPPED)}")
    with code_allowed(allow_code or ()):
        policies = {name: load_policy(name) for name in policy}
    results = []
    for name, target in policies.items():
        evaluation = evaluate(source, target, reward=kind, level=level, seed=seed)
        results.append({"policy": name, "reward": kind, **_plain(evaluation)})
    emit({"policies": results}, as_json=as_json, text="\n\n".join(map(_table, results)))


def _plain(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON types; what is unknown is null."""
    nested = ("estimates", "logged", "warnings")
    figures = {name: getattr(evaluation, name) for name in Evaluation.__slots__ if name not in nested}
    estimates = {name: _interval(estimate) for name, estimate in evaluation.estimates.items()}
    return {**estimates, "logged": _interval(evaluation.logged), **figures, "warnings": list(evaluation.warnings)}


def _interval(estimate: Estimate) -> dict[str, float | None]:
    return {key: finite(getattr(estimate, key)) for key in ("value", "low", "high")}


def _table(result: dict[str, Any]) -> str:
    unit = "tokens/s" if result["reward"] == "paper" else "times plain decoding"
    lines = [f"policy {result['policy']}: mean reward of a decision in the logged states, {unit}"]
    rows = []
    for name in ("ips", "snips", "dr", "logged"):
        value, low, high = (_number(result[name][key]) for key in ("value", "low", "high"))
        rows.append((name, value, f"[{low}, {high}]"))
    lines += [
        table([], rows, left=3, indent=2),
        f"  {result['num_decisions']} decisions made at random, in {result['num_clusters']} clusters of RL step and "
        f"worker, worth {result['effective']:.0f} of the policy's own",
    ]
    if result["num_without_choice"]:
        lines.append(f"  {result['num_without_choice']} more left out: their policy had no choice, so they say nothing")
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in result["warnings"])])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
