"""One system from the literature in simulation, on its own GPUs or its share of them, whole RL steps where asked."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_stages
from tltlab.costs.scaled import ScaledCosts
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.planning.composition import System
from tltlab.planning.system_binding import BoundSystem, bind
from tltlab.planning.systems import find_systems
from tltlab.sim.config import SimulationConfig, Source
from tltlab.sim.engine.requests import Requests
from tltlab.sim.rl_steps import RunResult, run_steps
from tltlab.sim.scenario import Scenario, policy_name
from tltlab.sim.simulate import SimResult, simulated
from tltlab.sim.topology import Colocated, Separate, Topology
from tltlab.traces.trace import Manifest, Trace


@dataclass(frozen=True, kw_only=True)
class SystemRun:
    """One system's simulation; `whole` are its RL steps where stage costs were given."""

    bound: BoundSystem
    result: SimResult
    whole: RunResult | None


def simulate_system(
    trace: str | Path | Trace,
    bound: BoundSystem,
    config: SimulationConfig = SimulationConfig(),
    *,
    stages: StageCosts | Source | None = None,
    gpus_per_worker: int | None = None,
    record_iterations: bool = False,
    **settings: Any,
) -> SystemRun:
    """Simulate a bound system on the GPUs of all workers; `settings` are fields that replace those of `config`.

    The system determines acceptance, training on idle workers, and the placement that `config` leaves open. A system
    whose trainer has its own GPUs generates on fewer workers. Raises ConfigError as `simulate` does.
    """
    trace = read(trace)
    config, machine = config.changed(settings, simulate_system).on_trace(trace)
    stages = machine.stages if stages is None and machine is not None else stages
    workers = config.num_workers(trace)
    scenario = Scenario.of(trace, config, **settings_of(bound, workers, config, config.find_costs(trace)[0]))
    return run_bound(scenario, bound, trace.manifest, workers, stages, gpus_per_worker, record_iterations)


def settings_of(bound: BoundSystem, workers: int, config: SimulationConfig, costs: CostModel) -> dict[str, Any]:
    """The fields of a scenario that are the system's on `workers` workers."""
    system = bound.system
    settings: dict[str, Any] = {
        "workload": system.workload, "online_updates": system.online_updates, "admission": system.admission,
        "acceptance": bound.acceptance, "workers": generating_workers(system, workers), "spot": bound.spot,
        "placement": config.placement or system.placement,
    }  # fmt: skip
    if system.draft_pass_share is not None:
        settings["costs"] = ScaledCosts.wrapping(costs, pass_share=system.draft_pass_share, block=system.block_drafts)
    return settings


def run_bound(
    scenario: Scenario,
    bound: BoundSystem,
    manifest: Manifest,
    workers: int,
    stages: StageCosts | Source | None,
    gpus_per_worker: int | None,
    record_iterations: bool = False,
) -> SystemRun:
    """Simulate a system that has the GPUs of `workers` workers, in its scenario."""
    result = simulated(scenario, bound.policy, policy_name(bound.policy), manifest, record_iterations)
    if stages is None:
        return SystemRun(bound=bound, result=result, whole=None)
    stages = load_stages(stages)
    gpus = gpus_per_worker or scenario.costs.tensor_parallel
    topology: Topology = Colocated(gpus_per_worker=gpus)
    if bound.system.topology == "separate":
        # Refuses stage costs that are for other GPUs than all of them.
        topology.pools(workers, stages)
        train_gpus = max(1, workers - scenario.workers) * gpus
        topology = Separate(
            gpus_per_worker=gpus, train_gpus=train_gpus, max_staleness=min(1, bound.system.max_staleness)
        )
        stages = on_gpus(stages, train_gpus)
    return SystemRun(
        bound=bound,
        result=result,
        whole=run_steps(result, stages, topology=topology, fused=bound.system.fused, streamed=bound.system.streamed),
    )


def by_name(
    trace: str | Path | Trace, name: str, config: SimulationConfig = SimulationConfig(), **options: Any
) -> SystemRun:
    """Simulate the system of that name; the `options` are those of `simulate_system`.

    Training on idle workers in `config` replaces that of the system. Raises ConfigError for an unknown name, and with
    the reason for a system that cannot be simulated here.
    """
    (system,), trace = find_systems([name]), read(trace)
    scenario = Scenario.of(trace, config)
    try:
        bound = bind(
            system, scenario.costs, replayable(scenario.acceptance, scenario.steps), drafters=scenario.registry
        )
    except ConfigError as error:
        raise ConfigError(f"system {name}: {error}{partly_recorded(scenario)}") from error
    if scenario.spot is not None:
        bound = replace(bound, spot=scenario.spot)
    run = simulate_system(trace, bound, config, **options)
    # As the user called it: the model itself only knows its kind.
    named = replace(run.result.scenario, acceptance_name=scenario.acceptance_name)
    return replace(run, result=replace(run.result, scenario=named))


def replayable(acceptance: Acceptance | None, steps: Sequence[Requests]) -> Acceptance | None:
    """The acceptance; where it is replayed, with those drafters alone that were recorded for every response."""
    if not isinstance(acceptance, TraceAcceptance):
        return acceptance
    drafters = tuple(name for name in acceptance.drafters if _recorded(acceptance, name, steps))
    if drafters == acceptance.drafters:
        return acceptance
    recorded = copy(acceptance)
    recorded.drafters = drafters
    return recorded if drafters else None


def partly_recorded(scenario: Scenario) -> str:
    """Advice on drafters that were recorded for some responses only, to be added to an error message."""
    acceptance = scenario.acceptance
    recorded = replayable(acceptance, scenario.steps)
    if acceptance is None or recorded is acceptance:
        return ""
    names = sorted(set(acceptance.drafters) - set(() if recorded is None else recorded.drafters))
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
    """How many of `workers` workers' GPUs generate; a single one cannot be split, and generates with all it has."""
    if system.topology == "colocated" or workers == 1:
        return workers
    return min(workers - 1, max(1, round(workers * system.generating_share)))


def on_gpus(stages: StageCosts, num_gpus: int) -> StageCosts:
    """The same stages on other GPUs: log-probs and training inversely proportional, grading and sync unchanged.

    Costs that are not counted in GPUs stay unchanged.
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
