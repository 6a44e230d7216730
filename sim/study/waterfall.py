"""The waterfall: where the seconds of a rollout go, from the clairvoyant bound to its makespan, in named steps.

Each step is what one change adds to the seconds before it, so that the steps add up to the makespan. The order is that
of decreasing reach. First what no policy can avoid: drafting and scheduling are changes of the bound itself, which
after them is that of `compare`. Then what ideal choices cannot avoid, then what the placement, the policy and its
drafter lose, all at real costs, so that depths are judged by what drafts really take. What a step takes depends on
those before it: a policy that drafts too much loses more where drafting is dear, and its placement hides some of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.calibration.iterations import measured_waiting
from tltlab.costs.base import CostModel
from tltlab.costs.scaled import ScaledCosts, scheduled
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.policies.selector import WHOLE_TOKENS
from tltlab.records import Json, frozen
from tltlab.sim.config import SimulationConfig, decision_interval
from tltlab.sim.scenario import Scenario, policy_name
from tltlab.sim.tuning.cases import oracle_policy
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces import metrics
from tltlab.traces.trace import Trace

from .sample import Scenarios, samples
from .study import Cell, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = {
    "bound": "no schedule undercuts it: drafts by a fresh drafter that take no time, asynchronous scheduling",
    "drafting": "drafts take their time: the bound with it",
    "synchronous tax": "the engine waits for the host between iterations: the bound of `compare`",
    "drain": "the best depth in each iteration, longest responses first: workers run empty, and nothing moves",
    "placement": "responses on the workers that they ran on",
    "planner": "requests move between engines, or gather onto others, as the planner says",
    "choice of drafter": "the best depth in each iteration of the policy's own drafters",
    "choice of depth": "the policy's choices instead of the best ones",
    "acceptance lost to age": "drafters as old and as little trained as they are",
    "switches": "speculation is brought in by a switch that takes time",
    "noise": "draws of accepted tokens, and the scatter of iterations where costs have it",
    "unexplained": "measured less simulated",
}
"""The steps in their order, and what changes in each."""
_ROUNDING, _AT_ONCE_S = 1e-9, 1e-12
_SAMPLES = 3
"""Sampled simulations of a recorded rollout."""


class Step(NamedTuple):
    """Mean seconds of a rollout that a step takes."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Waterfall:
    """Steps from the bound to the makespan; `table` has a row per RL step with `rl_step`, `policy` and their seconds.

    Steps that do not apply are left out. The makespan is `measured`, or simulated.
    """

    table: pd.DataFrame
    title: str
    measured: bool

    @property
    def steps(self) -> tuple[Step, ...]:
        """Mean seconds of each step, the bound first; the sum is the makespan."""
        means = self.table.drop(columns=["rl_step", "policy"]).mean()
        return tuple(Step(str(name), float(seconds)) for name, seconds in means.items())

    @property
    def makespan_s(self) -> float:
        return sum(step.seconds for step in self.steps)

    def by_policy(self) -> dict[str, Waterfall]:
        """The RL steps of each policy that ran."""
        groups = self.table.groupby("policy", sort=False)
        return {str(name): replace(self, table=rows, title=f"{self.title}, {name}") for name, rows in groups}

    def to_frame(self) -> pd.DataFrame:
        """A row per step: `name`, `seconds`, their `share` of the makespan, the sum `until_s` and `what` changes."""
        frame = pd.DataFrame(self.steps)
        until_s = frame["seconds"].cumsum()
        return frame.assign(share=frame["seconds"] / self.makespan_s, until_s=until_s, what=frame["name"].map(STEPS))

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.4g}" for name, seconds in self.steps)
        return f"<Waterfall {self.title}: {self.makespan_s:.4g} s = {parts}>"

    def _repr_html_(self) -> str:
        from tltlab.charts import data_uri

        frame = self.to_frame().to_html(index=False, float_format=lambda value: f"{value:.4g}")
        return f'<img src="{data_uri(self.plot())}" alt="waterfall">{frame}'

    def plot(self, width_in: float = 6.2) -> Figure:
        """Draw the steps from top to bottom; 3.35 inches fit a paper's column."""
        from tltlab.charts import waterfall

        title = f"Where {self.makespan_s:.3g} s go: {self.title}"
        return waterfall(self.steps, measured=self.measured, title=title, width_in=width_in)


@frozen
class _Run:
    """RL steps under one policy: as simulated, `samples` times, and what an `asynchronous` engine takes (None: same).

    A best choice holds for `block` iterations. `measured_s` are their seconds, None where these are to be simulated.
    """

    name: str
    policy: Policy
    scenario: Scenario
    entropy: Sequence[Sequence[int]] | None = None
    block: int
    samples: int = 1
    asynchronous: CostModel | None = None
    measured_s: Floats | None = None

    def bounds(self) -> Iterator[tuple[str, Floats]]:
        """Yield the bounds of each RL step, the widest last."""
        scenario, strategies = self._ideal, self._strategies
        drafters, costs = scenario.registry_of({"": self.policy}), scenario.costs
        fast = self.asynchronous or costs
        shapes = scenario.shapes or {}
        free = {shape: ScaledCosts.wrapping(model, pass_share=0.0) for shape, model in shapes.items()}
        for name, model, wider in (
            ("bound", ScaledCosts.wrapping(fast, pass_share=0.0), free),
            ("drafting", fast, shapes),
            ("synchronous tax", costs, shapes),
        ):
            yield name, replace(scenario, costs=model, shapes=wider).bounds_s(strategies, drafters)[0]

    def cells(self) -> Iterator[Cell]:
        """Yield the simulations after the bounds, each with one change to the one before, in order."""
        ideal, late, exact = self._ideal, self._late, self._exact
        oracle, own = oracle_policy(ideal, self._strategies), self._own(self._strategies)
        fewer = replace(ideal, decision_block=max(self.block, ideal.decision_block))
        best = Cell(name="placement", policy=oracle, scenario=fewer, delay=0, entropy=self.entropy)
        mine = replace(best, name="choice of depth", policy=self.policy, scenario=ideal, delay=None)
        stay = replace(fewer, planner=None)
        yield replace(best, name="drain", scenario=stay.placed("longest_first"))
        yield replace(best, scenario=stay)
        if fewer.planner is not None:
            yield replace(best, name="planner")
        if 1 < len(own) < len(self._strategies):
            yield replace(best, name="choice of drafter", policy=oracle_policy(ideal, own))
        yield mine
        if late is not ideal:
            yield replace(mine, name="acceptance lost to age", scenario=late)
        if exact is not late:
            yield replace(mine, name="switches", scenario=exact)
        if self.scenario.mode == "sampled":
            for sample in range(self.samples):
                scenario = replace(self.scenario, seed=self.scenario.seed + sample)
                yield replace(mine, name="noise", scenario=scenario, axes={"sample": sample})

    def rows(self, cells: Sequence[Cell], seconds: Sequence[Floats]) -> pd.DataFrame:
        """Return the RL steps' rows of `Waterfall.table` from the makespans of their `cells`."""
        until: dict[str, list[Floats]] = {name: [bound] for name, bound in self.bounds()}
        for cell, each in zip(cells, seconds, strict=True):
            until.setdefault(cell.name, []).append(each)
        if self.measured_s is not None:
            until["unexplained"] = [self.measured_s]
        before = np.zeros(len(self.scenario.steps))
        columns: Json = {"rl_step": [step.rl_step for step in self.scenario.steps], "policy": self.name}
        for name, several in until.items():
            after = np.mean(several, axis=0)
            # A change of the last digits alone does not apply, and the next step counts from before it.
            if name in ("bound", "unexplained") or (np.abs(after - before) > _ROUNDING * after).any():
                columns[name], before = after - before, after
        return pd.DataFrame(columns)

    def _own(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        """Return plain decoding, and the chains of the policy's own drafters."""
        used = {NO_SPECULATION.drafter, *(strategy.drafter for strategy in self.policy.strategies)}
        return [strategy for strategy in strategies if strategy.drafter in used]

    @cached_property
    def _strategies(self) -> list[Strategy]:
        """Strategies to choose the best from: with one acceptance for all drafters, chains of the policy's own."""
        ideal = self._ideal
        _, strategies = ideal.bounding(self.policy)
        own = self._own(strategies)
        return strategies if len(own) == 1 or (ideal.acceptance and ideal.acceptance.drafters) else own

    @cached_property
    def _exact(self) -> Scenario:
        """Without noise; in expected tokens where the policy can do with them."""
        whole = WHOLE_TOKENS in self.policy.build(np.random.default_rng(0)).needs
        costs = self.scenario.costs.model_copy(update={"noise": None})
        return replace(self.scenario, costs=costs, mode="sampled" if whole else "fluid")

    @cached_property
    def _late(self) -> Scenario:
        """With a switch that takes no time: until it a plain iteration still pays for no loaded drafter."""
        if (costs := self._exact.costs).switch_s <= _AT_ONCE_S:
            return self._exact
        return replace(self._exact, costs=costs.model_copy(update={"switch_s": _AT_ONCE_S}))

    @cached_property
    def _ideal(self) -> Scenario:
        """With fresh and fully trained drafters."""
        scenario, model = self._late, self._late.acceptance
        best = model and model.at_best([*scenario.named_drafters, *(s.drafter for s in self.policy.strategies)])
        if best is model:
            return scenario
        return replace(scenario, acceptance=best, drafter_states=None, spot=None)


def waterfall(
    trace: TraceSource,
    policy: PolicySource | None = None,
    config: SimulationConfig = SimulationConfig(),
    *,
    jobs: int | None = 1,
    **settings: Any,
) -> Waterfall:
    """Where the seconds of rollouts go, from the clairvoyant bound to the makespan, in the steps of `STEPS`.

    A recorded run is explained as it was: its policies, placement and drafters, costs and acceptance fitted to all of
    its RL steps; what is left to the measured seconds is `unexplained`. With a `policy`, or `settings` (those of
    `SimulationConfig`) other than `rl_steps` and `seed`, and for a trace without times, the responses are simulated,
    under plain decoding where no policy is named: the makespan is then that of `simulate`. Of more than 24 RL steps a
    sample of 8 is taken unless `rl_steps` name some; `jobs` processes (None: one per core) share the simulations. Best
    choices are made anew every `decision_interval` iterations. A step takes one simulation; where draws differ, three.

    Order matters. Drafting and synchronous scheduling are changes of the bound, which is then that of `compare`, and
    the steps after it are at real costs. The bound holds for any shape of the schedule, so none of `drafting`,
    `synchronous tax` and `drain` is negative. Others may be: a placement may be better than longest first, and a policy
    than the best depth in each iteration, where what it drafts now changes later batches. `synchronous tax` needs
    plain iterations of an engine with either scheduling (quick.json of `traces/h200-rehearsal`).

    Raises ConfigError for a trace without responses, and what `simulate` raises.

    >>> waterfall("traces/tiny").steps  # doctest: +SKIP
    >>> waterfall("lengths.csv", "adaptive", gpus="8xH100", model="Qwen2.5-7B").plot()  # doctest: +SKIP
    """
    config = config.changed(settings, waterfall)
    source = read(trace)
    if not source.num_rows("outcomes"):
        raise ConfigError("the trace has no responses whose seconds could be explained")
    rl_steps = next(samples(source.rl_steps, config.steps_of(source)))
    as_it_ran = replace(config, rl_steps=None, seed=0) == SimulationConfig()
    if measured := policy is None and as_it_ran and source.iterations is not None and source.steps is not None:
        runs = list(_recorded(source, rl_steps, config.seed))
    else:
        policy = "none" if policy is None else policy
        scenario = Scenarios(source, config).of(rl_steps)
        own = load_policy(policy, held=True)
        runs = [_Run(name=policy_name(policy), policy=own, scenario=scenario, block=decision_interval(source))]
    cells = [list(run.cells()) for run in runs]
    seconds = iter(Study(cells=[cell for each in cells for cell in each], jobs=jobs).makespans())
    rows = [run.rows(of, [next(seconds) for _ in of]) for run, of in zip(runs, cells, strict=True)]
    whole = pd.concat(rows).fillna(0.0).sort_values("rl_step", ignore_index=True)
    order = ["rl_step", "policy", *(name for name in STEPS if name in whole)]
    name = source.manifest.name or "rollout"
    return Waterfall(table=whole[order], title=name if measured else f"{name}, {runs[0].name}", measured=measured)


def _recorded(trace: Trace, rl_steps: Sequence[int], seed: int) -> Iterator[_Run]:
    """Yield the RL steps of a recorded trace that have times, those since a policy was set together."""
    from tltlab.sim.verification.rollouts import Fit, RecordedRun, single_shape, with_engine_tool_times, without_budget
    from tltlab.sim.verification.run_files import policies_in_force

    measured_s = {step: s for step, s in metrics.rollout_s(trace.select(rl_steps)).items() if s}
    if not measured_s:
        raise ConfigError(f"{trace.path or 'the trace'}: no RL step has rollout_s above 0 in steps.parquet")
    forces = without_budget(policies_in_force(trace))
    part = trace.select(list(measured_s))
    run = RecordedRun(trace=with_engine_tool_times(part), samples=_SAMPLES, seed=seed)
    fitted = run.costs(part.rl_steps).model_copy(update={"outside_s": max(0.0, float(run.overhead_s.median()))})
    accepted = run.accepted(run.of(part.rl_steps))
    acceptance = run.acceptance(accepted, part.rl_steps[-1], part.rl_steps, part.rl_steps)
    for since in dict.fromkeys(forces[step].since for step in measured_s):
        steps = [step for step in measured_s if forces[step].since == since]
        force = forces[steps[0]]
        costs = {"": single_shape(fitted, run.iterations, force.policy)}
        scenario = run.scenario(steps, Fit(costs=costs, acceptance=acceptance))
        asynchronous, waiting = None, measured_waiting(trace)
        if waiting is not None and run.iterations["draft_duration"].notna().any():
            waited = {"synchronous": True, "waiting": waiting}
            asynchronous = scheduled(scenario.costs.model_copy(update=waited), synchronous=False)
        yield _Run(
            name=force.name, policy=force.policy, scenario=scenario, entropy=force.entropy(scenario.workers),
            block=decision_interval(trace), samples=_SAMPLES, asynchronous=asynchronous,
            measured_s=np.array([measured_s[step] for step in steps]),
        )  # fmt: skip
