"""`tltlab verify`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tltlab.calibration.api import parse_rl_steps
from tltlab.console import AllowCode, Json, emit, progress
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.own import code_allowed
from tltlab.sim.cli import options
from tltlab.sim.verification import played as of_policies
from tltlab.sim.verification.decisions import replay_decisions
from tltlab.sim.verification.rollouts import verify as run_verify
from tltlab.sim.verification.training_log import WINDOW as LOG_WINDOW
from tltlab.sim.verification.training_log import is_log, verify_log

WINDOW, SAMPLES, ROUNDS = 8, 3, 5


def verify(
    run: Annotated[Path, typer.Argument(help="A RUN folder, a recorded trace of shipped policies, or a training log.")],
    policies: Annotated[
        str | None,
        typer.Option(
            help="Run these for real: names, policy files, package.module:Class, ngram:4 (always 4 tokens), "
            "ngram:4@8 (while at most 8 run), separated by commas; or 'default'."
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds: rollouts of each policy. [default: {ROUNDS}]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep what --policies ran as a RUN of its own. [default: it is not kept]")
    ] = None,
    rl_steps: options.RlSteps = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, help=f"Other RL steps to fit on, the nearest. [default: {WINDOW}, of a log {LOG_WINDOW}]"),
    ] = None,
    costs: options.LogCosts = None,
    workers: options.LogWorkers = None,
    decisions: Annotated[
        bool,
        typer.Option("--decisions", help="Make the recorded decisions again, with the recorded times and acceptance."),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help=f"Sampled simulations per prediction. [default: {SAMPLES}, with --policies 8]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled acceptance and drawn lengths.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. [default: the cores here]")] = None,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Predict every RL step of a run from the other ones, and compare with what was measured.

    With --policies: roll out each policy on this machine, with the run's model and data, and test whether the simulator
    predicts their times and their order. It takes engines, and some minutes.

    With --decisions: play each rollout through the simulator with its recorded times and acceptance, and print which
    share of the policy's decisions, and of the states they were made in, come out the same.

    For a training log, which has no iterations, later rollouts and whole RL steps are predicted from earlier ones.

    Example: tltlab verify demo --json

    Example: tltlab verify demo --policies none,table,beg-mab,ngram:4@8,demo/policy.json
    """
    if policies is None:
        if repeats is not None or out is not None:
            raise ConfigError("--repeats and --out belong to rollouts on this machine: name them with --policies")
        trace = read(run)
        chosen = parse_rl_steps(rl_steps, trace.rl_steps)
        if decisions:
            with options.counting():
                played = replay_decisions(trace, rl_steps=chosen, allow_code=allow_code or (), jobs=jobs)
            emit(played.json(), as_json=as_json, text=played.text())
            return
        if is_log(trace):
            trace = trace if chosen is None else trace.select(chosen)
            with options.counting():
                log = verify_log(trace, costs=costs, workers=workers, window=window or LOG_WINDOW, jobs=jobs)
            emit(log.json(), as_json=as_json, text=log.text())
            return
        if costs is not None or workers is not None:
            raise ConfigError("--costs and --workers are for training logs: a recorded run has its own")
        with options.counting():
            verification = run_verify(
                run, rl_steps=chosen, window=window or WINDOW, samples=samples or SAMPLES, seed=seed,
                allow_code=allow_code or (), jobs=jobs,
            )  # fmt: skip
        emit(verification.json(), as_json=as_json, text=verification.text())
        return
    if decisions:
        raise ConfigError("--decisions is about a recorded run, --policies rolls out new ones")
    if rl_steps is not None or window is not None:
        raise ConfigError("--rl-steps and --window choose among recorded RL steps, --policies rolls out new ones")
    # Only here are engines needed.
    from tltlab.runtime.rollout.policy_rounds import roll_out

    with code_allowed(allow_code or ()):
        chosen_policies = of_policies.listed_policies(policies)
        session = partial(roll_out, run, chosen_policies, rounds=repeats or ROUNDS, seed=seed, report=progress)
        rollouts = of_policies.verify_policies(
            chosen_policies, session, samples=samples or of_policies.SAMPLES, seed=seed, out=out, jobs=jobs
        )
    emit(rollouts.json(), as_json=as_json, text=rollouts.text())
