"""Systems from the literature in simulation: each on its own GPUs or its share of them, whole RL steps where asked.

All systems of a comparison replay the same responses with common random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.acceptance.replay import TraceAcceptance
from tltlab.arrays import Floats
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_stages
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.planning.claims import CLAIMS, difference
from tltlab.planning.composition import System
from tltlab.planning.execution import missing_part
from tltlab.planning.system_binding import BoundSystem, bind_assuming
from tltlab.planning.systems import find_systems
from tltlab.policies.policy import Policy, load_policy
from tltlab.sim.config import SimulationConfig, Source
from tltlab.sim.scenario import Scenario, strategies_run
from tltlab.sim.simulate import outside_calibration
from tltlab.stats import Interval, mean_of_few, paired_ratio
from tltlab.traces.trace import Trace

from .jobs import side_by_side
from .logged import LoggedRun
from .sample import Scenarios, small
from .sensitivity import Variant, over_ranges
from .sweep import expected_s, intervals_of, ratio_columns
from .system_run import generating_workers, replayable, run_bound, settings_of

RANGE_STEPS = 2
"""RL steps, the first ones, on which plausible ranges are tried."""


def compare_systems(
    trace: str | Path | Trace,
    systems: str | Sequence[str | System] = "all",
    config: SimulationConfig = SimulationConfig(),
    *,
    stages: StageCosts | Source | None = None,
    gpus_per_worker: int | None = None,
    repeats: int = 1,
    jobs: int | None = 1,
    ranges: bool | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Simulate systems on the same responses with common random numbers: one row per system, the fastest first.

    `settings` are fields of `SimulationConfig` that replace those of `config`; placement and spot training are the
    systems' own. All have the GPUs of `workers` workers of `gpus_per_worker` (default: the costs' tensor parallelism).
    Columns: `system`, `title`, its `drafters` and the `acceptance` granted to each, `makespan_s` (of a rollout, mean
    over RL steps and repeats), `ratio` to verl (or the first system where that is not among them; below 1 is faster)
    with its paired interval `ratio_low` to `ratio_high`
    over RL steps (Student's below ten), `tokens_per_s` that are trained on and its ratio likewise, `regret` of the
    rollout to the clairvoyant bound over all strategies of all systems on all workers (None under a per-request
    budget), `lossless`, `mean_accept_length`, `bubble_fraction`, `off_policy_share` and `wasted_share` of tokens,
    `runs_here` (True, or the parts that no engine here has), `length_bias` (mean length of trained responses over that
    of all begun, 1 where RL steps are apart), `intervals` of what has one by name, `claim` of the system's paper beside
    what is found (None: it has none), `workers` (those that generate), `assumptions`, `stand_ins`, `defaults`,
    `source`. With `stages`: `step_s`, `step_ratio`, `step_ratio_low`, `step_ratio_high` and `rollout_share` of whole RL
    steps, by which the rows are then ordered.

    No system is left out, `attrs["left_out"]` is empty: a number that is missing takes a default that `defaults` names.
    Where there is one (or with `ranges` True; False: never) `attrs["ranges"]` has what `over_ranges` finds over the
    plausible range of each on the first `RANGE_STEPS` RL steps, and rows have the least and largest of their ratios and
    ranks there: `ratio_least`, `ratio_most`, `rank_least`, `rank_most`. `attrs` has `baseline`, `num_rl_steps` of the
    trace's `num_rl_steps_of`, `num_workers`, `num_gpus`, the names of `costs` and `acceptance`, the costs' `evidence`
    (`Scenario.evidence`) and, of plain decoding, `outside_calibration` too.

    Where `rl_steps` are left open in a trace of more than 24, those of a sample are simulated (`Scenarios.answer`).
    `jobs` processes (None: one per core) share the systems.

    >>> compare_systems("traces/tiny", "verl,tlt-base").set_index("system").ratio  # doctest: +SKIP
    """
    if repeats < 1 or (jobs is not None and jobs < 1):
        raise ConfigError(f"repeats and jobs must be at least 1, got {repeats} and {jobs}")
    config = replace(config.changed(settings, compare_systems), placement=None, spot=None)
    scenarios = Scenarios(read(trace), config)
    if stages is None:
        logged = LoggedRun.of(scenarios)
        scenarios, stages = logged.scenarios, logged.stages
    question = SystemComparison(
        scenarios=scenarios, systems=find_systems(systems), repeats=repeats, jobs=jobs, ranges=ranges,
        stages=None if stages is None else load_stages(stages), gpus_per_worker=gpus_per_worker,
    )  # fmt: skip
    return scenarios.answer(question.table, ratios_are_small)


def ratios_are_small(table: pd.DataFrame) -> bool:
    """True if RL steps more would not make the ratios of a comparison much surer, as its costs are off."""
    error = table.attrs["evidence"]["speedup_error"]
    names = [name for name in ("ratio", "step_ratio") if name in table]
    return all(small(intervals_of(table, name), error) for name in names)


@dataclass(frozen=True, kw_only=True)
class SystemComparison:
    """The question of `compare_systems` without its RL steps.

    `beside` are systems whose policy is made already, which draft with the acceptance that is given.
    """

    scenarios: Scenarios
    systems: Sequence[System]
    stages: StageCosts | None
    ranges: bool | None
    beside: Sequence[tuple[System, Policy]] = ()
    gpus_per_worker: int | None = None
    repeats: int = 1
    jobs: int | None = 1

    def table(self, rl_steps: Sequence[int]) -> pd.DataFrame:
        """The table of `compare_systems` for these RL steps."""
        # Refuses what is wrong with the trace or the settings before anything is called left out.
        scenario = self.scenarios.of(rl_steps)
        acceptance = replayable(scenario.acceptance, scenario.steps)
        bound = bind_all(self.systems, scenario, acceptance)
        bound += [
            BoundSystem(system=system, policy=policy, acceptance=acceptance, spot=None, assumptions=system.assumptions)
            for system, policy in self.beside
        ]
        scenario.check_acceptance(binding.policy for binding in bound if binding.acceptance is acceptance)
        measured = self._measure([(binding, scenario.costs) for binding in bound], rl_steps, len(scenario.steps))
        outcomes = {binding.system.name: outcome for binding, outcome in zip(bound, measured, strict=True)}
        bounds_s = _bounds_s(scenario, bound, self.repeats)
        baseline = "verl" if "verl" in outcomes else bound[0].system.name
        base = outcomes[baseline]
        rows = [_row(binding, outcomes[binding.system.name], base, bounds_s, scenario) for binding in bound]
        order = "makespan_s" if self.stages is None else "step_s"
        table = pd.DataFrame(rows).sort_values(order, kind="stable", ignore_index=True)
        ends = []
        if self.ranges or (self.ranges is None and any(binding.defaults for binding in bound)):
            num = min(RANGE_STEPS, len(scenario.steps))
            seconds = {name: outcome.seconds(num) for name, outcome in outcomes.items()}
            ends = over_ranges(
                bound, scenario.costs, seconds,
                lambda variants: [outcome.seconds(num) for outcome in self._measure(variants, rl_steps, num)],
            )  # fmt: skip
            _add_ranges(table, ends, seconds, baseline)
        plain = scenario.rollouts(load_policy("none"))
        table.attrs.update(
            ranges=ends,
            left_out={},
            baseline=baseline,
            num_rl_steps=len(scenario.steps),
            num_rl_steps_of=len(self.scenarios.run),
            num_workers=scenario.workers,
            num_gpus=scenario.workers * (self.gpus_per_worker or scenario.costs.tensor_parallel),
            evidence=scenario.evidence(s for binding in bound for s in binding.policy.strategies),
            outside_calibration=outside_calibration(scenario, plain) or {},
            costs=scenario.costs_name,
            acceptance=scenario.acceptance_name,
        )
        return table

    def _measure(self, variants: Sequence[Variant], rl_steps: Sequence[int], num_steps: int) -> list[_Outcome]:
        """Simulate systems on the first `num_steps` of these RL steps, under costs each; means over the repeats."""
        seed = self.scenarios.config.seed
        tasks = [
            self._task(bound, costs, rl_steps, num_steps, seed + repeat)
            for bound, costs in variants
            for repeat in range(self.repeats)
        ]
        # The longest begin first: the last to end then ends about when the others do.
        seconds = [expected_s(task.args[0], task.args[1].policy) for task in tasks]
        order = sorted(range(len(tasks)), key=lambda n: -seconds[n])
        results = side_by_side([tasks[n] for n in order], jobs=self.jobs, expected_s=[seconds[n] for n in order])
        measured = dict(zip(order, results, strict=True))
        of_variant = (range(n * self.repeats, (n + 1) * self.repeats) for n in range(len(variants)))
        return [_Outcome.mean([measured[n] for n in each]) for each in of_variant]

    def _task(
        self, bound: BoundSystem, costs: CostModel, rl_steps: Sequence[int], num_steps: int, seed: int
    ) -> partial[_Outcome]:
        config = self.scenarios.config
        workers = config.num_workers(self.scenarios.trace)
        settings = {"costs": costs} | settings_of(bound, workers, config, costs)
        scenario = self.scenarios.of(rl_steps, seed=seed, **settings)
        scenario = replace(scenario, steps=scenario.steps[:num_steps], queues=scenario.queues[:num_steps])
        manifest = self.scenarios.trace.manifest
        return partial(_measured, scenario, bound, manifest, workers, self.stages, self.gpus_per_worker)


def bind_all(systems: Sequence[System], scenario: Scenario, acceptance: Acceptance | None) -> list[BoundSystem]:
    """The systems fitted to what is known here, with defaults for what is not; `acceptance` is `replayable`."""
    fitted = scenario.acceptance.pooled(scenario.registry) if isinstance(scenario.acceptance, TraceAcceptance) else None
    bound = []
    for system in systems:
        binding = bind_assuming(system, scenario.costs, acceptance, fitted, scenario.registry)
        if generating_workers(system, scenario.workers) == scenario.workers and system.topology != "colocated":
            note = "a single worker's GPUs cannot be split: training has as many besides, which the others have not"
            binding = replace(binding, assumptions=(*binding.assumptions, note), defaults=(*binding.defaults, note))
        bound.append(binding)
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
    """Sums of each RL step, and the accepted length over them."""

    makespan_s: Floats
    step_s: Floats | None
    idle_s: Floats
    worker_s: Floats
    trained_tokens: Floats
    old_tokens: Floats
    wasted_tokens: Floats
    length_bias: float
    mean_accept_length: float | None

    def seconds(self, num_steps: int) -> float:
        """Mean of the first RL steps: of whole ones where they are known, else of their rollouts."""
        return float(np.mean((self.makespan_s if self.step_s is None else self.step_s)[:num_steps]))

    @property
    def tokens_per_s(self) -> Floats:
        """Tokens per second of the rollout that are trained on; 0 where nothing is generated."""
        return np.divide(
            self.trained_tokens, self.makespan_s, out=np.zeros_like(self.makespan_s), where=self.makespan_s > 0
        )

    @classmethod
    def mean(cls, repeats: Sequence[_Outcome]) -> _Outcome:
        """Over repeats, RL step by RL step: they share its lengths."""
        accepts = [outcome.mean_accept_length for outcome in repeats if outcome.mean_accept_length is not None]
        steps = [outcome.step_s for outcome in repeats if outcome.step_s is not None]
        sums = ("makespan_s", "idle_s", "worker_s", "trained_tokens", "old_tokens", "wasted_tokens", "length_bias")
        return cls(
            **{name: np.mean([getattr(outcome, name) for outcome in repeats], axis=0) for name in sums},
            step_s=np.mean(steps, axis=0) if steps else None,
            mean_accept_length=float(np.mean(accepts)) if accepts else None,
        )


def _measured(scenario: Scenario, *placed: Any) -> _Outcome:
    run = run_bound(scenario, *placed)
    rollouts, stale = run.result.rollouts, run.result.asynchronous
    worker_s = np.array([run.result.scenario.workers * r.makespan_s for r in rollouts])
    return _Outcome(
        makespan_s=np.array([r.makespan_s for r in rollouts]),
        step_s=None if run.whole is None else run.whole.steps["step_s"].to_numpy(np.float64),
        idle_s=np.maximum(0.0, worker_s - [r.busy_s for r in rollouts]),
        worker_s=worker_s,
        trained_tokens=np.array([r.requests.trained_tokens.sum() for r in rollouts], np.float64),
        old_tokens=np.array([r.old_tokens for r in rollouts]),
        wasted_tokens=np.array([r.wasted_tokens for r in rollouts]),
        length_bias=1.0 if stale is None else stale["length_bias"] or 1.0,
        mean_accept_length=run.result.mean_accept_length,
    )


def _row(
    bound: BoundSystem, outcome: _Outcome, base: _Outcome, bounds_s: Floats | None, scenario: Scenario
) -> dict[str, Any]:
    system, seed = bound.system, scenario.seed
    shares: dict[str, Interval | None] = {
        "bubble_fraction": _share(outcome.idle_s, outcome.worker_s, seed),
        "off_policy_share": _share(outcome.old_tokens, outcome.trained_tokens, seed),
        "wasted_share": _share(outcome.wasted_tokens, outcome.trained_tokens + outcome.wasted_tokens, seed),
        "regret": None,
    }
    if bounds_s is not None and bound.policy.budget is None and system.same_work:
        shares["regret"] = _share(outcome.makespan_s, bounds_s, seed, less=1.0)
    means = {"makespan_s": mean_of_few(outcome.makespan_s), "tokens_per_s": mean_of_few(outcome.tokens_per_s)}
    row: dict[str, Any] = {
        "system": system.name,
        "title": system.title,
        **_granted(bound, scenario),
        **{name: interval.estimate for name, interval in means.items()},
        **ratio_columns("ratio", outcome.makespan_s, base.makespan_s, seed),
        **ratio_columns("tokens_per_s_ratio", outcome.tokens_per_s, base.tokens_per_s, seed),
        **{name: None if interval is None else interval.estimate for name, interval in shares.items()},
        "lossless": system.lossless,
        "on_policy": system.on_policy,
        "runs_here": missing_part(system) or True,
        "length_bias": float(outcome.length_bias),
        "mean_accept_length": outcome.mean_accept_length,
        "workers": generating_workers(system, scenario.workers),
    }
    if outcome.step_s is not None and base.step_s is not None:
        means["step_s"] = mean_of_few(outcome.step_s)
        row |= {
            "step_s": means["step_s"].estimate,
            **ratio_columns("step_ratio", outcome.step_s, base.step_s, seed),
            "rollout_share": float(outcome.makespan_s.sum() / outcome.step_s.sum()),
        }
    ends = {name: None if span is None else (span.low, span.high) for name, span in (means | shares).items()}
    row["claim"] = _beside_claim(row, scenario)
    notes = {"assumptions": bound.assumptions, "stand_ins": bound.stand_ins, "defaults": bound.defaults}
    return row | {"intervals": ends} | notes | {
        "source": system.source, "algorithm": system.algorithm, "exact": system.exact,
    }  # fmt: skip


def _granted(bound: BoundSystem, scenario: Scenario) -> dict[str, Any]:
    """The row's drafters and the acceptance of each: as it was given, or what the binding made of it."""
    given = bound.acceptance is None or bound.acceptance is scenario.acceptance
    name = scenario.acceptance_name if given or isinstance(bound.acceptance, TraceAcceptance) else None
    return replace(scenario, acceptance=bound.acceptance, acceptance_name=name).granted(bound.policy.strategies)


def _beside_claim(row: dict[str, Any], scenario: Scenario) -> dict[str, Any] | None:
    """The claim of the system's paper, the simulated speed-up of the same kind, and a sentence on the difference."""
    if (claim := CLAIMS.get(row["system"])) is None:
        return None
    kinds = {"RL step": "step_ratio", "rollout": "ratio", "tokens per second": "tokens_per_s_ratio"}
    name = kinds[claim.of] if kinds[claim.of] in row else "ratio"
    estimate, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if name != "tokens_per_s_ratio":
        # Ratios of times: the faster, the smaller.
        estimate, low, high = (1.0 / value if value else math.inf for value in (estimate, high, low))
    responses = sum(len(step) for step in scenario.steps) / (len(scenario.steps) * scenario.workers)
    sentence = difference(
        claim, estimate, low, high, responses_per_worker=responses, of_same=name == kinds[claim.of],
        cap=max(max(step.max_response_tokens) for step in scenario.steps),
    )  # fmt: skip
    interval = None if low != low else (low, high if math.isfinite(high) else None)
    return asdict(claim) | {"speed_up": estimate, "interval": interval, "difference": sentence}


def _share(part: Floats, whole: Floats, seed: int, *, less: float = 0.0) -> Interval | None:
    """sum(part) / sum(whole) - less with its interval over RL steps; None where there is nothing to share."""
    if not whole.all():
        return None
    ratio = paired_ratio(part, whole, rng=np.random.default_rng(seed))
    ends = {name: getattr(ratio, name) - less for name in ("estimate", "low", "high")}
    return replace(ratio, **ends)


def _bounds_s(scenario: Scenario, bound: Sequence[BoundSystem], repeats: int) -> Floats | None:
    """The clairvoyant bound of each RL step's rollout, mean over repeats, over what all systems may draft.

    None where some drafters' acceptance is replayed and others' is a model: no bound covers both. Systems with a
    per-request budget have no regret, and no part in it.
    """
    bound = [binding for binding in bound if binding.policy.budget is None and binding.system.same_work]
    if not bound:
        return None
    strategies = strategies_run(*(binding.policy for binding in bound))
    models: list[Acceptance] = []
    for binding in bound:
        if binding.acceptance is not None and binding.acceptance not in models:
            models.append(binding.acceptance)
    if len(models) > 1 and any(model.varies_by == "position" for model in models):
        return None
    whole = replace(scenario, acceptance=_covering_all(bound) if len(models) > 1 else next(iter(models), None))
    drafters = scenario.registry_of({binding.system.name: binding.policy for binding in bound})
    bounds_s = [replace(whole, seed=scenario.seed + k).bounds_s(strategies, drafters) for k in range(repeats)]
    return np.asarray(np.mean(bounds_s, axis=0), np.float64)


def _covering_all(bound: Sequence[BoundSystem]) -> Acceptance:
    """One model of all: each drafter by the first that has it, at its freshest."""
    settled: dict[str, Acceptance] = {}
    for binding in bound:
        for strategy in binding.policy.strategies:
            if strategy.speculates and binding.acceptance is not None:
                settled.setdefault(strategy.drafter, binding.acceptance.at_best([strategy.drafter]))
    return PerDrafter(settled)
