"""`simulate`: replay a trace's responses under a policy, a cost model and a placement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

import tltlab
from tltlab.arrays import Floats, Ints
from tltlab.costs.evidence import interval
from tltlab.importers.sources import TraceSource, read
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.records import Json, frozen
from tltlab.sim.engine import record
from tltlab.sim.engine.log import Columns
from tltlab.sim.engine.record import SimulatedRollout
from tltlab.strategy import Strategy
from tltlab.traces import metrics
from tltlab.traces.trace import Manifest, Trace

from .config import SimulationConfig, named
from .scenario import Scenario, policy_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class SimResult:
    """A simulation's result. `summary` and `trace` are made when they are first read, from the logs in `rollouts`.

    `wall_s` is the time the simulation took; `bounds_s` computes the clairvoyant bound of each RL step,
    and in a second row that of responses which stay on their workers.
    """

    rollouts: tuple[SimulatedRollout, ...]
    manifest: Manifest
    policy: str
    scenario: Scenario
    wall_s: float
    bounds_s: Callable[[], Floats | None]
    record_iterations: bool

    @property
    def makespan_s(self) -> float:
        """Mean over the RL steps, as in `summary`, without making a trace."""
        return float(np.mean([rollout.makespan_s for rollout in self.rollouts]))

    def __repr__(self) -> str:
        steps = f"{len(self.rollouts)} RL step{'s' * (len(self.rollouts) != 1)}"
        place = f"{self.scenario.workers} workers"
        return f"<SimResult {self.policy}: {steps}, mean rollout {self.makespan_s:.4g} s on {place}>"

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self.summary.items() if isinstance(value, str | int | float)}
        return pd.Series(shown, name=self.policy).to_frame().to_html(float_format=lambda value: f"{value:.4g}")

    def to_frame(self) -> pd.DataFrame:
        """One row per RL step: `rl_step`, `policy`, `makespan_s`, `lower_bound_s` (None where there is no bound)."""
        bounds_s = self.bounds_s()
        return pd.DataFrame(
            {
                "rl_step": [step.rl_step for step in self.scenario.steps],
                "policy": self.policy,
                "makespan_s": [rollout.makespan_s for rollout in self.rollouts],
                "lower_bound_s": [None] * len(self.rollouts) if bounds_s is None else bounds_s[0],
            }
        )

    def plot(self, **options: Any) -> Figure:
        """The timeline of an RL step, with the options of `tltlab.timeline`."""
        return tltlab.timeline(self, **options)

    @cached_property
    def trace(self) -> Trace:
        """The simulation as a trace of kind "simulated", as a recorder would have written it."""
        return Trace.from_tables(
            self.manifest, record.tables(self.rollouts, self.policy, iterations=self.record_iterations)
        )

    @cached_property
    def summary(self) -> Json:
        """The keys of `tltlab simulate --json`: `tltlab.traces.metrics.summary` of the trace, the bound, the wall time.

        `mean_accept_length` is over all speculative iterations; `regret` is makespan / lower bound - 1,
        `fixed_bound_s` the bound of responses that stay on their workers;
        `outside_calibration` the share of iterations outside the range that costs ("batch", "verified_tokens",
        "context_tokens") or acceptance ("acceptance") were fitted on; `costs` and `acceptance` name what was used;
        `prefix_caching` records whether samples shared their prompts, `prefilled_tokens` the tokens prefilled in all;
        `evidence` is that of `Scenario.evidence`, and `makespan_interval_s` is the 90 % range of the makespan from
        cost-model error, at the given lengths and acceptance.
        """
        bounds_s, found = self.bounds_s(), self.totals
        strategies = dict.fromkeys(strategy for each in found for strategy in each.strategies)
        speculates = any(strategy.speculates for strategy in strategies)
        outside = self.outside_calibration
        evidence = self.scenario.evidence(strategies, outside or ())
        bound_s, fixed_s = (None, None) if bounds_s is None else bounds_s.mean(axis=1).tolist()
        return metrics.summary(self._measured, workers=self.scenario.workers) | {
            "mean_accept_length": self.mean_accept_length,
            "outside_calibration": outside,
            "evidence": evidence,
            "makespan_interval_s": interval(self.makespan_s, evidence["error"]),
            "spot_training": self._spot_training(),
            "multi_turn": self._multi_turn(),
            "asynchronous": self.asynchronous,
            "prefix_caching": any(step.prefix_caching for step in self.scenario.steps),
            "prefilled_tokens": round(sum(each.prefilled_tokens for each in found)),
            "costs": self.scenario.costs_name,
            "acceptance": self.scenario.acceptance_name if speculates else None,
            "lower_bound_s": bound_s,
            "fixed_bound_s": fixed_s,
            "regret": self.makespan_s / bound_s - 1.0 if bound_s and self.makespan_s else None,
            "wall_s": self.wall_s,
        }

    @property
    def _measured(self) -> list[metrics.MeasuredRollout]:
        return [
            metrics.MeasuredRollout(
                rl_step=rollout.requests.rl_step,
                lengths=rollout.requests.trained_tokens,
                finish_s=rollout.finish_s,
                start_s=0.0 if rollout.submit_s is None else float(rollout.submit_s.min()),
                rollout_s=float(rollout.makespan_s),
                busy_s=each.busy_s,
            )
            for rollout, each in zip(self.rollouts, self.totals, strict=True)
        ]

    def _spot_training(self) -> dict[str, float] | None:
        """Sums over the RL steps, and the share of idle worker time that went into updates; None without."""
        results = [rollout.spot for rollout in self.rollouts if rollout.spot is not None]
        if not results:
            return None
        idle_s = math.fsum(spot.idle_worker_s for spot in results)
        return {
            "updates": sum(spot.trained.updates for spot in results),
            "updates_lost": sum(spot.trained.updates_lost for spot in results),
            "checkpoints": sum(spot.trained.checkpoints for spot in results),
            "idle_worker_s": idle_s,
            "used_share": math.fsum(spot.trained_worker_s for spot in results) / idle_s if idle_s else 0.0,
            "release_delay_s": math.fsum(spot.release_delay_s for spot in results),
        }

    @cached_property
    def asynchronous(self) -> Json | None:
        """Staleness and length bias of the training data; None where RL steps do not overlap.

        `length_bias` is the mean length of responses that were trained on over that of all that were begun, each as
        long as it would have become: below 1 long responses are starved. Means of `staleness` are over responses.
        """
        rollouts = [rollout for rollout in self.rollouts if rollout.ages is not None]
        if not rollouts:
            return None
        lengths = np.concatenate([rollout.requests.whole().lengths for rollout in rollouts])
        ages = np.concatenate([rollout.ages for rollout in rollouts if rollout.ages is not None])
        last, trained = rollouts[-1], max(1.0, float(lengths.sum()))
        mean_length = last.begun_tokens / max(1, last.num_begun)
        wasted = sum(rollout.wasted_tokens for rollout in rollouts)
        return {
            "mean_length_trained": float(lengths.mean()),
            "mean_length_generated": mean_length,
            "length_bias": float(lengths.mean()) / mean_length if mean_length else None,
            "staleness_mean": float(ages.mean()),
            "staleness_max": int(ages.max()),
            "off_policy_share": sum(rollout.old_tokens for rollout in rollouts) / trained,
            "wasted_share": wasted / (trained + wasted),
            "dropped_share": last.num_dropped / max(1, last.num_begun),
        }

    def _multi_turn(self) -> dict[str, float] | None:
        """Responses and their turns; seconds at tools and waiting for them, summed; None where all have one turn.

        `prefilled_tokens` of `prompt_tokens` were not in the cache.
        """
        turns = [rollout.requests.turns for rollout in self.rollouts if rollout.requests.turns is not None]
        if not turns:
            return None
        num_turns, num_responses = sum(len(r.requests) for r in self.rollouts), sum(len(t.first) for t in turns)
        return {
            "num_responses": num_responses,
            "turns_per_response": num_turns / num_responses,
            "tool_s": math.fsum(s for t in turns for s in t.tool_s),
            "tool_wait_s": math.fsum(r.tool_wait_s for r in self.rollouts),
            "prompt_tokens": sum(int(r.requests.prompts.sum()) for r in self.rollouts),
            "prefilled_tokens": math.fsum(each.prefilled_tokens for each in self.totals),
        }

    @cached_property
    def totals(self) -> tuple[Totals, ...]:
        """By RL step; the macro-steps themselves are not kept."""
        return tuple(_totals(rollout, self.scenario) for rollout in self.rollouts)

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens per request and speculative iteration, as in `summary`; None where there was none."""
        pairs = sum(each.pairs for each in self.totals)
        return math.fsum(token for each in self.totals for token in each.tokens.tolist()) / pairs if pairs else None

    @property
    def outside_calibration(self) -> dict[str, float] | None:
        """The shares of iterations outside the range that costs or acceptance were fitted on, only those above 0.

        None where neither records its range.
        """
        outside = {name: sum(each.outside[name] for each in self.totals) for name in _OUTSIDE}
        if self.scenario.costs.calibrated is None and not outside["acceptance"]:
            return None
        iterations = sum(each.iterations for each in self.totals)
        return {name: count / iterations for name, count in outside.items() if count}


@frozen
class Totals:
    """Sums over the macro-steps of a rollout: iterations, and those of them `outside` what was measured, by `_OUTSIDE`.

    `tokens` came out of each macro-step that speculated, `pairs` of a request and an iteration in all. `busy_s` is by
    worker: the time covered by switches, prefills and iterations.
    """

    strategies: tuple[Strategy, ...]
    iterations: int
    outside: Mapping[str, int]
    tokens: Floats
    pairs: int
    prefilled_tokens: float
    busy_s: dict[str, float]


_OUTSIDE = ("acceptance", "batch", "verified_tokens", "context_tokens")


def _totals(rollout: SimulatedRollout, scenario: Scenario) -> Totals:
    c, _ = rollout.columns()
    on_lanes, lane = rollout.on_lanes()
    regimes = {id(regime): regime for regime in c.regime}
    strategies = tuple(dict.fromkeys(regime.strategy for regime in regimes.values()))
    speculates = c.speculates
    return Totals(
        strategies=strategies,
        iterations=int(c.num_iterations.sum()),
        outside=_iterations_outside(scenario, c, strategies),
        tokens=c.tokens[speculates],
        pairs=int((c.num_iterations * c.batch)[speculates].sum()),
        prefilled_tokens=float(c.prefill_tokens.sum()),
        busy_s=_busy_s(on_lanes, lane, rollout.makespan_s),
    )


def _iterations_outside(scenario: Scenario, c: Columns, strategies: Sequence[Strategy]) -> dict[str, int]:
    outside = dict.fromkeys(_OUTSIDE, 0)
    calibrated, acceptance = scenario.costs.calibrated, scenario.acceptance
    strange = {s for s in strategies if acceptance is not None and s.speculates and acceptance.outside(s)}
    if strange:
        outside["acceptance"] = int(c.num_iterations[[regime.strategy in strange for regime in c.regime]].sum())
    if calibrated is not None:
        verified = c.batch * np.array([regime.cost.tokens_to_verify for regime in c.regime])
        for name, values in {"batch": c.batch, "verified_tokens": verified}.items():
            if span := getattr(calibrated, name, None):
                outside[name] = int(c.num_iterations[(values < span[0]) | (values > span[1])].sum())
        if calibrated.context_tokens:
            outside["context_tokens"] = _contexts_outside(c, *calibrated.context_tokens)
    return outside


def _busy_s(c: Columns, worker: Ints, until_s: float) -> dict[str, float]:
    """Seconds of each worker that its switches, prefills and iterations cover, which do not overlap."""
    starts, ends = np.minimum(c.start_s, until_s), np.minimum(c.decode_start_s + c.seconds, until_s)
    of_worker = ((w, worker == w) for w in np.unique(worker).tolist())
    return {f"worker {w}": metrics.union_s(starts[mine], ends[mine]) for w, mine in of_worker}


def outside_text(outside: Mapping[str, float] | None) -> str:
    """The same in words; empty where nothing is outside, or nothing is known."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in (outside or {}).items())
    return f"{shares} of the iterations lie outside what was measured" if shares else ""


def _contexts_outside(c: Columns, least: float, most: float) -> int:
    """Iterations whose context lies outside [least, most]; it grows by the same number of tokens in each of a step."""
    growth = np.maximum(c.tokens / np.maximum(c.num_iterations, 1), 1e-9)
    first_inside = np.clip(np.ceil((least - c.context_tokens) / growth), 0, c.num_iterations)
    first_above = np.clip(np.floor((most - c.context_tokens) / growth) + 1, first_inside, c.num_iterations)
    return int((c.num_iterations - (first_above - first_inside)).sum())


def simulate(
    trace: TraceSource,
    policy: PolicySource = "none",
    config: SimulationConfig = SimulationConfig(),
    *,
    record_iterations: bool = False,
    **settings: Any,
) -> SimResult:
    """Replay the responses of `trace` under `policy`, one RL step at a time, all requests present at its start.

    Response lengths are the trace's, or whatever `tltlab.read` takes (a path, a DataFrame, an array); what is
    simulated is when each token comes. `policy` is whatever `load_policy` takes, also a class that no module has, or a
    selector, of which every worker gets a copy. `settings` are the fields of `SimulationConfig` (costs, acceptance,
    workers, placement, mode, seed, ...), which replace those of `config`.

    A selector is built per worker from `np.random.default_rng([seed, worker])` and lives through all RL steps. A policy
    chooses before every iteration and receives its outcome afterwards, or once per `decision_block` iterations with
    their mean. A memoryless policy chooses once for each batch and number of waiting requests. `record_iterations` adds
    iterations and decisions to the result's trace.

    Raises ConfigError for no policy, and a term, an acceptance or a placement that is missing or unknown.

    >>> simulate("traces/tiny", "none", workers=8).summary["makespan_s"]  # doctest: +SKIP
    """
    config, trace = config.changed(settings, simulate), read(trace)
    chosen = load_policy(policy, held=True)
    return simulated(Scenario.of(trace, config), chosen, policy_name(policy), trace.manifest, record_iterations)


def simulated(
    scenario: Scenario, chosen: Policy, name: str, source: Manifest, record_iterations: bool = False
) -> SimResult:
    """Simulate a scenario that is made already, as `simulate` does; `source` is its trace's manifest."""
    drafters = scenario.registry_of({name: chosen})
    scenario.check_acceptance([chosen])
    started = time.perf_counter()
    rollouts = tuple(each.settled() for each in scenario.each_rollout(chosen, record_rewards=record_iterations))
    wall_s = time.perf_counter() - started
    placement = named(scenario.placement, "contiguous")
    manifest = source.model_copy(
        update={
            "kind": "simulated",
            "engine": "tltlab.sim",
            "num_workers": scenario.workers,
            "num_rl_steps": len(scenario.steps),
            "seed": scenario.seed,
            "source": source.name or source.source,
            "drafters": drafters.own,
            "notes": f"simulated: policy {name}, placement {placement}, mode {scenario.mode}",
        }
    )
    return SimResult(
        rollouts=rollouts,
        manifest=manifest,
        policy=name,
        scenario=scenario,
        wall_s=wall_s,
        bounds_s=lambda: scenario.bounds_of(chosen),
        record_iterations=record_iterations,
    )
