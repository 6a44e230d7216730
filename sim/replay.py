"""`simulate`: replay a trace's responses under a policy, a cost model and a placement."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from pydantic import ValidationError

from tltlab import metrics
from tltlab.acceptance import (
    Acceptance,
    AcceptanceModel,
    FreshAcceptance,
    RequestAcceptance,
    Settled,
    TraceAcceptance,
    fresh,
    load_acceptance,
)
from tltlab.budget import DraftBudget, UniformBudget
from tltlab.cli import read_json
from tltlab.complaints import faults
from tltlab.cost import CostModel
from tltlab.cost_files import load_costs
from tltlab.errors import ConfigError
from tltlab.policy import Policy, load_policy
from tltlab.selector import Selector
from tltlab.spot_training import SpotTraining
from tltlab.state import DrafterState
from tltlab.strategy import MODEL_FREE, Strategy
from tltlab.trace import Manifest, Trace

from . import record
from .batch import Batch, FluidBatch
from .bounds import largest_batch, lower_bound_s
from .engine import Engine, LeaveIdle, Rollout
from .log import Columns
from .placement import place
from .rates import Rates
from .regime import Regime, Regimes
from .requests import Requests, requests_by_step
from .shared_bound import shared_bound_s
from .spot import SpotTrainer
from .walk import ReplayBatch, SampledBatch

Mode = Literal["fluid", "sampled"]


class PolicyLike(Protocol):
    """What the simulator needs of a policy; `tltlab.policy.Policy` is one."""

    @property
    def strategies(self) -> tuple[Strategy, ...]: ...

    def build(self, rng: np.random.Generator) -> Selector: ...


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """A simulation's result. `summary` and `trace` are made when they are first read, from the logs in `rollouts`.

    `wall_s` is the time the simulation took; `bounds_s` computes the clairvoyant bound of each RL step.
    """

    rollouts: tuple[Rollout, ...]
    manifest: Manifest
    policy: str
    scenario: Scenario
    wall_s: float
    bounds_s: Callable[[], list[float] | None]
    record_iterations: bool

    @property
    def makespan_s(self) -> float:
        """Mean over the RL steps, as in `summary`, without making a trace."""
        return float(np.mean([rollout.makespan_s for rollout in self.rollouts]))

    @cached_property
    def trace(self) -> Trace:
        """The simulation as a trace of kind "simulated", as a recorder would have written it."""
        return Trace.from_tables(
            self.manifest, record.tables(self.rollouts, self.policy, iterations=self.record_iterations)
        )

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The keys of `tltlab simulate --json`: `tltlab.metrics.summary` of the trace, the bound and the wall time.

        `mean_accept_length` is over all speculative iterations; `regret` is makespan / lower bound - 1;
        `outside_calibration` the share of iterations outside the range that costs ("batch", "verified_tokens",
        "context_tokens") or acceptance ("acceptance") were fitted on; `costs` and `acceptance` name what was used.
        """
        bounds_s = self.bounds_s()
        speculates = any(regime.strategy.speculates for regime in self._regimes())
        bound_s = float(np.mean(bounds_s)) if bounds_s is not None else None
        return metrics.summary(self.trace) | {
            "mean_accept_length": self._mean_accept_length(),
            "outside_calibration": self._outside_calibration(),
            "spot_training": self._spot_training(),
            "costs": self.scenario.costs_name,
            "acceptance": self.scenario.acceptance_name if speculates else None,
            "lower_bound_s": bound_s,
            "regret": self.makespan_s / bound_s - 1.0 if bound_s and self.makespan_s else None,
            "wall_s": self.wall_s,
        }

    def _spot_training(self) -> dict[str, float] | None:
        """Sums over the RL steps, and the share of idle worker time that went into updates; None without."""
        found = [rollout.spot for rollout in self.rollouts if rollout.spot is not None]
        if not found:
            return None
        idle_s = math.fsum(spot.idle_worker_s for spot in found)
        return {
            "updates": sum(spot.trained.updates for spot in found),
            "updates_lost": sum(spot.trained.updates_lost for spot in found),
            "checkpoints": sum(spot.trained.checkpoints for spot in found),
            "idle_worker_s": idle_s,
            "used_share": math.fsum(spot.trained_worker_s for spot in found) / idle_s if idle_s else 0.0,
            "release_delay_s": math.fsum(spot.release_delay_s for spot in found),
        }

    def _regimes(self) -> list[Regime]:
        found = {id(r): r for rollout in self.rollouts for log in rollout.logs for r in log.columns.regime}
        return list(found.values())

    def _outside_calibration(self) -> dict[str, float] | None:
        """Only shares above 0; None where neither costs nor acceptance say what they were fitted on."""
        calibrated, acceptance = self.scenario.costs.calibrated, self.scenario.acceptance
        if isinstance(acceptance, FreshAcceptance):
            acceptance = acceptance.base
        strange = {
            r.strategy
            for r in self._regimes()
            if isinstance(acceptance, AcceptanceModel) and r.strategy.speculates and acceptance.outside(r.strategy)
        }
        if calibrated is None and not strange:
            return None
        outside: Counter[str] = Counter()
        total = 0
        for c in (log.columns for rollout in self.rollouts for log in rollout.logs):
            total += int(c.num_iterations.sum())
            outside["acceptance"] += int(c.num_iterations[[r.strategy in strange for r in c.regime]].sum())
            verified = c.batch * np.array([regime.cost.tokens_to_verify for regime in c.regime])
            for name, values in {"batch": c.batch, "verified_tokens": verified}.items():
                if span := getattr(calibrated, name, None):
                    outside[name] += int(c.num_iterations[(values < span[0]) | (values > span[1])].sum())
            if calibrated is not None and calibrated.context_tokens:
                outside["context_tokens"] += _contexts_outside(c, *calibrated.context_tokens)
        return {name: count / total for name, count in outside.items() if count}

    def _mean_accept_length(self) -> float | None:
        tokens, pairs = [], 0
        for columns in (log.columns for rollout in self.rollouts for log in rollout.logs):
            chosen = columns.speculates
            tokens += columns.tokens[chosen].tolist()
            pairs += int((columns.num_iterations * columns.batch)[chosen].sum())
        return math.fsum(tokens) / pairs if pairs else None


def _contexts_outside(c: Columns, least: float, most: float) -> int:
    """Iterations whose context lies outside [least, most]; it grows by the same number of tokens in each of a step."""
    growth = np.maximum(c.tokens / np.maximum(c.num_iterations, 1), 1e-9)
    first_inside = np.clip(np.ceil((least - c.context_tokens) / growth), 0, c.num_iterations)
    first_above = np.clip(np.floor((most - c.context_tokens) / growth) + 1, first_inside, c.num_iterations)
    return int((c.num_iterations - (first_above - first_inside)).sum())


def simulate(
    trace: Trace,
    policy: str | Path | PolicyLike = "none",
    *,
    costs: CostModel | dict[str, Any] | str | Path | None = None,
    acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
    workers: int | None = None,
    placement: str = "contiguous",
    mode: str = "fluid",
    seed: int = 0,
    rl_steps: Sequence[int] | None = None,
    decision_block: int = 1,
    record_iterations: bool = False,
    max_response_tokens: int | None = None,
    spot: SpotTraining | dict[str, Any] | str | Path | None = None,
) -> SimResult:
    """Replay the responses of `trace` under `policy`, one RL step at a time, all requests present at its start.

    Response lengths are the trace's; what is simulated is when each token comes. Defaults: costs from the trace
    folder's `costs.json`, else the preset `cpu-small`; acceptance from the trace's acceptance.parquet, else the
    folder's `acceptance.json`; workers from the manifest. In `fluid` mode every request gains the expected tokens in
    each iteration, in `sampled` mode they are drawn from the seed; `acceptance="trace"` is the same in both.

    A selector is built per worker from `np.random.default_rng([seed, worker])` and lives through all RL steps. It is
    asked before and told after every iteration, or once per `decision_block` iterations with their mean; a memoryless
    one is asked once for each batch and number of waiting requests. `record_iterations` adds iterations and decisions
    to the result's trace. `max_response_tokens` cuts longer responses.

    `spot` (settings, a file, or "tlt") trains the drafter on idle workers: the next RL step finds it with these
    updates and age 0, which counts where the acceptance is of kind "fresh"; without it the drafter ages.

    Raises ConfigError for a term, an acceptance or a placement that is missing or unknown.

    >>> simulate(tltlab.read("traces/tiny"), "none", workers=8).summary["makespan_s"]  # doctest: +SKIP
    """
    chosen: PolicyLike = load_policy(policy) if isinstance(policy, str | Path | Policy) else policy
    scenario = Scenario.of(
        trace,
        costs=costs,
        acceptance=acceptance,
        workers=workers,
        placement=placement,
        mode=mode,
        seed=seed,
        rl_steps=rl_steps,
        decision_block=decision_block,
        max_response_tokens=max_response_tokens,
        spot=spot,
    )
    started = time.perf_counter()
    rollouts = scenario.rollouts(chosen, record_rewards=record_iterations)
    wall_s = time.perf_counter() - started
    name = _name(policy)
    return SimResult(
        rollouts=rollouts,
        manifest=_manifest(trace, scenario, name, placement),
        policy=name,
        scenario=scenario,
        wall_s=wall_s,
        # A budget drafts less than its strategy for some: the bound does not hold for it.
        bounds_s=lambda: None if budget_of(chosen) else scenario.bounds_s(chosen.strategies),
        record_iterations=record_iterations,
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All of a simulation but the policy: what `sweep` holds fixed while policies change."""

    steps: tuple[Requests, ...]
    queues: tuple[list[list[int]], ...]
    costs: CostModel
    acceptance: Acceptance | None
    workers: int
    mode: str
    seed: int
    decision_block: int
    costs_name: str
    acceptance_name: str | None
    spot: SpotTraining | None = None

    @classmethod
    def of(
        cls,
        trace: Trace,
        *,
        costs: CostModel | dict[str, Any] | str | Path | None = None,
        acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
        workers: int | None = None,
        placement: str = "contiguous",
        mode: str = "fluid",
        seed: int = 0,
        rl_steps: Sequence[int] | None = None,
        decision_block: int = 1,
        max_response_tokens: int | None = None,
        spot: SpotTraining | dict[str, Any] | str | Path | None = None,
    ) -> Scenario:
        """The arguments are those of `simulate`."""
        if mode not in get_args(Mode):
            raise ConfigError(f"no mode named {mode!r}; there are {', '.join(get_args(Mode))}")
        if decision_block < 1:
            raise ConfigError(f"decision_block must be at least 1, got {decision_block}")
        if seed < 0:
            raise ConfigError(f"seed must be at least 0, got {seed}")
        workers = _workers(trace, workers)
        steps = tuple(requests_by_step(trace, rl_steps, max_response_tokens))
        model = find_acceptance(trace, acceptance)
        return cls(
            steps=steps,
            queues=tuple(place(step, workers, placement) for step in steps),
            costs=_costs(trace, costs),
            acceptance=model,
            workers=workers,
            mode=mode,
            seed=seed,
            decision_block=decision_block,
            costs_name=_named(costs, _beside(trace, "costs.json") or "cpu-small (the default: the trace has no costs)"),
            acceptance_name=None if model is None else _named(acceptance, "the trace's own"),
            spot=None if spot is None else load_spot_training(spot),
        )

    def rollouts(
        self, policy: PolicyLike, *, record_rewards: bool = False, entropy: Sequence[Sequence[int]] | None = None
    ) -> tuple[Rollout, ...]:
        """Simulate every RL step under a policy; `entropy` seeds each worker's selector, else [seed, worker] does."""
        entropy = [[self.seed, w] for w in range(self.workers)] if entropy is None else entropy
        drafters = sorted({s.drafter for s in policy.strategies if s.speculates})
        budget = budget_of(policy)
        trainer = None if self.spot is None else SpotTrainer(self.spot)
        engine = Engine(
            costs=self.costs,
            selectors=[policy.build(np.random.default_rng(list(words))) for words in entropy],
            decision_block=self.decision_block,
            record_rewards=record_rewards,
            idle_use=trainer or LeaveIdle(),
        )
        done: list[Rollout] = []
        before, state = None, DrafterState()
        for step, queues in zip(self.steps, self.queues, strict=True):
            known = {name: DrafterState() if name in MODEL_FREE else state for name in drafters}
            model = None if self.acceptance is None else fresh(self.acceptance, known)
            if not done or model is not before:
                batches = _batches(model if drafters else None, self, budget)
                engine.prepare(Regimes(policy.strategies, self.costs, model), batches)
            before, engine.drafters = model, known
            rollout = engine.rollout(step, queues)
            if trainer is not None:
                rollout.spot, state = trainer.result, trainer.drafter
            else:
                state = replace(state, age=state.age + 1)
            done.append(rollout)
        return tuple(done)

    def bounds_s(self, strategies: Sequence[Strategy]) -> list[float]:
        """The clairvoyant lower bound of each RL step, over all uses of these strategies, all requests drafted alike.

        Where acceptance depends on the drafter's age and training, it is that of the freshest and best trained one.
        """
        model: Settled | None = None
        if isinstance(self.acceptance, TraceAcceptance):
            model = self.acceptance.at_best()
        elif self.acceptance is not None:
            best = DrafterState(age=0, updates=sys.maxsize)
            model = fresh(self.acceptance, {s.drafter: best for s in strategies})
        regimes = Regimes(strategies, self.costs, model)
        met = regimes.up_to(max(map(len, self.steps), default=1))
        # All gain alike in every iteration: then sharing a worker has an exact price.
        alike = not any(s.speculates for s in strategies) or (
            self.mode == "fluid" and isinstance(model, AcceptanceModel)
        )
        found = []
        for step in self.steps:
            bound_s = lower_bound_s(step, met, self.costs, self.workers, model, self.mode, self.seed)
            if alike:
                most = largest_batch(step, self.costs)
                bound_s = max(bound_s, shared_bound_s(step, regimes, self.costs, self.workers, most))
            found.append(bound_s)
        return found


def budget_of(policy: PolicyLike) -> DraftBudget | None:
    """The policy's budget; None where every request is drafted what the strategy says."""
    budget = policy.build_budget() if isinstance(policy, Policy) else UniformBudget()
    return None if isinstance(budget, UniformBudget) else budget


def load_spot_training(source: SpotTraining | dict[str, Any] | str | Path) -> SpotTraining:
    """Spot training from itself, a dict, a JSON file, or "tlt" for the defaults. Raises ConfigError."""
    if isinstance(source, SpotTraining):
        return source
    if source == "tlt":
        return SpotTraining()
    value = source if isinstance(source, dict) else read_json(Path(source))
    try:
        return SpotTraining.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"spot training: {faults(error)}") from error


def _workers(trace: Trace, workers: int | None) -> int:
    workers = trace.manifest.num_workers if workers is None else workers
    if workers is None:
        raise ConfigError("the trace's manifest has no num_workers: say how many to simulate with --workers")
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")
    return workers


def _costs(trace: Trace, costs: CostModel | dict[str, Any] | str | Path | None) -> CostModel:
    if costs is not None:
        return load_costs(costs)
    return load_costs(_beside(trace, "costs.json") or "cpu-small")


def _named(source: object, default: str | Path) -> str:
    """What a user called it, else its kind."""
    if source is None:
        return str(default)
    if isinstance(source, dict):
        return str(source.get("kind", "linear"))
    return str(source) if isinstance(source, str | Path) else str(getattr(source, "kind", "trace"))


def _beside(trace: Trace, name: str) -> Path | None:
    """The file of that name in the trace's folder, else in the RUN folder that the trace is part of."""
    if trace.path is None:
        return None
    folders = [trace.path, trace.path.parent] if trace.path.name == "trace" else [trace.path]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def find_acceptance(trace: Trace, source: Acceptance | dict[str, Any] | str | Path | None) -> Acceptance | None:
    """What `simulate` takes `source` for: a model, "trace", or None for what the trace has (None: nothing)."""
    if source == "trace" or source is None:
        table = trace.acceptance
        if table is not None and len(table):
            return TraceAcceptance(table)
        if source == "trace":
            raise ConfigError("acceptance 'trace': the trace has no acceptance.parquet; annotate it or name a model")
        beside = _beside(trace, "acceptance.json")
        return load_acceptance(beside) if beside else None
    return load_acceptance(source)


def _batches(model: Settled | None, scenario: Scenario, budget: DraftBudget | None) -> Callable[[Requests], Batch]:
    """How running requests gain tokens: all alike where that can be, else each for itself."""
    if isinstance(model, RequestAcceptance) or (budget is not None and model is not None):
        if isinstance(model, TraceAcceptance):
            raise ConfigError("a budget needs an acceptance model, and acceptance.parquet is replayed: name a model")
        return Rates(
            model=model,
            costs=scenario.costs,
            seed=scenario.seed,
            sampled=scenario.mode == "sampled",
            budget=budget,
        )
    if isinstance(model, TraceAcceptance):
        return lambda requests: ReplayBatch(requests, model)
    if model is not None and scenario.mode == "sampled":
        return lambda requests: SampledBatch(requests, scenario.seed)
    return FluidBatch


def _name(policy: str | Path | PolicyLike) -> str:
    if isinstance(policy, str | Path):
        return str(policy)
    return policy.selector.kind if isinstance(policy, Policy) else type(policy).__name__


def _manifest(trace: Trace, scenario: Scenario, policy: str, placement: str) -> Manifest:
    source = trace.manifest
    return source.model_copy(
        update={
            "kind": "simulated",
            "engine": "tltlab.sim",
            "num_workers": scenario.workers,
            "num_rl_steps": len(scenario.steps),
            "seed": scenario.seed,
            "source": source.name or source.source,
            "notes": f"simulated: policy {policy}, placement {placement}, mode {scenario.mode}",
        }
    )
