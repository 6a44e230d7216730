"""All of a simulation but the policy: responses on workers, costs, acceptance, and how the drafter fares."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.load import DEFAULTS, granted
from tltlab.acceptance.per_drafter import PerDrafter, refuse_one_for_several
from tltlab.arrays import Floats
from tltlab.config import shown
from tltlab.console import progress
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.drafters.specs import NETWORK, STANDARD, TEXT, Drafters, DrafterSpec, DrafterTraits
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.own import from_user, raised, split
from tltlab.planning.beliefs import LengthBelief
from tltlab.planning.composition import Admission, SharedBuffer
from tltlab.planning.planners import PLANNERS, Gatherer, load_planner
from tltlab.planning.rollout import LENGTHS, RolloutPlanner, Shape
from tltlab.planning.rollout_driver import PlanDriver
from tltlab.policies.driver import refuse_needs
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.policies.selector import WHOLE_TOKENS, Selector
from tltlab.policies.specs import CustomSpec
from tltlab.records import Json
from tltlab.sim.engine.admission import BufferFeed, RoundFeed, Stream
from tltlab.sim.engine.batch import Batch, FluidBatch
from tltlab.sim.engine.by_request import Drawn, Rates, Replayed
from tltlab.sim.engine.planned import Planned
from tltlab.sim.engine.policy_time import report_if_slow
from tltlab.sim.engine.record import SimulatedRollout
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.requests import Requests
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.workload import changed, requests_by_step
from tltlab.state import DrafterState, RequestState
from tltlab.strategy import NO_SPECULATION, Strategy, drafters_of

from .bounds import Floors, fixed_bound_s, lower_bound_s, shared_bound_s
from .config import SimulationConfig, load_spot_training
from .idle_training import IdleUse, SimulatedSpotTrainer
from .placement import place_steps

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Depths of the chains that are searched, and over which bounds are."""


def policy_name(source: PolicySource) -> str:
    """The name that a user gave the policy, else its kind."""
    if isinstance(source, str | Path | Strategy):
        return str(source)
    own = type(source) if isinstance(source, Selector) else source
    return own.__name__ if isinstance(own, type) else (policy := load_policy(own)).name or policy.selector.kind


def named_policies(sources: Mapping[str, PolicySource] | Sequence[PolicySource] | str) -> dict[str, Policy]:
    """Policies by name: a dict of them, a list, whose own names they get, or shipped names with commas between.

    Raises ConfigError for none, and for a name that comes twice.
    """
    if isinstance(sources, str):
        sources = split(sources)
    if isinstance(sources, Mapping):
        named = {str(name): load_policy(source, held=True) for name, source in sources.items()}
    elif isinstance(sources, Sequence):
        names = [policy_name(source) for source in sources]
        if twice := [name for n, name in enumerate(names) if name in names[:n]]:
            raise ConfigError(f"policy {twice[0]} is given twice; in Python a dict names two that are called the same")
        named = dict(zip(names, (load_policy(source, held=True) for source in sources), strict=True))
    else:
        raise ConfigError(f"{shown(sources)} are no policies: give a list of them, or a dict by name")
    if not named:
        raise ConfigError("no policy to simulate: give at least one")
    return named


@dataclass(frozen=True, kw_only=True)
class Scenario(SimulationConfig):
    """All of a simulation but the policy: settings for one trace, with what they left open filled in.

    A study holds a scenario fixed while policies change.
    """

    steps: tuple[Requests, ...]
    queues: tuple[list[list[int]], ...]
    costs: CostModel
    acceptance: Acceptance | None
    workers: int
    costs_name: str
    acceptance_name: str | None
    spot: SpotTraining | None = None
    planner: RolloutPlanner | None = None
    shapes: Mapping[Shape, CostModel] | None = None
    registry: Drafters = STANDARD
    drafter_states: tuple[DrafterState, ...] | None = None
    """The learned drafter in each RL step; None: as it follows from the RL steps before."""

    @classmethod
    def of(cls, trace: TraceSource, config: SimulationConfig = SimulationConfig(), **settings: Any) -> Scenario:
        """The simulation of a trace, or of what `read` finds at a path.

        `settings` are fields of `SimulationConfig` that replace those of `config`.
        """
        trace = read(trace)
        config, _ = config.changed(settings, cls.of).on_trace(trace)
        workers = config.num_workers(trace)
        steps = tuple(
            changed(replace(step, prefix_caching=config.prefix_caching), config.workload, config.seed)
            for step in requests_by_step(
                trace, config.steps_of(trace), config.max_response_tokens, prefix=config.prefix, tool_s=config.tool_s
            )
        )
        acceptance, acceptance_name = config.find_acceptance(trace)
        costs, costs_name = config.find_costs(trace)
        values: Json = {field.name: getattr(config, field.name) for field in fields(SimulationConfig)} | {
            "steps": steps,
            "queues": place_steps(steps, workers, config.placement, costs),
            "costs": costs,
            "acceptance": acceptance,
            "workers": workers,
            "costs_name": costs_name,
            "acceptance_name": acceptance_name,
            "spot": None if config.spot is None else load_spot_training(config.spot),
            "planner": load_planner(config.planner),
            "shapes": config.find_shapes(),
            "registry": described(trace.drafters, acceptance),
        }
        scenario = cls(**values)
        active, *wider = scenario.all_shapes
        for shape in wider:
            active.check_same_gpus(shape)
            if shape.engines > active.engines:
                raise ConfigError(f"{shape} has more engines than the {active.engines} workers: gathers are onto fewer")
        if isinstance(scenario.planner, Gatherer) and not wider:
            raise ConfigError(
                "there is no other shape to gather onto: give --gpus with several workers, or --shapes 1x8=COSTS"
            )
        if scenario.planner is not None and (why := scenario.unplanned()):
            raise ConfigError(f"a planner is not simulated with {why}: leave out one of them")
        return scenario

    def unplanned(self, policy: Policy | None = None) -> str:
        """Why no planner is simulated here, with a policy; empty where one can be."""
        refused = {
            "responses of several turns": any(step.turns is not None for step in self.steps),
            "RL steps that are not apart": self.admission is not None,
            "drafter training on idle workers": self.spot is not None,
            "draft budgets": policy is not None and bool(budgets_of(policy, 1)),
        }
        return next((what for what, found in refused.items() if found), "")

    def planned(self, policy: Policy) -> dict[str, Scenario]:
        """Return the same requests under each shipped planner that knows no lengths; nothing where none could do more.

        So it is under a planner, with what no planner is simulated with, and where the GPUs have one shape.
        """
        if self.planner is not None or not self.shapes or self.unplanned(policy):
            return {}
        planners = {name: load_planner(name) for name in PLANNERS}
        return {n: replace(self, planner=p) for n, p in planners.items() if p is not None and LENGTHS not in p.needs}

    @property
    def all_shapes(self) -> dict[Shape, CostModel]:
        """Costs of each shape that a rollout can take, that of the workers first."""
        wider = {} if self.planner is None else dict(self.shapes or {})
        gpus = [shape.engines * shape.gpus // self.workers for shape in wider]
        active = Shape(engines=self.workers, gpus=max([1, *gpus]) if gpus else self.costs.tensor_parallel)
        return {active: self.costs, **wider}

    @cached_property
    def longest_context_tokens(self) -> int:
        """Most tokens of prompt and response that a request has."""
        return max((int((step.prompts + step.lengths).max(initial=0)) for step in self.steps), default=0)

    def granted(self, strategies: Iterable[Strategy]) -> Json:
        """The `drafters` of these strategies and the `acceptance` of each in words, for a row of a table."""
        drafters = drafters_of(strategies)
        return {"drafters": drafters, "acceptance": granted(self.acceptance, self.acceptance_name, drafters)}

    def held(self, strategies: Iterable[Strategy]) -> list[Strategy]:
        """Those of networks that draft deeper than the acceptance was measured: the last chance is held for them."""
        model = self.acceptance
        deeper = [s for s in strategies if s.speculates and model is not None and "draft_depth" in model.outside(s)]
        return [s for s in deeper if self.registry[s.drafter].has_network]

    def check_acceptance(self, policies: Iterable[Policy]) -> None:
        """Raise ConfigError for acceptance that does not fit these policies.

        That is of a drafter that neither the trace nor a policy has, and one model for drafters of different kinds
        (`all=` allows it).
        """
        if self.acceptance is None:
            return
        policies = list(policies)
        own = {name: spec for policy in policies for name, spec in policy.drafters.items()}
        if self.acceptance.drafters:
            known = self.registry.joined(own)
            for name in self.acceptance.drafters if isinstance(self.acceptance, PerDrafter) else ():
                assert known[name]
            return
        self.check_drafters(drafters_of(s for policy in policies for s in policy.strategies), own)

    def check_drafters(self, names: Collection[str], own: Mapping[str, DrafterSpec] = {}) -> None:
        """ConfigError where one model would serve drafters of different kinds among these."""
        refuse_one_for_several(self.acceptance, self.acceptance_name, names, self.registry.joined(own))

    def rollouts(self, policy: Policy, **options: Any) -> tuple[SimulatedRollout, ...]:
        """Simulate every RL step under a policy, see `each_rollout`."""
        return tuple(self.each_rollout(policy, **options))

    def each_rollout(
        self,
        policy: Policy,
        *,
        record_rewards: bool = False,
        entropy: Sequence[Sequence[int]] | None = None,
        delay: int | None = None,
    ) -> Iterator[SimulatedRollout]:
        """Simulate one RL step after another under a policy; nothing is kept.

        `entropy` seeds each worker's selector, else [seed, worker] does.
        Outcomes come as in an engine; with a `delay` choices hold at once and outcomes come so many choices later.
        """
        entropy = [[self.seed, w] for w in range(self.workers)] if entropy is None else entropy
        registry = self.registry_of({"": policy})
        drafters = drafters_of(policy.strategies)
        budgets = budgets_of(policy, self.workers)
        trainer = None if self.spot is None else SimulatedSpotTrainer(self.spot)
        simulators = dict[Shape, RolloutSimulator]()
        for shape, costs in self.all_shapes.items():
            words = entropy if not simulators else [[*each, shape.engines] for each in entropy[: shape.engines]]
            simulators[shape] = RolloutSimulator(
                costs=costs,
                selectors=[policy.build(np.random.default_rng(list(each))) for each in words],
                decision_block=self.decision_block,
                record_rewards=record_rewards,
                ahead=None if delay is None else False,
                delay=delay,
                idle_use=trainer or IdleUse(),
                noise=costs.noise if self.mode == "sampled" else None,
                seed=self.seed,
                max_tools=self.max_tools,
            )
        simulator = next(iter(simulators.values()))
        fluid = {WHOLE_TOKENS: "mode 'fluid' has expected tokens; simulate with mode 'sampled'"}
        refuse_needs(simulator.selectors[0], fluid if self.mode == "fluid" else {})
        selectors = [selector for each in simulators.values() for selector in each.selectors]
        for selector in selectors:
            selector.drafts_with(registry)
        if isinstance(policy.selector, CustomSpec):
            report_if_slow(selectors, self.decision_block)
        planned = None
        if self.planner is not None:
            if why := self.unplanned(policy):
                raise ConfigError(f"a planner is not simulated with {why}: leave out one of them")
            planned = Planned(PlanDriver(deepcopy(self.planner), progress), simulators, LengthBelief(), self.gather_s)
        stream = Stream(self.steps, self.admission, self.seed) if isinstance(self.admission, Admission) else None
        model_before, state = None, DrafterState()
        known = self.acceptance
        if isinstance(known, PerDrafter) and drafters:
            # Requests that are alike for the policy's own drafters have a closed form.
            known = known.only(drafters)
        for at, (step, queues) in enumerate(zip(self.steps, self.queues, strict=True)):
            state = state if self.drafter_states is None else self.drafter_states[at]
            simulator.drafters = {n: state if registry[n].has_network else DrafterState() for n in drafters}
            model = known
            if model is not None:
                model = model.in_state(simulator.drafters).within(self.longest_context_tokens)
            if not at or model is not model_before:
                batches = _batches(model if drafters else None, self, budgets, registry)
                for each in simulators.values():
                    each.prepare(Regimes(policy.strategies, each.costs, model, registry), batches)
            model_before = model
            try:
                if isinstance(self.admission, SharedBuffer):
                    buffer = BufferFeed(step, self.workers, self.costs.kv_capacity_tokens, self.admission)
                    rollout = simulator.rollout(step, buffer.first(), buffer)
                elif planned is not None:
                    rollout = planned.rollout(step, queues)
                elif stream is None:
                    rollout = simulator.rollout(step, queues)
                else:
                    # A pass through the trace first: behind a stream that has just begun are only short responses.
                    for before in range(0 if at else len(self.steps)):
                        _streamed(simulator, stream, before, self.workers)
                    rollout = _streamed(simulator, stream, at, self.workers)
            except ConfigError:
                raise
            except Exception as error:  # whatever a user's policy raises
                if from_user(error):
                    raise raised(error, f"policy {type(simulator.selectors[0]).__name__}") from error
                raise
            exchange_responses(budgets, rollout)
            if trainer is not None:
                rollout.spot, state = trainer.result, trainer.drafter
            elif self.online_updates:
                state = DrafterState(age=0, updates=state.updates + self.online_updates)
            else:
                state = replace(state, age=state.age + 1)
            yield rollout

    def registry_of(self, policies: Mapping[str, Policy]) -> Drafters:
        """The drafters of the trace and of policies by name; ConfigError for what these do not draft.

        Two policies may not mean a network and none by one name: they are compared by names.
        """
        used: dict[str, DrafterTraits] = {}
        for title, policy in policies.items():
            drafters = self.registry.joined(policy.drafters)
            try:
                drafters.check(policy.strategies)
            except ConfigError as error:
                raise ConfigError(f"policy {title}: {error}" if title else str(error)) from error
            for name in drafters_of(policy.strategies):
                if used.setdefault(name, drafters[name]) != drafters[name]:
                    raise ConfigError(f"policy {title}: its drafter {name!r} is another kind than others': rename it")
        return Drafters(traits={**self.registry, **used})

    def evidence(self, strategies: Iterable[Strategy], outside: Iterable[str] = ()) -> Json:
        """Evidence for the costs where these strategies run: the keys of `evidence` in commands' JSON.

        `distance` to the nearest measurement ("unknown" where the costs do not record what they were fitted to), `says`
        as one line of text, `error` of times and `speedup_error` of ratios, which nine in ten predictions do not exceed
        (None: not known). `outside` names what else of the run was not measured.
        """
        evidence, strategies = self.costs.evidence, list(strategies)
        if evidence is None:
            description = f"not known: {self.costs_name} does not record what it was fitted to"
            return {"distance": "unknown", "says": description, "error": None, "speedup_error": None}
        speculates = bool(drafters_of(strategies))
        blocks = any(self.registry.in_blocks(s) for s in strategies if s.drafter in self.registry)
        beyond = [*evidence.beyond((s.draft_depth for s in strategies), blocks=blocks), *outside]
        return {
            "distance": evidence.distance_of(speculates=speculates, beyond=beyond),
            "says": evidence.describe(speculates=speculates, beyond=beyond),
            "error": evidence.error(speculates=speculates, extrapolated=bool(beyond)),
            "speedup_error": evidence.speedup_error(extrapolated=bool(beyond)) if speculates else None,
        }

    def placed(self, placement: str) -> Scenario:
        """Return the same requests under another placement."""
        queues = place_steps(self.steps, self.workers, placement, self.costs)
        return replace(self, placement=placement, queues=queues)

    def searched_drafters(self) -> list[str]:
        """Return the drafters whose tables are searched: those that the acceptance names, else the standard ones.

        ConfigError where one model would serve drafters of different kinds among these.
        """
        self.check_drafters(self.named_drafters)
        return self.named_drafters

    @property
    def named_drafters(self) -> list[str]:
        """The drafters that the acceptance names, else the standard ones that it knows."""
        if (model := self.acceptance) is None:
            return []
        return list(model.drafters) or [name for name in DEFAULTS if model.knows(name)]

    def covered_chains(
        self, drafters: Sequence[str], depths: Sequence[int] = DEPTHS
    ) -> tuple[list[Strategy], list[str]]:
        """Return the chains of these depths and drafters that costs and acceptance cover, and why others are not."""
        covered, why = [], dict[str, list[str]]()
        largest = max((len(queue) for queues in self.queues for queue in queues), default=1)
        settled = None if self.acceptance is None else self.acceptance.in_state({})
        for strategy in (Strategy.chain(name, depth) for name in drafters for depth in depths):
            if strategy not in self._refusals:
                try:
                    Regimes([strategy], self.costs, settled, self.registry).up_to(largest)
                    self._refusals[strategy] = ""
                except ConfigError as error:
                    self._refusals[strategy] = str(error)
            if reason := self._refusals[strategy]:
                why.setdefault(reason, []).append(str(strategy))
            else:
                covered.append(strategy)
        return covered, [f"left out: {', '.join(names)}: {reason}" for reason, names in why.items()]

    @cached_property
    def _refusals(self) -> dict[Strategy, str]:
        """Why a chain is not covered, "" where it is."""
        return {}

    def bounds_of(self, policy: Policy, own: Acceptance | None = None) -> Floats | None:
        """The clairvoyant bounds of each RL step to which a policy's regret is, see `bounding`; worked out once.

        Two rows, see `bounds_s`. None under a budget, which drafts less than its strategy for some.
        """
        if budgets_of(policy, 1):
            return None
        scenario, strategies = self.bounding(policy, own)
        key = frozenset(strategies), id(scenario.acceptance)
        if key not in self._known_bounds:
            # The scenario keeps the model alive whose id is used.
            self._known_bounds[key] = scenario, scenario.bounds_s(strategies, scenario.registry_of({"": policy}))
        return self._known_bounds[key][1]

    @cached_property
    def _known_bounds(self) -> dict[Any, tuple[Scenario, Floats]]:
        return {}

    def bounding(self, policy: Policy, own: Acceptance | None = None) -> tuple[Scenario, list[Strategy]]:
        """Return the scenario and the strategies of the bound to which a policy's regret is.

        It is over plain decoding, every chain that the acceptance covers by the drafters that it names (by the standard
        ones where it names none), and what the policy drafts, with its `own` acceptance where that is another.
        """
        model, scenario = self.acceptance, self
        used = drafters_of(policy.strategies)
        if isinstance(own, PerDrafter) and isinstance(model, PerDrafter):
            own = None if all(own.of(name) is model.models.get(name, model.others) for name in used) else own
        if own is not None and own is not model:
            replayed = own.varies_by == "position" or (model is not None and model.varies_by == "position")
            parts = {} if model is None or replayed else {name: model.at_best([name]) for name in model.drafters}
            parts |= {} if replayed else {name: own.at_best([name]) for name in used}
            scenario = replace(scenario, acceptance=own if replayed else PerDrafter(parts))
        named = scenario.named_drafters
        if scenario.acceptance is not None and not scenario.acceptance.drafters:
            named = list(dict.fromkeys([*named, *used]))
        chains, _ = scenario.covered_chains([name for name in named if name in scenario.registry])
        return scenario, list(dict.fromkeys([NO_SPECULATION, *chains, *policy.strategies]))

    def bounds_s(self, strategies: Sequence[Strategy], drafters: Drafters | None = None) -> Floats:
        """The clairvoyant lower bounds of each RL step, over all uses of these strategies, all requests drafted alike.

        The first row holds wherever responses move, the second, never lower, where each stays on its worker.
        `drafters` are those of the policies, by default those of the trace.

        The bound is for iterations that take the modelled costs: with `noise` a fast rollout may undercut it.
        Acceptance that depends on the drafter's age and training is that of a fresh, fully trained drafter.
        """
        plain = self.costs.iteration(NO_SPECULATION, drafter_loaded=False)
        idle = self.costs.iteration(NO_SPECULATION, drafter_loaded=True)
        alone: float | Floats = math.inf
        if NO_SPECULATION in strategies and len(strategies) > 1 and idle.seconds(1, 0.0) > plain.seconds(1, 0.0):
            # A policy that never drafts has no drafter loaded.
            alone = self.bounds_s([NO_SPECULATION])
        model = self.acceptance
        if model is not None:
            model = model.at_best([s.drafter for s in strategies]).within(self.longest_context_tokens)
        floors = []
        for shape, costs in self.all_shapes.items():
            regimes = Regimes(strategies, costs, model, self.registry if drafters is None else drafters)
            floors.append(Floors.of(regimes, costs, shape, max(map(len, self.steps), default=1)))
        # All gain alike in every iteration: then sharing a worker has an exact price.
        alike = not drafters_of(strategies) or (model is not None and model.varies_by == "nothing")

        def least(step: Requests, shapes: Sequence[Floors]) -> float:
            bound_s = lower_bound_s(step, shapes, model)
            if alike:
                bound_s = max(bound_s, shared_bound_s(step, shapes))
            if step.turns is not None and self.max_tools is not None:
                bound_s = max(bound_s, sum(step.turns.tool_s) / self.max_tools)
            return bound_s

        bounds_s = np.zeros((2, len(self.steps)))
        for at, step in enumerate(self.steps):
            if step.lengths.any():
                moving_s = staying_s = least(step, floors)
                if len(floors) > 1:
                    staying_s = least(step, floors[:1])
                bounds_s[:, at] = moving_s, max(staying_s, fixed_bound_s(step, floors[0], model))
        return np.minimum(bounds_s + self.costs.outside_s * (bounds_s > 0), alone)


def is_memoryless(policy: Policy) -> bool:
    """True if the policy chooses by batch size alone."""
    return policy.build(np.random.default_rng(0)).memoryless


def described(drafters: Drafters, model: Acceptance | None) -> Drafters:
    """Drafters, and those of other names whose traits the acceptance model has."""
    traits: dict[str, DrafterTraits] = {}
    for part in [model, *getattr(model, "every", ())]:
        inner: Any = part
        while (base := getattr(inner, "base", None)) is not None:
            inner = base
        traits |= {name: TEXT if copied else NETWORK for name, copied in getattr(inner, "copies", {}).items()}
        if (trained := getattr(part, "trained_drafter", None)) is not None:
            traits[trained] = NETWORK
    return Drafters(traits=traits | {**drafters})


def _streamed(simulator: RolloutSimulator, stream: Stream, k: int, workers: int) -> SimulatedRollout:
    """RL step k of a stream: the rollout as of the responses that it trains on."""
    wasted, version = stream.wasted_tokens, stream.version
    work = stream.begin(k)
    feed = RoundFeed(stream, work, workers)
    rollout = simulator.rollout(work.requests, feed.first(), feed)
    trained = stream.end(work)
    requests, at = stream.trained_on(work, trained)
    current = set(map(id, work.jobs))

    def of(values: Floats, before: float) -> Floats:
        return np.array([before if n is None else values[n] for n in at], values.dtype)

    return replace(
        rollout,
        requests=requests,
        worker_of=np.array([0 if n is None else rollout.worker_of[n] for n in at], np.int64),
        first_token_s=np.minimum(of(rollout.first_token_s, 0.0), of(rollout.finish_s, 0.0)),
        finish_s=of(rollout.finish_s, 0.0),
        submit_s=None if rollout.submit_s is None else of(rollout.submit_s, 0.0),
        old_tokens=float(sum(job.old if id(job) in current else job.length for job in trained)),
        wasted_tokens=stream.wasted_tokens - wasted,
        ages=np.array([version - (version if job.version is None else job.version) for job in trained], np.int64),
        num_begun=stream.num_begun,
        begun_tokens=stream.begun_tokens,
        num_dropped=stream.num_dropped,
    )


def budgets_of(policy: Policy, workers: int) -> list[DraftBudget]:
    """A budget of the policy for each worker; none where every request is drafted as the strategy sets."""
    if isinstance(policy.build_budget(), UniformBudget):
        return []
    return [policy.build_budget() for _ in range(workers)]


def exchange_responses(budgets: Sequence[DraftBudget], rollout: SimulatedRollout) -> None:
    """Give every worker's budget the responses that finished on the others in a rollout, as drafters in a real run."""
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


def _batches(
    model: Acceptance | None, scenario: Scenario, budgets: Sequence[DraftBudget], drafters: Drafters
) -> Callable[[Requests], Batch]:
    """How running requests gain tokens: all alike where that can be, else each for itself."""
    if model is None:
        return FluidBatch
    if model.varies_by == "request" or budgets:
        return Rates(
            model=model,
            costs=scenario.costs,
            seed=scenario.seed,
            sampled=scenario.mode == "sampled",
            budgets=budgets,
            refresh=max(model.refresh_iterations, scenario.decision_block),
            drafters=drafters,
        )
    if model.varies_by == "position":
        return lambda requests: Batch(requests, Replayed(requests, model))
    if scenario.mode == "sampled":
        return lambda requests: Batch(requests, Drawn(requests, scenario.seed))
    return FluidBatch
