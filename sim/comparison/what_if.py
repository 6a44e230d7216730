"""Estimate of the speed-up of speculation for responses of these lengths, in words, with its evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance, GeometricAcceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.load import DEFAULT, load_acceptance, with_drafter
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.calibration.api import parse_rl_steps
from tltlab.costs.base import CostModel
from tltlab.costs.deployment import GPUS
from tltlab.costs.stages import StageCosts
from tltlab.drafters.specs import STANDARD
from tltlab.errors import ConfigError
from tltlab.hardware import ModelShape
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format, TraceSource, read_lengths
from tltlab.planning.composition import System
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import TableSpec
from tltlab.sim.config import SimulationConfig, Source, at_least, beside_trace, check_keywords, decision_interval
from tltlab.sim.rl_steps import run_steps
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import SimResult, outside_calibration, simulated
from tltlab.sim.topology import Colocated
from tltlab.sim.tuning.drafter_training import best_table, covered_chains, drafter_training
from tltlab.stats import paired_speed_up
from tltlab.strategy import Strategy
from tltlab.traces.trace import Manifest, Trace

from .band import Band, InputErrors, Times, bands
from .jobs import side_by_side
from .logged import LoggedRun, Running, machine_of
from .sample import Scenarios, small
from .systems import SystemComparison, ratios_are_small
from .verdict import LEAST, MOST, SpeedUp, WhatIf

USUAL = "learned"
"""Default drafter of the verdict."""
_CURVE = (0.3, 0.6, 0.95)
_DEFAULT_SYSTEMS = ("verl", "tlt", "tlt-base", "vllm-dynamic")
THE_VERDICT = System(
    name="verdict-table",
    title="The verdict's table",
    source="tltlab what-if, the table under drafting",
    algorithm="the exact table of up to four draft depths by batch size for these costs and this acceptance",
    assumptions=("a static split, as VeRL's; the acceptance that the verdict names",),
)
"""The row of `systems` that the verdict is about."""


def what_if(
    lengths: TraceSource,
    *,
    gpus: str | None = None,
    model: str | ModelShape | None = None,
    engine: str | None = None,
    tp: int | None = None,
    costs: CostModel | Source | None = None,
    workers: int | None = None,
    acceptance: Acceptance | Source | None = None,
    accept: float | None = None,
    drafter: str | None = None,
    systems: str | Sequence[str] | None = None,
    column: str | None = None,
    reading: Reading | None = None,
    form: Format | None = None,
    seed: int = 0,
    rl_steps: Sequence[int] | str | None = None,
    jobs: int | None = 1,
    on_stage: Callable[[str, int], None] = lambda message, total: None,
    **misspelt: Any,
) -> WhatIf:
    """Simulate these responses with and without speculation; the answer is `verdict`, the rest is behind it.

    `lengths` are whatever `read_lengths` takes: a file of any of its formats, a trace, a DataFrame, an array. `column`
    (of the lengths), or all of a `reading`, and `form` give what a file lacks. The machine and the acceptance are those
    of `SimulationConfig`: `gpus` (such as 8xH100) of a `model` (a name or `config.json`), or `costs` on `workers`.
    Where none is named, the trace's costs are taken, else the machine of a log, else 8xH100 of Qwen2.5-7B.
    For a training log with stages, rollouts and stages take the log's seconds, and one that drafts is compared with its
    own run first (`WhatIf.running`). Acceptance that is not given is the recorded one, else
    `tltlab.acceptance.load.DEFAULTS`, with 0.5 and 0.85 of the drafter in addition. `accept` is short for the chance
    that a token of `drafter` ("learned") is accepted once those before it were, all other drafters as in `DEFAULTS`.

    The policy is the exact table of up to four draft depths of that drafter (or of the recorded ones) by batch size for
    these costs and this acceptance: what the best table brings. `rl_steps` (numbers, or text such as "0:5" or "all")
    are simulated, by default a sample where there are more than 24 (`Scenarios.answer`). `jobs` processes (None: one
    per core) share the acceptances and the systems. `on_stage` receives each finished stage and the number of
    stages, again for each larger sample. Costs O(responses) per policy, most of it the bandits among `systems`.

    >>> what_if([200] * 500 + [4000] * 12, gpus="8xH100", model="Qwen2.5-7B").verdict  # doctest: +SKIP
    """
    started = time.perf_counter()
    check_keywords(misspelt, (), what_if)
    at_least(1, jobs=jobs)
    if accept is not None and not 0.0 < accept < 1.0:
        raise ConfigError(f"accept is a chance between 0 and 1, such as 0.7, got {accept:g}")
    if accept is not None and acceptance is not None:
        raise ConfigError(f"accept {accept:g} is short for an acceptance of one drafter: leave out one of the two")
    reading = reading or Reading()
    source = read_lengths(lengths, replace(reading, column=column or reading.column), form)
    trace = source.trace
    chosen = parse_rl_steps(rl_steps, trace.rl_steps) if isinstance(rl_steps, str) else rl_steps
    config = SimulationConfig(
        gpus=gpus, model=model, engine=engine, tp=tp, costs=costs, workers=workers, acceptance=acceptance, seed=seed,
        rl_steps=chosen,
    )  # fmt: skip
    counted = workers is not None or trace.manifest.num_workers is not None
    has_costs = counted and beside_trace(trace, "costs.json") is not None
    if all(option is None for option in (gpus, model, engine, tp, costs)) and not has_costs:
        config = replace(config, **({"gpus": GPUS} | machine_of(trace)))
    config, recorded = _with_acceptance(config, trace, accept, drafter)
    logged = LoggedRun.of(Scenarios(trace, config))
    scenarios = logged.scenarios
    granted, machine = scenarios.acceptance, scenarios.machine
    assert granted is not None
    usual = [USUAL] if granted.knows(USUAL) and not recorded else list(granted.drafters) or [USUAL]
    drafters = usual if drafter is None else [drafter]
    scenario = scenarios.of((chosen or trace.rl_steps)[:1])
    scenario.registry.check(Strategy.chain(name, 1) for name in drafters)
    strategies = covered_chains(scenario, drafters)
    if not strategies:
        raise ConfigError(
            f"the acceptance covers no chain 1 to 8 deep of {' or '.join(drafters)}: give --acceptance "
            f"{drafters[0]}=geometric:ALPHA"
        )
    # All results are relative to VeRL, which does not speculate.
    compared = find_systems(systems or _DEFAULT_SYSTEMS)
    compared = compared if SYSTEMS["verl"] in compared else (SYSTEMS["verl"], *compared)
    ask = _Question(
        scenarios=scenarios, strategies=strategies, drafters=drafters, compared=compared,
        accept=None if recorded else _chance(granted, drafters), block=decision_interval(trace), jobs=jobs,
        on_stage=on_stage, recorded=recorded, logged=logged,
    )  # fmt: skip
    found = scenarios.answer(ask.answer, ask.is_enough)
    scenario, plain, best, base = found.scenario, found.plain, found.chosen, found.base
    evidence = scenario.evidence(best.policy.strategies)
    is_known = scenario.costs.evidence is not None
    # The RL step of median rollout time, the lower of two.
    median = int(np.argsort(base.rollout_s, kind="stable")[(len(base.rollout_s) - 1) // 2])
    return WhatIf(
        trace=trace, used=source.used, ignored=source.ignored, workers=scenario.workers, chosen=best,
        setting=machine.name if machine else f"costs {scenario.costs_name}", costs_name=scenario.costs_name,
        distance=evidence["distance"] if is_known else _measured_here(scenario, plain),
        evidence=evidence["says"] if is_known else f"costs {scenario.costs_name}",
        speed_ups=found.speed_ups, plain_s=plain.makespan_s, systems=found.systems, decision_block=ask.block,
        notes=(*source.notes, *logged.notes, f"acceptance: {scenario.acceptance_name}",
               *(machine.assumed if machine else ())),
        rollout_share=logged.share if logged.share is not None or base.step_s is None
        else float(base.rollout_s.sum() / base.step_s.sum()),
        share_of=logged.share_of, running=found.running,
        crowded_share=_crowded_share(plain, best.policy),
        band=found.bands[0], rl_step_band=found.bands[1],
        training=drafter_training(trace, scenario), drafters=tuple(drafters), recorded=recorded,
        acceptance=scenario.granted(strategies)["acceptance"], num_rl_steps=len(scenario.steps),
        is_sampled=scenarios.is_sampled, wall_s=time.perf_counter() - started,
        example=scenarios.of([scenario.steps[median].rl_step]), config=config,
    )  # fmt: skip


def _with_acceptance(
    config: SimulationConfig, trace: Trace, accept: float | None, drafter: str | None
) -> tuple[SimulationConfig, bool]:
    """The settings with the acceptance that is asked for, and whether the trace has it; by default each drafter's."""
    known, _ = config.find_acceptance(trace)
    if drafter is not None and (known is None or drafter not in known.drafters):
        STANDARD[drafter]  # Refuses a name that no drafter has.
    if accept is not None:
        own = GeometricAcceptance(alpha=accept)
        return replace(config, acceptance=with_drafter(load_acceptance(DEFAULT), drafter or USUAL, own)), False
    if known is None:
        return replace(config, acceptance=DEFAULT), False
    return config, config.acceptance in (None, "trace")


def _chance(model: Acceptance, drafters: Sequence[str]) -> float | None:
    """The chance that a token of the only drafter is accepted, where it is the same for all of them."""
    part = _part(model, drafters[0])
    inner = part.base if isinstance(part, ContextAcceptance) else part
    return inner.alpha if len(drafters) == 1 and isinstance(inner, GeometricAcceptance) else None


def _part(model: Acceptance, drafter: str) -> Acceptance:
    return model.of(drafter) if isinstance(model, PerDrafter) else model


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Simulations of some RL steps."""

    scenario: Scenario
    plain: SimResult
    base: Times
    speed_ups: tuple[SpeedUp, ...]
    chosen: SpeedUp
    bands: tuple[Band, Band | None]
    running: Running | None
    systems: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A question without its RL steps."""

    scenarios: Scenarios
    strategies: Sequence[Strategy]
    drafters: Sequence[str]
    compared: Sequence[System]
    accept: float | None
    recorded: bool
    block: int
    logged: LoggedRun
    jobs: int | None
    on_stage: Callable[[str, int], None]

    def answer(self, rl_steps: Sequence[int]) -> _Found:
        """Simulate these RL steps without speculation, at each acceptance and under each system."""
        scenarios, scenario, accept = self.scenarios, self.scenarios.of(rl_steps), self.accept
        chances: list[float | None] = [None] if accept is None else [*sorted({*_CURVE, LEAST, MOST, accept})]
        total = 4 + len(chances)
        responses = sum(len(step.chains) for step in scenario.steps)
        self.on_stage(f"{responses} responses of {len(scenario.steps)} RL steps", total)
        plain = simulated(scenario, load_policy("none"), "none", scenarios.trace.manifest)
        stages = self.logged.stages
        base = _seconds(plain, stages)
        self.on_stage("no speculation", total)
        tasks = [
            partial(_speed_up, self._at(rl_steps, chance), self.strategies, stages, chance, base) for chance in chances
        ]
        speed_ups = []
        for chance, speed_up in zip(chances, side_by_side(tasks, jobs=self.jobs), strict=True):
            speed_ups.append(speed_up)
            what = "" if chance is None else f" {chance:.2f}"
            self.on_stage(f"{'recorded ' * self.recorded}acceptance{what}", total)
        chosen = next(s for s in speed_ups if s.accept == accept)
        ranges = self._bands(scenario, chosen, base)
        self.on_stage("90 % range", total)
        systems = SystemComparison(
            scenarios=scenarios.under(decision_block=self.block), systems=self.compared,
            beside=[(THE_VERDICT, chosen.policy)], stages=stages, jobs=self.jobs, ranges=False,
        ).table(rl_steps)  # fmt: skip
        self.on_stage(f"systems {', '.join(systems['system'])}", total)
        return _Found(scenario=scenario, plain=plain, base=base, speed_ups=tuple(speed_ups), chosen=chosen,
                      bands=ranges, running=self._running(scenario, chosen, base), systems=systems)  # fmt: skip

    def _running(self, scenario: Scenario, chosen: SpeedUp, base: Times) -> Running | None:
        """The speed-up over the log's own run; None where that does not draft."""
        drafting, own = self.logged.drafting, self.logged.running([step.rl_step for step in scenario.steps], base)
        if drafting is None or own is None:
            return None
        ranges = self._bands(scenario, chosen, own, self.logged.policy)
        return Running.of(drafting, own, chosen.times, ranges, scenario.seed)

    def _bands(
        self, scenario: Scenario, chosen: SpeedUp, base: Times, baseline: Policy | None = None
    ) -> tuple[Band, Band | None]:
        """The ranges of the verdict; a table that drafts nothing has those of the best ones at the inputs' ends."""
        strategies = [s for s in chosen.policy.strategies if s.speculates]
        errors = InputErrors.of(scenario, strategies or self.strategies, self.scenarios.trace, recorded=self.recorded)
        if self.logged.share is not None:
            errors = replace(errors, seconds=0.0, stages=0.0)

        def policy(end: Scenario) -> Policy:
            return chosen.policy if strategies else best_table(end, self.strategies)

        return bands(scenario, policy, base, chosen.times, errors, baseline=baseline, jobs=self.jobs)

    def is_enough(self, found: _Found) -> bool:
        """True if RL steps more would not make the speed-ups much surer, as their costs are off."""
        ratios = [ratio for s in found.speed_ups for ratio in (s.rollout, s.rl_step) if ratio is not None]
        error = found.scenario.evidence(found.chosen.policy.strategies)["speedup_error"]
        return small(ratios, error) and ratios_are_small(found.systems)

    def _at(self, rl_steps: Sequence[int], chance: float | None) -> Scenario:
        """The scenario where another share of the drafter's tokens is accepted than is granted."""
        granted = self.scenarios.acceptance
        if chance == self.accept or chance is None or granted is None:
            return self.scenarios.of(rl_steps)
        own, part = GeometricAcceptance(alpha=chance), _part(granted, self.drafters[0])
        # The curve is over chances within the trained length.
        curve = part.with_parts([own]) if isinstance(part, ContextAcceptance) else own
        model = with_drafter(granted, self.drafters[0], curve)
        return self.scenarios.of(rl_steps, acceptance=model)


def _seconds(result: SimResult, stages: StageCosts | None) -> Times:
    rollouts = np.array([rollout.makespan_s for rollout in result.rollouts])
    if stages is None:
        return Times(rollout_s=rollouts)
    placed = Colocated(gpus_per_worker=result.scenario.costs.tensor_parallel)
    whole = run_steps(result, stages, topology=placed)
    return Times(rollout_s=rollouts, step_s=whole.steps["step_s"].to_numpy(np.float64))


def _speed_up(
    scenario: Scenario,
    strategies: Sequence[Strategy],
    stages: StageCosts | None,
    accept: float | None,
    base: Times,
) -> SpeedUp:
    """Times as fast as without speculation the best table is."""
    policy = best_table(scenario, strategies)
    manifest = Manifest(kind="simulated", num_workers=scenario.workers)
    times = _seconds(simulated(scenario, policy, "table", manifest), stages)
    rl_step = None
    if base.step_s is not None and times.step_s is not None:
        rl_step = paired_speed_up(base.step_s, times.step_s, scenario.seed)
    rollout = paired_speed_up(base.rollout_s, times.rollout_s, scenario.seed)
    return SpeedUp(accept=accept, rollout=rollout, rl_step=rl_step, times=times, policy=policy)


def _crowded_share(plain: SimResult, policy: Policy) -> float:
    """The share of busy worker time, without speculation, at batch sizes for which the policy drafts nothing."""
    selector = policy.selector
    if not isinstance(selector, TableSpec):
        return 0.0
    firsts = np.array([row.min_batch for row in selector.rows])
    drafts = np.array([row.strategy.speculates for row in selector.rows])
    crowded = total = 0.0
    for columns in (log.columns for rollout in plain.rollouts for log in rollout.logs):
        row = np.searchsorted(firsts, columns.batch, side="right") - 1
        total += float(columns.seconds.sum())
        crowded += float(columns.seconds[~drafts[row]].sum())
    return crowded / total if total else 0.0


def _measured_here(scenario: Scenario, plain: SimResult) -> str:
    """How near costs without a profile's evidence are: whether the fit covered what is simulated."""
    if scenario.costs.calibrated is None:
        return "never measured"
    return "interpolated" if outside_calibration(scenario, plain.rollouts) else "measured together"
