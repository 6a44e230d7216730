"""Systems from the literature on one trace: the same responses and the same luck, end to end where stages are known."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, delayed, parallel_config

from tltlab.acceptance.load import (
    Acceptance,
    AcceptanceModel,
    RequestAcceptance,
    TraceAcceptance,
    fresh,
    load_acceptance,
)
from tltlab.costs.base import CostModel
from tltlab.costs.stage_files import load_stages
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.planning.system_binding import BoundSystem, PerDrafter, bind
from tltlab.planning.systems import System, find_systems
from tltlab.state import DrafterState
from tltlab.stats import paired_interval
from tltlab.strategy import MODEL_FREE
from tltlab.traces.trace import Trace

from .scenario import Scenario
from .system_run import generating_workers, partly_recorded, replayable, simulate_system


def compare_systems(
    trace: Trace,
    systems: str | Sequence[str | System] = "all",
    *,
    costs: CostModel | dict[str, Any] | str | Path | None = None,
    acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
    model_free_acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
    stages: StageCosts | dict[str, Any] | str | Path | None = None,
    workers: int | None = None,
    gpus_per_worker: int | None = None,
    mode: str = "fluid",
    rl_steps: Sequence[int] | None = None,
    repeats: int = 1,
    seed: int = 0,
    decision_block: int = 1,
    max_response_tokens: int | None = None,
    baseline: str = "verl",
    jobs: int = 1,
    level: float = 0.95,
) -> pd.DataFrame:
    """One row per system, the fastest first: a simulation, on the same responses with the same luck.

    All systems have the GPUs of `workers` workers of `gpus_per_worker` (default: the costs' tensor parallelism).
    Columns: `system`, `title`, `makespan_s` (of a rollout, mean over RL steps and repeats), `ratio` to the `baseline`
    (the first system where that is not among them; below 1 is faster) with its paired bootstrap interval `ratio_low`
    to `ratio_high` over RL steps, `regret` of the rollout to the clairvoyant bound over all strategies of all systems
    on all workers (None under a per-request budget), `lossless`, `mean_accept_length`, `bubble_fraction`, `workers`
    (those that generate), `assumptions`, `stand_ins`, `source`. With `stages`: `step_s`, `step_ratio`,
    `step_ratio_low`, `step_ratio_high` and `rollout_share` of whole RL steps, by which the rows are then ordered.

    `attrs["left_out"]` says of each system that cannot be simulated here why; `attrs` has `baseline`, `num_rl_steps`,
    `num_workers` and `num_gpus` too.
    Raises ConfigError where no system is left.

    >>> compare_systems(tltlab.read("traces/tiny"), "verl,tlt-base").set_index("system").ratio  # doctest: +SKIP
    """
    if repeats < 1 or jobs < 1:
        raise ConfigError(f"repeats and jobs must be at least 1, got {repeats} and {jobs}")
    common: dict[str, Any] = {
        "mode": mode, "rl_steps": rl_steps, "decision_block": decision_block,
        "max_response_tokens": max_response_tokens,
    }  # fmt: skip
    # Refuses what is wrong with the trace or the settings before anything is called left out.
    scenario = Scenario.of(trace, costs=costs, acceptance=acceptance, workers=workers, seed=seed, **common)
    model_free = None if model_free_acceptance is None else load_acceptance(model_free_acceptance)
    bound, left_out = bind_all(find_systems(systems), scenario, model_free)
    if not bound:
        raise ConfigError(
            "none of the systems can be simulated: " + "; ".join(f"{n}: {w}" for n, w in left_out.items())
        )
    placed = None if stages is None else load_stages(stages)
    tasks = [(one, seed + k) for one in bound for k in range(repeats)]
    with parallel_config(backend="loky", inner_max_num_threads=1):
        measured = Parallel(n_jobs=jobs)(
            delayed(_measured)(
                trace,
                one,
                costs=scenario.costs,
                workers=scenario.workers,
                stages=placed,
                gpus_per_worker=gpus_per_worker,
                seed=luck,
                **common,
            )
            for one, luck in tasks
        )
    outcomes = {one.system.name: _mean(measured[i * repeats : (i + 1) * repeats]) for i, one in enumerate(bound)}
    bound_s = _bound_s(scenario, bound, repeats)
    baseline = baseline if baseline in outcomes else bound[0].system.name
    rows = []
    for one in bound:
        name, found, base = one.system.name, outcomes[one.system.name], outcomes[baseline]
        makespan_s = float(found.makespan_s.mean())
        row: dict[str, Any] = {
            "system": name,
            "title": one.system.title,
            "makespan_s": makespan_s,
            **_ratio("ratio", found.makespan_s, base.makespan_s, level, seed),
            "regret": makespan_s / bound_s - 1 if bound_s and one.policy.budget is None else None,
            "lossless": one.system.lossless,
            "mean_accept_length": found.mean_accept_length,
            "bubble_fraction": found.bubble_fraction,
            "workers": generating_workers(one.system, scenario.workers),
        }
        if found.step_s is not None and base.step_s is not None:
            row |= {
                "step_s": float(found.step_s.mean()),
                **_ratio("step_ratio", found.step_s, base.step_s, level, seed),
                "rollout_share": float(found.makespan_s.sum() / found.step_s.sum()),
            }
        rows.append(row | {"assumptions": one.assumptions, "stand_ins": one.stand_ins, "source": one.system.source})
    order = "makespan_s" if placed is None else "step_s"
    table = pd.DataFrame(rows).sort_values(order, kind="stable", ignore_index=True)
    gpus = gpus_per_worker or scenario.costs.tensor_parallel
    table.attrs.update(
        left_out=left_out,
        baseline=baseline,
        num_rl_steps=len(scenario.steps),
        num_workers=scenario.workers,
        num_gpus=scenario.workers * gpus,
    )
    return table


def bind_all(
    systems: Sequence[System], scenario: Scenario, model_free: Acceptance | None
) -> tuple[list[BoundSystem], dict[str, str]]:
    """The systems that can run here, and for each of the others why it cannot."""
    bound, left_out = [], {}
    known, partly = replayable(scenario.acceptance, scenario.steps), partly_recorded(scenario)
    for system in systems:
        try:
            generating_workers(system, scenario.workers)
            bound.append(bind(system, scenario.costs, known, model_free))
        except ConfigError as error:
            left_out[system.name] = f"{error}{partly if system.drafters else ''}"
    return bound, left_out


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Seconds per RL step, and means over them."""

    makespan_s: np.ndarray[Any, np.dtype[np.float64]]
    step_s: np.ndarray[Any, np.dtype[np.float64]] | None
    mean_accept_length: float | None
    bubble_fraction: float | None


def _measured(trace: Trace, bound: BoundSystem, **settings: Any) -> _Outcome:
    run = simulate_system(trace, bound, **settings)
    summary = replace(run.result, bounds_s=lambda: None).summary
    return _Outcome(
        makespan_s=np.array([rollout.makespan_s for rollout in run.result.rollouts]),
        step_s=None if run.whole is None else run.whole.steps["step_s"].to_numpy(np.float64),
        mean_accept_length=summary["mean_accept_length"],
        bubble_fraction=summary["bubble_fraction"],
    )


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
    )


def _ratio(name: str, own: Any, base: Any, level: float, seed: int) -> dict[str, float]:
    found = paired_interval(own, base, level=level, rng=np.random.default_rng(seed))
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}


def _bound_s(scenario: Scenario, bound: Sequence[BoundSystem], repeats: int) -> float | None:
    """The clairvoyant bound of the rollout, mean over RL steps and repeats, over what all systems may draft.

    None where some drafters' acceptance is replayed and others' is a model: no bound covers both.
    """
    strategies = tuple(dict.fromkeys(s for one in bound for s in one.policy.strategies))
    models: list[Acceptance] = []
    for one in bound:
        if one.acceptance is not None and one.acceptance not in models:
            models.append(one.acceptance)
    if len(models) > 1 and any(isinstance(model, TraceAcceptance) for model in models):
        return None
    whole = replace(scenario, acceptance=_all_known(bound) if len(models) > 1 else next(iter(models), None))
    return float(np.mean([replace(whole, seed=scenario.seed + k).bounds_s(strategies) for k in range(repeats)]))


def _all_known(bound: Sequence[BoundSystem]) -> Acceptance:
    """One model of two: learned drafters by the one, at their freshest, and those that draft from text by the other."""
    best = DrafterState(updates=sys.maxsize)
    settled: dict[bool, AcceptanceModel | RequestAcceptance] = {}
    for one in bound:
        for strategy in one.policy.strategies:
            if strategy.speculates and one.acceptance is not None:
                of_text = strategy.drafter in MODEL_FREE
                model = fresh(one.acceptance, {strategy.drafter: best})
                assert not isinstance(model, TraceAcceptance), "no bound covers replayed acceptance beside a model"
                settled.setdefault(of_text, model)
    return PerDrafter(learned=settled[False], model_free=settled[True])
