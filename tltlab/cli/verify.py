"""`tltlab verify`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tltlab.calibration.api import parse_rl_steps
from tltlab.console import emit, progress
from tltlab.errors import ConfigError
from tltlab.importers.sources import Imported, read_lengths
from tltlab.options import ALLOW_CODE_OPTION, check, command, option
from tltlab.own import code_allowed
from tltlab.records import frozen
from tltlab.sim import options
from tltlab.sim.verification import played as of_policies
from tltlab.sim.verification.decisions import Decisions, replay_decisions
from tltlab.sim.verification.errors import Errors
from tltlab.sim.verification.plans import replay_plans
from tltlab.sim.verification.rollouts import verify as run_verify
from tltlab.sim.verification.training_log import WINDOW as LOG_WINDOW
from tltlab.sim.verification.training_log import is_log, verify_log

WINDOW, SAMPLES, ROUNDS = 8, 3, 5


@frozen
class VerifyConfig:
    """Options of `tltlab verify`."""

    policies: str | None = option(
        "Run these for real: names, policy files, package.module:Class, ngram:4 (always 4 tokens), ngram:4@8 "
        "(while at most 8 run), separated by commas; or 'default'."
    )
    repeats: int | None = option(f"Rounds: rollouts of each policy. [default: {ROUNDS}]", min=1)
    out: Path | None = option("Keep what --policies ran as a RUN of its own. [default: it is not kept]", parse=Path)
    rl_steps: options.RlSteps = None
    window: int | None = option(
        f"Other RL steps to fit on, the nearest. [default: {WINDOW}, of a log {LOG_WINDOW}]", min=2
    )
    costs: options.LogCosts = None
    workers: options.LogWorkers = None
    decisions: bool = option(
        "Make the recorded decisions again, with the recorded times and acceptance.", False, names=("--decisions",)
    )
    samples: int | None = option(f"Sampled simulations per prediction. [default: {SAMPLES}, with --policies 8]", min=1)
    seed: int = option("Seed of sampled acceptance and drawn lengths.", 0, min=0)
    jobs: options.Jobs = None

    def __post_init__(self) -> None:
        check(self)
        unused = ("repeats", "out") if self.policies is None else ("decisions", "rl_steps", "window")
        for name in unused:
            if getattr(self, name) not in (None, False):
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option}: choose among recorded RL steps, or roll out new ones with --policies")


@command
def verify(
    run: Annotated[Path, typer.Argument(help="A RUN folder, a recorded trace of shipped policies, or a training log.")],
    config: VerifyConfig,
    allow_code: list[str] | None = ALLOW_CODE_OPTION,
) -> None:
    """Predict every RL step of a run from the other ones, and compare with what was measured.

    With --policies: roll out each policy on this machine, with the run's model and data, and test whether the simulator
    predicts their times and their order. It takes engines, and some minutes.

    With --decisions: play each rollout through the simulator with its recorded times and acceptance, and print which
    share of the policy's decisions, and of the states they were made in, come out the same. Of a run with a planner,
    ask the planner again in its recorded states.

    For a training log, which has no iterations, later rollouts and whole RL steps are predicted from earlier ones.

    Example: tltlab verify demo --json

    Example: tltlab verify demo --policies none,table,beg-mab,ngram:4@8,demo/policy.json
    """
    source = None if config.policies else read_lengths(run)
    found = _found(run, config, source, tuple(allow_code or ()))
    lists = {} if source is None else {"assumed": source.notes, "read": source.read, "ignored": source.ignored}
    emit(found.json(), found.text(lists))


def _found(run: Path, config: VerifyConfig, source: Imported | None, allowed: tuple[str, ...]) -> Errors | Decisions:
    if (policies := config.policies) is not None:
        # Only here are engines needed.
        from tltlab.runtime.rollout.policy_rounds import roll_out

        named, samples = of_policies.listed_policies(policies), config.samples or of_policies.SAMPLES
        session = partial(roll_out, run, named, rounds=config.repeats or ROUNDS, seed=config.seed, report=progress)
        with code_allowed(allowed):
            return of_policies.verify_policies(
                named, session, samples=samples, seed=config.seed, out=config.out, jobs=config.jobs
            )
    assert source is not None
    trace = source.trace
    chosen = parse_rl_steps(config.rl_steps, trace.rl_steps)
    with options.counting():
        if config.decisions:
            if trace.table("plans") is not None:
                return replay_plans(trace, rl_steps=chosen, allow_code=allowed)
            return replay_decisions(trace, rl_steps=chosen, allow_code=allowed, jobs=config.jobs)
        if is_log(trace):
            return verify_log(
                trace if chosen is None else trace.select(chosen), costs=config.costs, workers=config.workers,
                window=config.window or LOG_WINDOW, jobs=config.jobs,
            )  # fmt: skip
        if config.costs is not None or config.workers is not None:
            raise ConfigError("--costs and --workers are for training logs: a recorded run has its own")
        return run_verify(
            run, rl_steps=chosen, window=config.window or WINDOW, samples=config.samples or SAMPLES, seed=config.seed,
            allow_code=allowed, jobs=config.jobs,
        )  # fmt: skip
