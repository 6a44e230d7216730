"""All of a simulation but the policy: responses on workers, costs, acceptance, and how the drafter fares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from tltlab.acceptance.load import (
    Acceptance,
    AcceptanceModel,
    RequestAcceptance,
    Settled,
    TraceAcceptance,
    fresh,
    load_acceptance,
)
from tltlab.config import faults_in
from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.sim.engine.batch import Batch, FluidBatch
from tltlab.sim.engine.by_request import Rates
from tltlab.sim.engine.drawn import ReplayBatch, SampledBatch
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.requests import Requests, requests_by_step
from tltlab.sim.engine.worker import Engine, LeaveIdle, Rollout
from tltlab.state import DrafterState, RequestState
from tltlab.strategy import MODEL_FREE, Strategy
from tltlab.traces.trace import Trace

from .bounds import largest_batch, lower_bound_s
from .idle_training import SpotTrainer
from .placement import place
from .shared_bound import shared_bound_s

Mode = Literal["fluid", "sampled"]


class PolicyLike(Protocol):
    """What the simulator needs of a policy; `tltlab.policies.policy.Policy` is one."""

    @property
    def strategies(self) -> tuple[Strategy, ...]: ...

    def build(self, rng: np.random.Generator) -> Selector: ...


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
    coordinator: CoordinatorConfig | None = None

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
        coordinator: CoordinatorConfig | None = None,
    ) -> Scenario:
        """The arguments are those of `simulate`; `coordinator` says which idle workers train, None: the default."""
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
            coordinator=coordinator,
        )

    def rollouts(
        self,
        policy: PolicyLike,
        *,
        record_rewards: bool = False,
        entropy: Sequence[Sequence[int]] | None = None,
        drafter: Sequence[DrafterState] | None = None,
    ) -> tuple[Rollout, ...]:
        """Simulate every RL step under a policy; `entropy` seeds each worker's selector, else [seed, worker] does.

        `drafter` is the learned drafter's state in each RL step where that is known, else it follows from the training.
        """
        entropy = [[self.seed, w] for w in range(self.workers)] if entropy is None else entropy
        drafters = sorted({s.drafter for s in policy.strategies if s.speculates})
        budgets = budgets_of(policy, self.workers)
        trainer = None if self.spot is None else SpotTrainer(self.spot, self.coordinator)
        engine = Engine(
            costs=self.costs,
            selectors=[policy.build(np.random.default_rng(list(words))) for words in entropy],
            decision_block=self.decision_block,
            record_rewards=record_rewards,
            idle_use=trainer or LeaveIdle(),
            noise=self.costs.noise if self.mode == "sampled" else None,
            seed=self.seed,
        )
        done: list[Rollout] = []
        before, state = None, DrafterState()
        for at, (step, queues) in enumerate(zip(self.steps, self.queues, strict=True)):
            state = state if drafter is None else drafter[at]
            known = {name: DrafterState() if name in MODEL_FREE else state for name in drafters}
            model = None if self.acceptance is None else fresh(self.acceptance, known)
            if not done or model is not before:
                batches = _batches(model if drafters else None, self, budgets)
                engine.prepare(Regimes(policy.strategies, self.costs, model), batches)
            before, engine.drafters = model, known
            rollout = engine.rollout(step, queues)
            tell_each_other(budgets, rollout)
            if trainer is not None:
                rollout.spot, state = trainer.result, trainer.drafter
            else:
                state = replace(state, age=state.age + 1)
            done.append(rollout)
        return tuple(done)

    def bounds_s(self, strategies: Sequence[Strategy]) -> list[float]:
        """The clairvoyant lower bound of each RL step, over all uses of these strategies, all requests drafted alike.

        The bound is for iterations that take what the costs say: with `noise` a lucky rollout may undercut it. Where
        acceptance depends on the drafter's age and training, it is that of the freshest and best trained one.
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


def budgets_of(policy: PolicyLike, workers: int) -> list[DraftBudget]:
    """A budget of the policy for each worker; none where every request is drafted what the strategy says."""
    if not isinstance(policy, Policy) or isinstance(policy.build_budget(), UniformBudget):
        return []
    return [policy.build_budget() for _ in range(workers)]


def tell_each_other(budgets: Sequence[DraftBudget], rollout: Rollout) -> None:
    """After a rollout every worker's budget hears of what finished on the others, as drafters do in a real run."""
    requests = rollout.requests
    for worker, budget in enumerate(budgets):
        for r in np.flatnonzero(rollout.worker_of != worker).tolist():
            done = RequestState(
                key=requests.keys[r],
                prompt_id=requests.keys[r][1],
                generated_tokens=requests.response_tokens[r],
                max_response_tokens=requests.max_response_tokens[r],
            )
            budget.finished(done, drafted=0, accepted=0)


def load_spot_training(source: SpotTraining | dict[str, Any] | str | Path) -> SpotTraining:
    """Spot training from itself, a dict, a JSON file, or "tlt" for the defaults. Raises ConfigError."""
    if isinstance(source, SpotTraining):
        return source
    if source == "tlt":
        return SpotTraining()
    value = source if isinstance(source, dict) else read_json(Path(source))
    with faults_in("spot training"):
        return SpotTraining.model_validate(value)


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


def _batches(model: Settled | None, scenario: Scenario, budgets: Sequence[DraftBudget]) -> Callable[[Requests], Batch]:
    """How running requests gain tokens: all alike where that can be, else each for itself."""
    if isinstance(model, RequestAcceptance) or (budgets and model is not None):
        if isinstance(model, TraceAcceptance):
            raise ConfigError("a budget needs an acceptance model, and acceptance.parquet is replayed: name a model")
        return Rates(
            model=model,
            costs=scenario.costs,
            seed=scenario.seed,
            sampled=scenario.mode == "sampled",
            budgets=budgets,
        )
    if isinstance(model, TraceAcceptance):
        return lambda requests: ReplayBatch(requests, model)
    if model is not None and scenario.mode == "sampled":
        return lambda requests: SampledBatch(requests, scenario.seed)
    return FluidBatch
