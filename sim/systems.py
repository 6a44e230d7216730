"""Systems from the literature in simulation: each on its own GPUs or its share of them, whole RL steps where asked.

All of a comparison replay the same responses with the same luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, delayed, parallel_config

from tltlab.acceptance.load import (
    Acceptance,
    SettledModel,
    TraceAcceptance,
    load_acceptance,
)
from tltlab.arrays import Floats
from tltlab.costs.base import SpeculationCosts
from tltlab.costs.load import load_stages
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.planning.composition import System
from tltlab.planning.system_binding import BoundSystem, PerDrafter, bind, bind_assuming
from tltlab.planning.systems import find_systems
from tltlab.strategy import MODEL_FREE
from tltlab.traces.trace import Trace, read

from .config import SimulationConfig, Source
from .engine.requests import Requests
from .rl_steps import RunResult, run_steps
from .scenario import Scenario
from .sensitivity import Variant, over_ranges
from .simulate import SimResult, simulate
from .sweep import ratio_columns
from .topology import Colocated, Separate, Topology

RANGE_STEPS = 2
"""RL steps, the first ones, on which plausible ranges are tried."""


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

    Acceptance and what idle workers train are the system's, and so is the placement that `config` leaves open. A system
    whose trainer has GPUs of its own generates on fewer workers. Raises ConfigError as `simulate` does.
    """
    config, trace = config.changed(settings, simulate_system), read(trace)
    workers = config.num_workers(trace)
    generating, system = generating_workers(bound.system, workers), bound.system
    config = replace(config, workload=system.workload, online_updates=system.online_updates, admission=system.admission)
    if system.draft_pass_share is not None:
        costs, _ = config.find_costs(trace)
        changed = SpeculationCosts.of(costs, pass_share=system.draft_pass_share, block=system.block_drafts)
        config = replace(config, costs=changed)
    result = simulate(
        trace,
        bound.policy,
        config,
        acceptance=bound.acceptance,
        workers=generating,
        placement=config.placement or bound.system.placement,
        spot=bound.spot,
        record_iterations=record_iterations,
    )
    if stages is None:
        return SystemRun(bound=bound, result=result, whole=None)
    stages = load_stages(stages)
    gpus = gpus_per_worker or result.scenario.costs.tensor_parallel
    topology: Topology = Colocated(gpus_per_worker=gpus)
    if bound.system.topology == "separate":
        # Refuses stage costs that are for other GPUs than all of them.
        topology.pools(workers, stages)
        train_gpus = max(1, workers - generating) * gpus
        topology = Separate(gpus_per_worker=gpus, train_gpus=train_gpus, max_staleness=min(1, system.max_staleness))
        stages = on_gpus(stages, train_gpus)
    return SystemRun(bound=bound, result=result, whole=run_steps(result, stages, topology=topology))


def by_name(
    trace: str | Path | Trace, name: str, config: SimulationConfig = SimulationConfig(), **options: Any
) -> SystemRun:
    """Simulate the system of that name; the `options` are those of `simulate_system`.

    What `config` trains on idle workers replaces what the system does. Raises ConfigError for an unknown name, and with
    the reason for a system that cannot be simulated here.
    """
    (system,), trace = find_systems([name]), read(trace)
    scenario = Scenario.of(trace, config)
    try:
        bound = bind(system, scenario.costs, replayable(scenario.acceptance, scenario.steps))
    except ConfigError as error:
        raise ConfigError(f"system {name}: {error}{partly_recorded(scenario)}") from error
    if scenario.spot is not None:
        bound = replace(bound, spot=scenario.spot)
    run = simulate_system(trace, bound, config, **options)
    # As the user called it: the model itself only knows its kind.
    named = replace(run.result.scenario, acceptance_name=scenario.acceptance_name)
    return replace(run, result=replace(run.result, scenario=named))


def compare_systems(
    trace: str | Path | Trace,
    systems: str | Sequence[str | System] = "all",
    config: SimulationConfig = SimulationConfig(),
    *,
    model_free_acceptance: Acceptance | Source | None = None,
    stages: StageCosts | Source | None = None,
    gpus_per_worker: int | None = None,
    repeats: int = 1,
    jobs: int = 1,
    ranges: bool | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """One row per system, the fastest first: a simulation, on the same responses with the same luck.

    `settings` are fields of `SimulationConfig` that replace those of `config`; placement and spot training are the
    systems' own. All have the GPUs of `workers` workers of `gpus_per_worker` (default: the costs' tensor parallelism).
    Columns: `system`, `title`, `makespan_s` (of a rollout, mean over RL steps and repeats), `ratio` to verl (or
    the first system where that is not among them; below 1 is faster) with its paired bootstrap interval `ratio_low`
    to `ratio_high` over RL steps, `regret` of the rollout to the clairvoyant bound over all strategies of all systems
    on all workers (None under a per-request budget), `lossless`, `mean_accept_length`, `bubble_fraction`, `workers`
    (those that generate), `assumptions`, `stand_ins`, `defaults`, `source`. With `stages`: `step_s`, `step_ratio`,
    `step_ratio_low`, `step_ratio_high` and `rollout_share` of whole RL steps, by which the rows are then ordered.

    No system is left out: a number that is missing takes a default that `defaults` names. Where there is one (or with
    `ranges` True; False: never) `attrs["ranges"]` has what `over_ranges` finds over the plausible range of each on the
    first `RANGE_STEPS` RL steps, and rows have the least and largest of their ratios and ranks there: `ratio_least`,
    `ratio_most`, `rank_least`, `rank_most`. `attrs` has `baseline`, `num_rl_steps`, `num_workers`, `num_gpus`
    and the costs' `evidence` (`Scenario.evidence`) too.

    >>> compare_systems("traces/tiny", "verl,tlt-base").set_index("system").ratio  # doctest: +SKIP
    """
    if repeats < 1 or jobs < 1:
        raise ConfigError(f"repeats and jobs must be at least 1, got {repeats} and {jobs}")
    config = replace(config.changed(settings, compare_systems), placement=None, spot=None)
    trace = read(trace)
    # Refuses what is wrong with the trace or the settings before anything is called left out.
    scenario = Scenario.of(trace, config)
    model_free = None if model_free_acceptance is None else load_acceptance(model_free_acceptance)
    bound = bind_all(find_systems(systems), scenario, model_free)
    config = replace(config, costs=scenario.costs)
    placed = {"stages": None if stages is None else load_stages(stages), "gpus_per_worker": gpus_per_worker}

    def measure(variants: Sequence[Variant], steps: Sequence[Requests] = scenario.steps) -> list[_Outcome]:
        chosen = replace(config, rl_steps=[step.rl_step for step in steps])
        tasks = [
            (one, replace(chosen, costs=costs, seed=config.seed + k)) for one, costs in variants for k in range(repeats)
        ]
        with parallel_config(backend="loky", inner_max_num_threads=1):
            measured = Parallel(n_jobs=jobs)(delayed(_measured)(trace, one, seeded, **placed) for one, seeded in tasks)
        return [_mean(measured[i * repeats : (i + 1) * repeats]) for i in range(len(variants))]

    measured = measure([(one, scenario.costs) for one in bound])
    outcomes = {one.system.name: outcome for one, outcome in zip(bound, measured, strict=True)}
    bound_s = _bound_s(scenario, bound, repeats)
    baseline = "verl" if "verl" in outcomes else bound[0].system.name
    base = outcomes[baseline]
    rows = [_row(one, outcomes[one.system.name], base, bound_s, scenario) for one in bound]
    order = "makespan_s" if stages is None else "step_s"
    table = pd.DataFrame(rows).sort_values(order, kind="stable", ignore_index=True)
    ends = []
    if ranges or (ranges is None and any(one.defaults for one in bound)):
        first = scenario.steps[:RANGE_STEPS]
        seconds = {name: outcome.seconds(len(first)) for name, outcome in outcomes.items()}
        ends = over_ranges(
            bound, scenario.costs, seconds, lambda variants: [o.seconds(len(first)) for o in measure(variants, first)]
        )
        _add_ranges(table, ends, seconds, baseline)
    table.attrs.update(
        ranges=ends,
        left_out={},
        baseline=baseline,
        num_rl_steps=len(scenario.steps),
        num_workers=scenario.workers,
        num_gpus=scenario.workers * (gpus_per_worker or scenario.costs.tensor_parallel),
        evidence=scenario.evidence(s for one in bound for s in one.policy.strategies),
    )
    return table


def bind_all(systems: Sequence[System], scenario: Scenario, model_free: Acceptance | None) -> list[BoundSystem]:
    """The systems fitted to what is known here, with defaults for what is not."""
    acceptance = replayable(scenario.acceptance, scenario.steps)
    fitted = scenario.acceptance.pooled() if isinstance(scenario.acceptance, TraceAcceptance) else None
    bound = []
    for system in systems:
        one = bind_assuming(system, scenario.costs, acceptance, model_free, fitted)
        if generating_workers(system, scenario.workers) == scenario.workers and system.topology != "colocated":
            note = "a single worker's GPUs cannot be split: training has as many besides, which the others have not"
            one = replace(one, assumptions=(*one.assumptions, note), defaults=(*one.defaults, note))
        bound.append(one)
    return bound


def _add_ranges(table: pd.DataFrame, ends: Sequence[dict[str, Any]], seconds: dict[str, float], baseline: str) -> None:
    """The least and largest ratio and rank of each row, over what was assumed and the ends of its range."""
    usual = {"seconds": seconds, "order": sorted(seconds, key=lambda name: seconds[name])}
    for at, name in enumerate(table["system"]):
        ratios = [end["seconds"][name] / end["seconds"][baseline] for end in (usual, *ends)]
        ranks = [end["order"].index(name) + 1 for end in (usual, *ends)]
        table.loc[at, ["ratio_least", "ratio_most"]] = min(ratios), max(ratios)
        table.loc[at, ["rank_least", "rank_most"]] = min(ranks), max(ranks)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Seconds per RL step, and means over them."""

    makespan_s: Floats
    step_s: Floats | None
    mean_accept_length: float | None
    bubble_fraction: float | None
    off_policy_share: float
    wasted_share: float

    def seconds(self, num_steps: int) -> float:
        """Mean of the first RL steps: of whole ones where they are known, else of their rollouts."""
        return float(np.mean((self.makespan_s if self.step_s is None else self.step_s)[:num_steps]))


def _measured(trace: Trace, bound: BoundSystem, config: SimulationConfig, **placed: Any) -> _Outcome:
    run = simulate_system(trace, bound, config, **placed)
    summary = replace(run.result, bounds_s=lambda: None).summary
    trained = max(1.0, float(sum(r.requests.lengths.sum() for r in run.result.rollouts)))
    wasted = sum(r.wasted_tokens for r in run.result.rollouts)
    return _Outcome(
        makespan_s=np.array([rollout.makespan_s for rollout in run.result.rollouts]),
        step_s=None if run.whole is None else run.whole.steps["step_s"].to_numpy(np.float64),
        mean_accept_length=summary["mean_accept_length"],
        bubble_fraction=summary["bubble_fraction"],
        off_policy_share=sum(r.old_tokens for r in run.result.rollouts) / trained,
        wasted_share=wasted / (trained + wasted),
    )


def _row(
    bound: BoundSystem, outcome: _Outcome, base: _Outcome, bound_s: float | None, scenario: Scenario
) -> dict[str, Any]:
    makespan_s = float(outcome.makespan_s.mean())
    row: dict[str, Any] = {
        "system": bound.system.name,
        "title": bound.system.title,
        "makespan_s": makespan_s,
        **ratio_columns("ratio", outcome.makespan_s, base.makespan_s, scenario.seed),
        "regret": makespan_s / bound_s - 1
        if bound_s and bound.policy.budget is None and bound.system.same_work
        else None,
        "lossless": bound.system.lossless,
        "on_policy": bound.system.on_policy,
        "mean_accept_length": outcome.mean_accept_length,
        "bubble_fraction": outcome.bubble_fraction,
        "off_policy_share": outcome.off_policy_share,
        "wasted_share": outcome.wasted_share,
        "workers": generating_workers(bound.system, scenario.workers),
    }
    if outcome.step_s is not None and base.step_s is not None:
        row |= {
            "step_s": float(outcome.step_s.mean()),
            **ratio_columns("step_ratio", outcome.step_s, base.step_s, scenario.seed),
            "rollout_share": float(outcome.makespan_s.sum() / outcome.step_s.sum()),
        }
    told = {"assumptions": bound.assumptions, "stand_ins": bound.stand_ins, "defaults": bound.defaults}
    system = bound.system
    return row | told | {"source": system.source, "algorithm": system.algorithm, "exact": system.exact}


def _mean(repeats: Sequence[_Outcome]) -> _Outcome:
    """Over repeats, RL step by RL step: they share its lengths."""
    steps = [one.step_s for one in repeats if one.step_s is not None]
    accepts = [one.mean_accept_length for one in repeats if one.mean_accept_length is not None]
    bubbles = [one.bubble_fraction for one in repeats if one.bubble_fraction is not None]
    return _Outcome(
        makespan_s=np.mean([one.makespan_s for one in repeats], axis=0),
        step_s=np.mean(steps, axis=0) if steps else None,
        mean_accept_length=float(np.mean(accepts)) if accepts else None,
        bubble_fraction=float(np.mean(bubbles)) if bubbles else None,
        off_policy_share=float(np.mean([one.off_policy_share for one in repeats])),
        wasted_share=float(np.mean([one.wasted_share for one in repeats])),
    )


def _bound_s(scenario: Scenario, bound: Sequence[BoundSystem], repeats: int) -> float | None:
    """The clairvoyant bound of the rollout, mean over RL steps and repeats, over what all systems may draft.

    None where some drafters' acceptance is replayed and others' is a model: no bound covers both. Systems with a
    per-request budget have no regret, and no part in it.
    """
    bound = [one for one in bound if one.policy.budget is None and one.system.same_work]
    if not bound:
        return None
    strategies = tuple(dict.fromkeys(s for one in bound for s in one.policy.strategies))
    models: list[Acceptance] = []
    for one in bound:
        if one.acceptance is not None and one.acceptance not in models:
            models.append(one.acceptance)
    if len(models) > 1 and any(model.varies_by == "position" for model in models):
        return None
    whole = replace(scenario, acceptance=_covering_all(bound) if len(models) > 1 else next(iter(models), None))
    return float(np.mean([replace(whole, seed=scenario.seed + k).bounds_s(strategies) for k in range(repeats)]))


def _covering_all(bound: Sequence[BoundSystem]) -> Acceptance:
    """One model of two: learned drafters by the one, at their freshest, and those that draft from text by the other."""
    settled: dict[bool, SettledModel] = {}
    for one in bound:
        for strategy in one.policy.strategies:
            if strategy.speculates and one.acceptance is not None:
                of_text = strategy.drafter in MODEL_FREE
                model = one.acceptance.at_best([strategy.drafter])
                assert isinstance(model, SettledModel), "no bound covers replayed acceptance beside a model"
                settled.setdefault(of_text, model)
    return PerDrafter(learned=settled[False], model_free=settled[True])


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
    """What to do about drafters that were recorded for some responses only, to be added to a complaint."""
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
