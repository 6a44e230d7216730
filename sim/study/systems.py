"""Systems from the literature as cells: each on its own GPUs or its share of them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.load import acceptance_text
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.costs.base import CostModel
from tltlab.costs.scaled import ScaledCosts
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.planning.composition import System
from tltlab.planning.planners import load_planner
from tltlab.planning.system_binding import BoundSystem, bind_assuming
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.records import Json
from tltlab.sim.engine.requests import Requests
from tltlab.sim.rl_steps import Colocated, Separate, Topology
from tltlab.sim.scenario import Scenario

from .sample import Scenarios
from .study import Cell


def why_not(system: System, scenario: Scenario) -> str:
    """Return why a system cannot be simulated here; empty where it can."""
    if system.planner is None:
        return ""
    if not scenario.shapes:
        return "no other shape to gather onto: give --gpus with several workers, or --shapes 1x8=COSTS"
    why = scenario.unplanned()
    return f"a planner is not simulated with {why}" if why else ""


def left_out(systems: Sequence[System], scenario: Scenario) -> dict[str, str]:
    """Return why some of all systems cannot be simulated here; ConfigError where they were named, and not all are."""
    reasons = {system.name: why for system in systems if (why := why_not(system, scenario))}
    if reasons and len(systems) < len(SYSTEMS):
        raise ConfigError("; ".join(f"system {name}: {why}" for name, why in reasons.items()))
    return reasons


def bind_all(systems: Sequence[System], scenario: Scenario) -> list[BoundSystem]:
    """Return the systems fitted to what is known here, with a default for what is not, but for those `left_out`."""
    without = left_out(systems, scenario)
    scenario.check_acceptance(())
    acceptance = replayable(scenario.acceptance, scenario.steps)
    fitted = scenario.acceptance.pooled(scenario.registry) if isinstance(scenario.acceptance, TraceAcceptance) else None
    bound = []
    for system in (system for system in systems if system.name not in without):
        binding = bind_assuming(system, scenario.costs, acceptance, fitted, scenario.registry)
        if generating_workers(system, scenario.workers) == scenario.workers and system.topology != "colocated":
            note = "a single worker's GPUs cannot be split: training has as many besides, which the others have not"
            binding = replace(binding, assumptions=(*binding.assumptions, note), defaults=(*binding.defaults, note))
        bound.append(binding)
    return bound


def system_cell(
    bound: BoundSystem,
    scenarios: Scenarios,
    rl_steps: Sequence[int],
    stages: StageCosts | None = None,
    gpus_per_worker: int | None = None,
    **changes: Any,
) -> Cell:
    """Return the cell of a system that has the GPUs of all workers; `changes` are fields of its scenario.

    The system determines acceptance, training on idle workers, and the placement that the settings leave open. A system
    whose trainer has its own GPUs generates on fewer workers. Raises ConfigError for stage costs of other GPUs.
    """
    system, config = bound.system, scenarios.config
    workers = config.num_workers(scenarios.trace)
    generating = generating_workers(system, workers)
    settings: Json = {
        "workload": system.workload, "online_updates": system.online_updates, "admission": system.admission,
        "acceptance": bound.acceptance, "workers": generating, "spot": bound.spot,
        "placement": config.placement or system.placement,
    }  # fmt: skip
    if system.draft_pass_share is not None:
        assert isinstance(config.costs, CostModel)
        settings["costs"] = ScaledCosts.wrapping(
            config.costs, pass_share=system.draft_pass_share, block=system.block_drafts
        )
    if system.planner is not None:
        settings["planner"] = load_planner(system.planner)
    if bound.acceptance is not scenarios.acceptance and not isinstance(bound.acceptance, TraceAcceptance | None):
        settings["acceptance_name"] = None
    scenario = scenarios.of(rl_steps, **settings | changes)
    topology: Topology = Colocated(gpus_per_worker=gpus_per_worker or scenario.costs.tensor_parallel)
    if stages is not None and system.topology == "separate":
        # Refuses stage costs that are for other GPUs than all of them.
        topology.pools(workers, stages)
        train_gpus = max(1, workers - generating) * topology.gpus_per_worker
        stages = on_gpus(stages, train_gpus)
        topology = Separate(
            gpus_per_worker=topology.gpus_per_worker, train_gpus=train_gpus, max_staleness=min(1, system.max_staleness)
        )
    return Cell(
        name=system.name, policy=bound.policy, scenario=scenario, system=bound, stages=stages, topology=topology,
        manifest=scenarios.trace.manifest,
    )  # fmt: skip


def cell_named(
    name: str, scenarios: Scenarios, stages: StageCosts | None = None, gpus_per_worker: int | None = None
) -> Cell:
    """Return the cell of the system of that name; training on idle workers in the settings replaces the system's.

    Raises ConfigError for an unknown name, and with the reason for a system that cannot be simulated here.
    """
    rl_steps = scenarios.config.steps_of(scenarios.trace) or scenarios.trace.rl_steps
    scenario = scenarios.of(rl_steps)
    (bound,) = bind_all(list(find_systems([name])), scenario)
    if scenario.spot is not None:
        bound = replace(bound, spot=scenario.spot)
    granted = acceptance_text(bound.acceptance) if bound.defaults else scenario.acceptance_name
    cell = system_cell(bound, scenarios, rl_steps, stages, gpus_per_worker, acceptance_name=granted)
    return replace(cell, nominal=scenario)


def replayable(acceptance: Acceptance | None, steps: Sequence[Requests]) -> Acceptance | None:
    """Return the acceptance; where it is replayed, with those drafters alone that were recorded for every response."""
    if not isinstance(acceptance, TraceAcceptance):
        return acceptance
    drafters = tuple(name for name in acceptance.drafters if _recorded(acceptance, name, steps))
    if drafters == acceptance.drafters:
        return acceptance
    recorded = copy(acceptance)
    recorded.drafters = drafters
    return recorded if drafters else None


def _recorded(acceptance: TraceAcceptance, drafter: str, steps: Sequence[Requests]) -> bool:
    try:
        for step in steps:
            for key, num_tokens in zip(step.keys, step.response_tokens, strict=True):
                acceptance.positions(drafter, key, num_tokens)
    except ConfigError:
        return False
    return True


def generating_workers(system: System, workers: int) -> int:
    """Return how many of `workers` workers' GPUs generate; a single one generates with all it has."""
    if system.topology == "colocated" or workers == 1:
        return workers
    return min(workers - 1, max(1, round(workers * system.generating_share)))


def on_gpus(stages: StageCosts, num_gpus: int) -> StageCosts:
    """Return the stages on other GPUs: log-probs and training inversely proportional, grading and sync unchanged.

    Costs that are not counted in GPUs stay unchanged.
    """
    if stages.num_gpus is None:
        return stages
    factor = stages.num_gpus / num_gpus
    update: Json = {"num_gpus": num_gpus}
    for name in ("inference", "train"):
        part = getattr(stages, name)
        if part is not None:
            terms = part.model_dump()
            update[name] = part.model_copy(update={n: v * factor for n, v in terms.items() if n.endswith("_s")})
    return stages.model_copy(update=update)
