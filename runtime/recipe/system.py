"""A recipe that names a system: sections that execute the system's row, and contradictions in the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tltlab.config import leaves
from tltlab.costs.load import load_costs
from tltlab.costs.profiles import find_model, nearest_engine, profile_costs
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError, refuse
from tltlab.planning.execution import EngineRun, engine_run
from tltlab.planning.systems import find_system
from tltlab.policies.policy import SHIPPED, load_policy

from .sections import SYSTEMS_POLICY, PartialConfig, ReuseConfig, Sections

DECIDED = ("policy", "max_draft_depth", "partial", "reuse", "one_step_off", "staleness")
"""Fields of `[rollout]` that follow from a system, as `drafter.schedule.kind` does."""


def sections_of_system(recipe: Sections) -> dict[str, Any]:
    """Return `[rollout]` and `[drafter]` of the recipe's system.

    ConfigError for an unknown system, and for parts of it that engines or the recipe lack, or that the recipe
    contradicts.
    """
    run, rollout, drafter = engine_run_of(recipe), recipe.rollout, recipe.drafter
    depth = max(strategy.draft_depth for strategy in run.policy.strategies)
    in_flight, reuse = run.in_flight, run.reuse
    if in_flight is not None:
        in_flight *= rollout.prompts_per_step * rollout.group_size
    decided: dict[str, Any] = {
        "policy": rollout.policy if _is_policy_of(run, rollout.policy) else SYSTEMS_POLICY,
        "max_draft_depth": max(depth, int(drafter is not None)),
        "partial": None if in_flight is None else PartialConfig(concurrency=int(in_flight), max_age=run.max_age),
        "reuse": None if reuse is None else ReuseConfig(leniency=reuse.leniency, residual=reuse.residual),
        "one_step_off": run.one_step_off,
        "staleness": run.staleness,
    }
    given = {name: getattr(rollout, name) for name in DECIDED if name in rollout.model_fields_set}
    if given.get("max_draft_depth", 0) >= depth:
        # An engine built for deeper drafts serves as well.
        decided |= {name: value for name, value in given.items() if name == "max_draft_depth"}
    kind = "always" if run.trains_drafter else "never"
    refuse([*_missing(recipe, run), *_contradictions(recipe, run, given, decided, kind)])
    sections: dict[str, Any] = {"rollout": rollout.model_copy(update=decided)}
    if drafter is not None:
        schedule = drafter.schedule.model_copy(update={"kind": kind})
        sections["drafter"] = drafter.model_copy(update={"schedule": schedule})
    return sections


def engine_run_of(recipe: Sections) -> EngineRun:
    """Return the settings that execute the recipe's system; ConfigError as `engine_run`."""
    system, cluster, costs = find_system(str(recipe.rollout.system)), recipe.cluster, None
    if system.budget is not None and not cluster.gpus_per_node:
        costs = load_costs("cpu-small")
    elif system.budget is not None:
        if cluster.gpu is None:
            raise ConfigError(f"{system.name} needs the cost of a pass on a GPU: name the GPU, cluster.gpu")
        model = find_model(recipe.model)
        engine = nearest_engine(cluster.gpu, model.name, model.weights)
        costs = profile_costs(engine, cluster.gpu, model, recipe.rollout.tensor_parallel_size)
    return engine_run(system, costs, _head(recipe) or "learned")


def system_settings(recipe: Sections) -> tuple[dict[str, Any] | None, list[str]]:
    """Return for a plan the settings that execute the recipe's system, and notes on how engines differ from it."""
    if recipe.rollout.system is None:
        return None, []
    system, run = find_system(recipe.rollout.system), engine_run_of(recipe)
    decided = set(DECIDED) - {"policy"}
    rollout = recipe.rollout.model_dump(include=decided, exclude_defaults=True)
    settings = {f"rollout.{name}": value for name, value in leaves(rollout)}
    if recipe.drafter is not None:
        settings["drafter.schedule.kind"] = recipe.drafter.schedule.kind
    strategies = [str(strategy) for strategy in run.policy.strategies]
    plan = {"name": system.name, "title": system.title, "strategies": strategies, "settings": settings}
    return plan, [f"{system.name}: {note}" for note in run.notes]


def give_way(fields: Mapping[str, Any]) -> None:
    """Remove the fields that an overriding system decides from a recipe's fields."""
    rollout, drafter = fields.get("rollout"), fields.get("drafter")
    schedule = drafter.get("schedule") if isinstance(drafter, dict) else None
    for section, names in ((rollout, DECIDED), (schedule, ("kind",))):
        for name in names:
            if isinstance(section, dict):
                section.pop(name, None)


def _head(recipe: Sections) -> str | None:
    """Return the name of the recipe's drafter with a network, first the one that it trains."""
    if recipe.drafter is not None:
        return recipe.drafter.name
    return next((name for name, spec in recipe.rollout.drafters.items() if isinstance(spec, LearnedSpec)), None)


def _missing(recipe: Sections, run: EngineRun) -> Iterator[str]:
    name, drafter = recipe.rollout.system, recipe.drafter
    if run.trains_drafter and drafter is None:
        yield f"{name} trains its drafter on idle workers: add a [drafter]"
    elif run.drafts_by_network and _head(recipe) is None:
        yield f"{name} drafts with a trained head: add a [drafter] with its drafter.checkpoint"
    elif run.drafts_by_network and not run.trains_drafter and drafter is not None and not drafter.pretrained:
        yield f"{name} drafts with a head that the run does not train: give drafter.checkpoint"
    if run.own_gpus and not (recipe.cluster.gpus_per_node and recipe.cluster.placement == "separate"):
        yield f"{name} needs GPUs of the trainers' own: set cluster.gpus_per_node and cluster.placement = 'separate'"


def _contradictions(
    recipe: Sections, run: EngineRun, given: dict[str, Any], decided: dict[str, Any], kind: str
) -> Iterator[str]:
    """Yield settings that contradict the recipe's system."""
    found = {f"rollout.{name}": (value, decided[name]) for name, value in given.items()}
    if recipe.drafter is not None and "kind" in recipe.drafter.schedule.model_fields_set:
        found["drafter.schedule.kind"] = recipe.drafter.schedule.kind, kind
    for name in run.policy.drafters.keys() & recipe.rollout.drafters.keys():
        found[f"rollout.drafters.{name}"] = recipe.rollout.drafters[name], run.policy.drafters[name]
    for name, (value, systems) in found.items():
        if value != systems:
            has = "a policy of its own" if systems == SYSTEMS_POLICY else systems
            yield f"{name} = {value} beside {recipe.rollout.system}, which has {has}: leave one of them out"


def _is_policy_of(run: EngineRun, policy: str) -> bool:
    """Return True for a `rollout.policy` that is the system's: unnamed, a shipped one, or the file of such a run."""
    if policy.endswith(".json") and Path(policy).is_file():
        return bool(load_policy(policy).provenance.get("system") == run.policy.provenance["system"])
    return policy == SYSTEMS_POLICY or SHIPPED.get(policy) == run.policy.model_copy(update={"provenance": {}})
