"""One system from the literature in simulation: on its own GPUs or its share of them, whole RL steps where asked."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tltlab.acceptance.load import Acceptance, TraceAcceptance
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.costs.stage_files import load_stages
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.planning.system_binding import BoundSystem, bind
from tltlab.planning.systems import System, find_systems
from tltlab.sim.engine.requests import Requests
from tltlab.traces.trace import Trace

from .rl_steps import RunResult, run_steps
from .scenario import Scenario, load_spot_training
from .simulate import SimResult, simulate
from .topology import Colocated, Separate, Topology


@dataclass(frozen=True, kw_only=True)
class SystemRun:
    """One system's simulation; `whole` are its RL steps where stage costs were given."""

    bound: BoundSystem
    result: SimResult
    whole: RunResult | None


def simulate_system(
    trace: Trace,
    bound: BoundSystem,
    *,
    costs: CostModel,
    workers: int,
    stages: StageCosts | None = None,
    gpus_per_worker: int | None = None,
    placement: str | None = None,
    **settings: Any,
) -> SystemRun:
    """Simulate a bound system on the GPUs of `workers` workers; `settings` are further ones of `simulate`.

    A system whose trainer has GPUs of its own generates on fewer workers. `placement` replaces the system's. Raises
    ConfigError as `simulate` does.
    """
    generating = generating_workers(bound.system, workers)
    result = simulate(
        trace,
        bound.policy,
        costs=costs,
        acceptance=bound.acceptance,
        workers=generating,
        placement=placement or bound.system.placement,
        spot=bound.spot,
        **settings,
    )
    if stages is None:
        return SystemRun(bound=bound, result=result, whole=None)
    gpus = gpus_per_worker or costs.tensor_parallel
    topology: Topology = Colocated(gpus_per_worker=gpus)
    if bound.system.topology == "separate":
        # Refuses stage costs that are for other GPUs than all of them.
        topology.pools(workers, stages)
        train_gpus = (workers - generating) * gpus
        topology = Separate(gpus_per_worker=gpus, train_gpus=train_gpus)
        stages = on_gpus(stages, train_gpus)
    return SystemRun(bound=bound, result=result, whole=run_steps(result, stages, topology=topology))


def by_name(
    trace: Trace,
    name: str,
    *,
    costs: CostModel | dict[str, Any] | str | Path | None = None,
    acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
    workers: int | None = None,
    stages: StageCosts | dict[str, Any] | str | Path | None = None,
    spot: SpotTraining | dict[str, Any] | str | Path | None = None,
    **settings: Any,
) -> SystemRun:
    """Simulate the system of that name; `spot` replaces what it trains on idle workers, `settings` are `simulate`'s.

    Raises ConfigError for an unknown name, and with the reason for a system that cannot be simulated here.
    """
    (system,) = find_systems([name])
    scenario = Scenario.of(
        trace, costs=costs, acceptance=acceptance, workers=workers, rl_steps=settings.get("rl_steps")
    )
    try:
        bound = bind(system, scenario.costs, replayable(scenario.acceptance, scenario.steps))
    except ConfigError as error:
        raise ConfigError(f"system {name}: {error}{partly_recorded(scenario)}") from error
    run = simulate_system(
        trace,
        bound if spot is None else replace(bound, spot=load_spot_training(spot)),
        costs=scenario.costs,
        workers=scenario.workers,
        stages=None if stages is None else load_stages(stages),
        **settings,
    )
    # As the user called them: the models themselves only know their kind.
    named = replace(run.result.scenario, costs_name=scenario.costs_name, acceptance_name=scenario.acceptance_name)
    return replace(run, result=replace(run.result, scenario=named))


def replayable(acceptance: Acceptance | None, steps: Sequence[Requests]) -> Acceptance | None:
    """The acceptance; where it is replayed, with those drafters alone that were recorded for every response."""
    if not isinstance(acceptance, TraceAcceptance):
        return acceptance
    known = tuple(name for name in acceptance.drafters if _recorded(acceptance, name, steps))
    if known == acceptance.drafters:
        return acceptance
    kept = copy(acceptance)
    kept.drafters = known
    return kept if known else None


def partly_recorded(scenario: Scenario) -> str:
    """What to do about drafters that were recorded for some responses only, to be added to a complaint."""
    all_known, acceptance = replayable(scenario.acceptance, scenario.steps), scenario.acceptance
    if acceptance is None or all_known is acceptance:
        return ""
    names = sorted(set(acceptance.drafters) - set(() if all_known is None else all_known.drafters))
    return (
        f"; acceptance.parquet has {', '.join(names)} for some responses only: give --acceptance the file that "
        "calibrate fits to it"
    )


def _recorded(acceptance: TraceAcceptance, drafter: str, steps: Sequence[Requests]) -> bool:
    try:
        for step in steps:
            for key, num_tokens in zip(step.keys, step.response_tokens, strict=True):
                acceptance.positions(drafter, key, num_tokens)
    except ConfigError:
        return False
    return True


def generating_workers(system: System, workers: int) -> int:
    """How many of `workers` workers' GPUs generate; ConfigError where none is left to train."""
    if system.topology == "colocated":
        return workers
    generating = max(1, round(workers * system.generating_share))
    if generating >= workers:
        raise ConfigError(f"{workers} worker's GPUs cannot be split into generation and training: give 2 or more")
    return generating


def on_gpus(stages: StageCosts, num_gpus: int) -> StageCosts:
    """The same stages on other GPUs: log-probs and training inversely proportional, grading and sync unchanged.

    Costs that are not counted in GPUs stay as they are.
    """
    if stages.num_gpus is None:
        return stages
    factor = stages.num_gpus / num_gpus
    inference, train = stages.inference, stages.train
    return stages.model_copy(
        update={
            "num_gpus": num_gpus,
            "inference": inference and inference.model_copy(update=_times(inference.model_dump(), factor)),
            "train": train and train.model_copy(update=_times(train.model_dump(), factor)),
        }
    )


def _times(terms: dict[str, Any], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in terms.items() if name.endswith("_s")}
