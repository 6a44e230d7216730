"""Estimate of the speed-up of speculation for responses of these lengths: cells of a study, and the verdict of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance, GeometricAcceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.load import DEFAULT, DEFAULTS, WITH_EPOCHS, load_acceptance, with_drafter
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.calibration.api import parse_rl_steps
from tltlab.costs.base import CostModel
from tltlab.costs.deployment import GPUS
from tltlab.drafters.specs import STANDARD
from tltlab.errors import ConfigError
from tltlab.hardware import ModelShape
from tltlab.importers.formats import Format
from tltlab.importers.rows import Reading
from tltlab.importers.sources import TraceSource, read_lengths
from tltlab.planning.composition import System
from tltlab.planning.system_binding import BoundSystem
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import TableSpec
from tltlab.sim.config import (
    SimulationConfig,
    Source,
    at_least,
    beside_trace,
    check_keywords,
    decision_interval,
    has_epochs,
)
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import SimResult, outside_calibration, simulated
from tltlab.sim.tuning.drafter_training import best_table, drafter_training
from tltlab.stats import paired_speed_up
from tltlab.traces.trace import Trace

from .band import InputErrors, Times, bands
from .logged import LoggedRun, Running, machine_of
from .reduce import Comparison, compared, intervals_of
from .sample import Scenarios, small
from .study import Cell, Study
from .systems import bind_all, replayable, system_cell
from .verdict import LEAST, MOST, Answer, WhatIf

EXPECTED = "longest_expected"
"""Placement by expected lengths, whose gain every answer has."""
_CURVE = (0.3, 0.6, 0.95)
_DEFAULT_SYSTEMS = ("verl", "tlt", "tlt-base", "vllm-dynamic")


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
    `tltlab.acceptance.load.DEFAULTS`. `accept` is short for the chance that a token of `drafter` ("learned") is
    accepted once those before it were, all other drafters as in `DEFAULTS`.

    The best table of draft depths by batch size is found for every drafter that the acceptance names, or for `drafter`
    alone: the tables that `tune` searches too. The answers are the fastest of drafters that need no training and the
    fastest of trained ones, each with its range and with what `EXPECTED` placement would add. `rl_steps` (numbers, or
    text such as "0:5" or "all") are simulated, by default a sample where there are more than 24 (`Scenarios.answer`).
    `jobs` processes (None: one per core) share the cells. `on_stage` receives each finished stage and the number of
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
    drafter = "learned" if accept is not None and drafter is None else drafter
    reading = reading or Reading()
    source = read_lengths(lengths, replace(reading, column=column or reading.column), form)
    trace = source.trace
    chosen = parse_rl_steps(rl_steps, trace.rl_steps) if isinstance(rl_steps, str) else rl_steps
    config = SimulationConfig(
        gpus=gpus, model=model, engine=engine, tp=tp, costs=costs, workers=workers, acceptance=acceptance, seed=seed,
        rl_steps=chosen,
    )  # fmt: skip
    config, recorded = _with_acceptance(with_default_machine(config, trace), trace, accept, drafter)
    logged = LoggedRun.of(Scenarios(trace, config))
    scenarios = logged.scenarios
    compared_with = list(find_systems(systems or _DEFAULT_SYSTEMS))
    # All results are relative to VeRL, which does not speculate.
    verl = SYSTEMS["verl"]
    ask = _Question(
        scenarios=scenarios, drafters=_drafters(scenarios, drafter), recorded=recorded, logged=logged, jobs=jobs,
        systems=compared_with if verl in compared_with else [verl, *compared_with], on_stage=on_stage,
        block=decision_interval(trace),
    )  # fmt: skip
    found = scenarios.answer(ask.answer, ask.is_enough)
    scenario, best, base, machine = found.scenario, found.answers[0], found.base, scenarios.machine
    evidence, is_known = scenario.evidence(best.policy.strategies), scenario.costs.evidence is not None
    # The RL step of median rollout time, the lower of two.
    median = int(np.argsort(base.rollout_s, kind="stable")[(len(base.rollout_s) - 1) // 2])
    return WhatIf(
        trace=trace, used=source.used, ignored=source.ignored, workers=scenario.workers, answers=found.answers,
        setting=machine.name if machine else f"costs {scenario.costs_name}", costs_name=scenario.costs_name,
        distance=evidence["distance"] if is_known else _measured_here(scenario, found.plain),
        evidence=evidence["says"] if is_known else f"costs {scenario.costs_name}",
        by_accept=found.by_accept, with_epochs=found.with_epochs, plain_s=found.plain.makespan_s,
        systems=found.systems, decision_block=ask.block,
        notes=(*source.notes, *logged.notes, f"acceptance: {scenario.acceptance_name}",
               *(machine.assumed if machine else ())),
        rollout_share=logged.share if logged.share is not None or base.step_s is None
        else float(base.rollout_s.sum() / base.step_s.sum()),
        share_of=logged.share_of, running=found.running, crowded_share=_crowded_share(found.plain, best.policy),
        training=drafter_training(trace, scenario), recorded=recorded, num_rl_steps=len(scenario.steps),
        is_sampled=scenarios.is_sampled, wall_s=time.perf_counter() - started,
        example=scenarios.of([scenario.steps[median].rl_step]), config=config,
    )  # fmt: skip


def with_default_machine(config: SimulationConfig, trace: Trace) -> SimulationConfig:
    """Return the settings; where they name no machine that of the trace's costs, else of its log, else `GPUS`."""
    counted = config.workers is not None or trace.manifest.num_workers is not None
    has_costs = counted and beside_trace(trace, "costs.json") is not None
    if config.is_on_machine or config.costs is not None or has_costs:
        return config
    return replace(config, **({"gpus": GPUS} | machine_of(trace)))


def _with_acceptance(
    config: SimulationConfig, trace: Trace, accept: float | None, drafter: str | None
) -> tuple[SimulationConfig, bool]:
    """Return the settings with the acceptance that is asked for, and whether the trace has it."""
    known, _ = config.find_acceptance(trace)
    if drafter is not None and (known is None or drafter not in known.drafters):
        STANDARD[drafter]  # Refuses a name that no drafter has.
    if accept is not None and drafter is not None:
        usual, own = load_acceptance(DEFAULT, epochs=has_epochs(trace)), GeometricAcceptance(alpha=accept)
        return replace(config, acceptance=with_drafter(usual, drafter, own)), False
    if known is None:
        return replace(config, acceptance=DEFAULT), False
    return config, config.acceptance in (None, "trace")


def _drafters(scenarios: Scenarios, drafter: str | None) -> list[str]:
    """Return the drafters to search; ConfigError where one model would serve drafters of different kinds."""
    if drafter is not None:
        return [drafter]
    granted = scenarios.acceptance
    assert granted is not None
    names = list(granted.drafters)
    if not names:
        names = [name for name in DEFAULTS if granted.knows(name)]
        scenarios.of(scenarios.trace.rl_steps[:1]).check_drafters(names)
    return names


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Simulations of some RL steps; the answer without training comes first."""

    scenario: Scenario
    plain: SimResult
    base: Times
    answers: tuple[Answer, ...]
    by_accept: Mapping[float, Times]
    with_epochs: float | None
    running: Running | None
    systems: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A question without its RL steps."""

    scenarios: Scenarios
    drafters: Sequence[str]
    systems: Sequence[System]
    recorded: bool
    block: int
    logged: LoggedRun
    jobs: int | None
    on_stage: Callable[[str, int], None]

    def answer(self, rl_steps: Sequence[int]) -> _Found:
        """Simulate these RL steps without speculation, under the best table of each drafter, and under each system."""
        scenario, total = self.scenarios.of(rl_steps), 5
        responses = sum(len(step.chains) for step in scenario.steps)
        self.on_stage(f"{responses} responses of {len(scenario.steps)} RL steps", total)
        plain = simulated(scenario, load_policy("none"), "none", self.scenarios.trace.manifest)
        tables = self._tables(scenario)
        table = Study(cells=list(self._cells(rl_steps, tables)), jobs=self.jobs)
        rows = table.table()
        times = {cell.name: _times(rows[rows["cell"] == at]) for at, cell in enumerate(table.cells)}
        base = times["none"]
        self.on_stage("plain decoding, and the best table of each drafter", total)
        best = self._best(scenario, tables, times)
        answers = tuple(self._answer(scenario, name, tables[name], times, base) for name in best)
        self.on_stage("90 % range", total)
        chances = self._chances(scenario, best[0])
        curve = dict(zip(chances, self._curve(rl_steps, best[0], chances), strict=True))
        self.on_stage("acceptance", total)
        systems = self._compared(rl_steps, {name: tables[name] for name in best})
        self.on_stage(f"systems {', '.join(systems['system'])}", total)
        return _Found(
            scenario=scenario, plain=plain, base=base, answers=answers, by_accept=curve,
            with_epochs=self._with_epochs(rl_steps, base), systems=systems,
            running=self._running(scenario, answers[0], base),
        )  # fmt: skip

    def _tables(self, scenario: Scenario) -> dict[str, Policy]:
        """Return the best table of each drafter. ConfigError where the acceptance covers no chain of any."""
        tables = {}
        for name in self.drafters:
            chains, _ = scenario.covered_chains([name])
            if chains:
                tables[name] = best_table(scenario, chains)
        if not tables:
            raise ConfigError(
                f"the acceptance covers no chain 1 to 8 deep of {' or '.join(self.drafters)}: give --acceptance "
                f"{self.drafters[0]}=geometric:ALPHA"
            )
        return tables

    def _cells(self, rl_steps: Sequence[int], tables: Mapping[str, Policy]) -> Iterator[Cell]:
        """Yield plain decoding and each drafter's table, then the tables under a placement by expected lengths."""
        here = self.scenarios.of(rl_steps)
        placed = self.scenarios.of(rl_steps, placement=EXPECTED)
        for name, policy in {"none": load_policy("none"), **tables}.items():
            yield self._cell(name, policy, here)
        for name, policy in tables.items():
            yield self._cell(f"{name} {EXPECTED}", policy, placed)

    def _cell(self, name: str, policy: Policy, scenario: Scenario) -> Cell:
        return Cell(name=name, policy=policy, scenario=scenario, stages=self.logged.stages)

    def _best(self, scenario: Scenario, tables: Mapping[str, Policy], times: Mapping[str, Times]) -> list[str]:
        """Return the fastest drafter that needs no training and the fastest with a network, where there are both."""
        best = []
        for trained in (False, True):
            names = [name for name in tables if scenario.registry[name].has_network == trained]
            if names:
                best.append(min(names, key=lambda name: float(times[name].rollout_s.sum())))
        return best

    def _answer(
        self, scenario: Scenario, name: str, policy: Policy, times: Mapping[str, Times], base: Times
    ) -> Answer:
        own, placed, seed = times[name], times[f"{name} {EXPECTED}"], scenario.seed
        whole = None
        if base.step_s is not None and own.step_s is not None:
            whole = paired_speed_up(base.step_s, own.step_s, seed)
        rollout_band, step_band = bands_of(self, scenario, policy, name, own, base)
        return Answer(
            drafter=name, trained=scenario.registry[name].has_network, policy=policy, times=own,
            rollout=paired_speed_up(base.rollout_s, own.rollout_s, seed), rl_step=whole, band=rollout_band,
            rl_step_band=step_band, placement_gain=float(own.rollout_s.sum() / placed.rollout_s.sum()),
            accept=self._chance(name), acceptance=scenario.granted([*scenario.covered_chains([name])[0]])["acceptance"],
        )  # fmt: skip

    def _running(self, scenario: Scenario, answer: Answer, base: Times) -> Running | None:
        """Return the speed-up over the log's own run; None where that does not draft."""
        drafting, own = self.logged.drafting, self.logged.running([step.rl_step for step in scenario.steps], base)
        if drafting is None or own is None:
            return None
        ranges = bands_of(self, scenario, answer.policy, answer.drafter, answer.times, own, self.logged.policy)
        return Running.of(drafting, own, answer.times, ranges, scenario.seed)

    def _chance(self, drafter: str) -> float | None:
        """Return the chance that a token of a drafter is accepted, where it is the same for all of them."""
        if self.recorded:
            return None
        part = _part(self.scenarios.acceptance, drafter)
        inner = part.base if isinstance(part, ContextAcceptance) else part
        return inner.alpha if isinstance(inner, GeometricAcceptance) else None

    def _chances(self, scenario: Scenario, drafter: str) -> list[float]:
        own = self._chance(drafter)
        return [] if own is None else sorted({*_CURVE, LEAST, MOST, own})

    def _curve(self, rl_steps: Sequence[int], drafter: str, chances: Sequence[float]) -> list[Times]:
        """Return the times of the best table where another share of the drafter's tokens is accepted."""
        granted = self.scenarios.acceptance
        assert granted is not None
        part, cells = _part(granted, drafter), []
        for chance in chances:
            own = GeometricAcceptance(alpha=chance)
            # The curve is over chances within the trained length.
            model = with_drafter(granted, drafter, part.with_parts([own]) if isinstance(part, ContextAcceptance) else own)
            cells.append(self._best_cell(f"{chance}", self.scenarios.of(rl_steps, acceptance=model), drafter))
        rows = Study(cells=cells, jobs=self.jobs).table() if cells else pd.DataFrame()
        return [_times(rows[rows["cell"] == at]) for at in range(len(cells))]

    def _best_cell(self, name: str, scenario: Scenario, drafter: str) -> Cell:
        return self._cell(name, best_table(scenario, scenario.covered_chains([drafter])[0]), scenario)

    def _with_epochs(self, rl_steps: Sequence[int], base: Times) -> float | None:
        """Return the speed-up that drafts from earlier epochs of the same prompts would bring.

        None where the trace has earlier epochs, and where the acceptance of those drafters was given.
        """
        granted, cells = self.scenarios.acceptance, []
        for name, text in WITH_EPOCHS.items():
            usual = f"{DEFAULTS[name]} ({DEFAULT})"
            if name in self.drafters and isinstance(granted, PerDrafter) and granted.texts.get(name) == usual:
                model = with_drafter(granted, name, load_acceptance(text))
                cells.append(self._best_cell(name, self.scenarios.of(rl_steps, acceptance=model), name))
        if not cells:
            return None
        rows = Study(cells=cells, details=False).table()
        return float(base.rollout_s.sum() / rows.groupby("cell")["makespan_s"].sum().min())

    def _compared(self, rl_steps: Sequence[int], tables: Mapping[str, Policy]) -> Comparison:
        """Compare systems, and the answers' tables with the acceptance that is given beside them."""
        scenarios = self.scenarios.under(decision_block=self.block)
        nominal, stages = scenarios.of(rl_steps), self.logged.stages
        bound = bind_all(self.systems, nominal)
        acceptance = replayable(nominal.acceptance, nominal.steps)
        for name, policy in tables.items():
            system = table_row(name)
            bound.append(
                BoundSystem(
                    system=system, policy=policy, acceptance=acceptance, spot=None, assumptions=system.assumptions
                )
            )
        cells = [system_cell(binding, scenarios, rl_steps, stages) for binding in bound]
        rows = Study(cells=cells, jobs=self.jobs).table()
        order = "makespan_s" if stages is None else "step_s"
        frame = pd.DataFrame(compared(cells, rows, nominal, "verl")).sort_values(order, kind="stable", ignore_index=True)
        result = Comparison(frame)
        result.attrs |= {
            "baseline": "verl", "axes": {}, "num_rl_steps": len(nominal.steps), "num_workers": nominal.workers,
            "num_rl_steps_of": len(self.scenarios.run), "num_gpus": nominal.workers * nominal.costs.tensor_parallel,
        }  # fmt: skip
        return result

    def is_enough(self, found: _Found) -> bool:
        """True if RL steps more would not make the speed-ups much surer, as their costs are off."""
        ratios = [ratio for a in found.answers for ratio in (a.rollout, a.rl_step) if ratio is not None]
        rows: Any = found.systems.to_dict("records")
        ratios += [ratio for name in ("ratio", "step_ratio") for ratio in intervals_of(rows, name)]
        return small(ratios, found.scenario.evidence(found.answers[0].policy.strategies)["speedup_error"])


def bands_of(
    ask: _Question, scenario: Scenario, policy: Policy, drafter: str, own: Times, base: Times,
    baseline: Policy | None = None,
) -> Any:  # fmt: skip
    """Return the ranges of an answer; a table that drafts nothing has those of the best ones at the inputs' ends."""
    chains, _ = scenario.covered_chains([drafter])
    strategies = [s for s in policy.strategies if s.speculates]
    errors = InputErrors.of(scenario, strategies or chains, ask.scenarios.trace, recorded=ask.recorded)
    if ask.logged.share is not None:
        errors = replace(errors, seconds=0.0, stages=0.0)

    def policy_at(end: Scenario) -> Policy:
        return policy if strategies else best_table(end, chains)

    return bands(scenario, policy_at, base, own, errors, baseline=baseline, jobs=ask.jobs)


def table_row(drafter: str) -> System:
    """Return the row of `systems` that an answer is about."""
    return System(
        name=f"table-{drafter}",
        title=f"Best table of {drafter}",
        source="tltlab what-if, the table under drafting",
        algorithm="the exact table of up to four draft depths by batch size for these costs and this acceptance",
        assumptions=("a static split, as VeRL's; the acceptance that the verdict names",),
    )


def _part(model: Acceptance | None, drafter: str) -> Acceptance:
    assert model is not None
    return model.of(drafter) if isinstance(model, PerDrafter) else model


def _times(rows: pd.DataFrame) -> Times:
    step_s = rows["step_s"].to_numpy(np.float64)
    return Times(
        rollout_s=rows["makespan_s"].to_numpy(np.float64), step_s=step_s if np.isfinite(step_s).all() else None
    )


def _crowded_share(plain: SimResult, policy: Policy) -> float:
    """Return the share of busy worker time, without speculation, at batch sizes where the policy drafts nothing."""
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
    """Return how near costs without a profile's evidence are: whether the fit covered what is simulated."""
    if scenario.costs.calibrated is None:
        return "never measured"
    return "interpolated" if outside_calibration(scenario, plain.rollouts) else "measured together"
