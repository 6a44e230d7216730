"""`tltlab verify`."""

from __future__ import annotations

from contextlib import ExitStack
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
from tltlab.sim.verification.decisions import Decisions, replay_decisions
from tltlab.sim.verification.errors import Errors
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
    wrong: dict[str, object] = {"--decisions": decisions or None, "--rl-steps": rl_steps, "--window": window}
    if policies is None:
        wrong = {"--repeats": repeats, "--out": out}
    for name, value in wrong.items():
        if value is not None:
            raise ConfigError(f"{name}: choose among recorded RL steps, or roll out new ones with --policies")
    found: Errors | Decisions
    allowed = tuple(allow_code or ())
    with ExitStack() as stack:
        if policies is not None:
            # Only here are engines needed.
            from tltlab.runtime.rollout.policy_rounds import roll_out

            stack.enter_context(code_allowed(allowed))
            named = of_policies.listed_policies(policies)
            session = partial(roll_out, run, named, rounds=repeats or ROUNDS, seed=seed, report=progress)
            samples = samples or of_policies.SAMPLES
            found = of_policies.verify_policies(named, session, samples=samples, seed=seed, out=out, jobs=jobs)
        else:
            trace = read(run)
            chosen = parse_rl_steps(rl_steps, trace.rl_steps)
            stack.enter_context(options.counting())
            if decisions:
                found = replay_decisions(trace, rl_steps=chosen, allow_code=allowed, jobs=jobs)
            elif is_log(trace):
                trace = trace if chosen is None else trace.select(chosen)
                found = verify_log(trace, costs=costs, workers=workers, window=window or LOG_WINDOW, jobs=jobs)
            elif costs is not None or workers is not None:
                raise ConfigError("--costs and --workers are for training logs: a recorded run has its own")
            else:
                found = run_verify(
                    run, rl_steps=chosen, window=window or WINDOW, samples=samples or SAMPLES, seed=seed,
                    allow_code=allowed, jobs=jobs,
                )  # fmt: skip
    emit(found.json(), as_json=as_json, text=found.text())
