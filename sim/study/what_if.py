"""Estimate of the speed-up of speculation for responses of these lengths: cells of a study, and the verdict of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance, GeometricAcceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.load import DEFAULT, DEFAULTS, WITH_EPOCHS, load_acceptance, with_drafter
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.costs.deployment import GPUS
from tltlab.drafters.specs import STANDARD
from tltlab.errors import ConfigError
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format, TraceSource, read_lengths
from tltlab.options import Option
from tltlab.planning.composition import System
from tltlab.planning.system_binding import BoundSystem
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import TableSpec
from tltlab.sim.config import (
    SimulationConfig,
    check_keywords,
    decision_interval,
    file_of_run,
    has_epochs,
)
from tltlab.sim.placement import EXPECTED
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import SimResult, outside_calibration, simulated
from tltlab.sim.tuning.drafter_training import best_table, drafter_training
from tltlab.stats import paired_speed_up
from tltlab.traces.trace import Trace

from .band import InputErrors, Times, bands
from .logged import LoggedRun, Running
from .reduce import Comparison, compared, comparison, intervals_of
from .sample import Scenarios, small
from .study import Cell, Study
from .systems import bind_all, replayable, system_cell
from .verdict import LEAST, MOST, Answer, WhatIf

_CURVE = (0.3, 0.6, 0.95)
_DEFAULT_SYSTEMS = ("verl", "tlt", "tlt-base", "vllm-dynamic")


@dataclass(frozen=True, kw_only=True)
class WhatIfConfig(SimulationConfig):
    """Settings of an estimate, beside those of its simulations; where no machine is named see `with_default_machine`.

    `accept` is short for the chance that a token of `drafter` ("learned") is accepted once those before it were, all
    other drafters as in `tltlab.acceptance.load.DEFAULTS`. With a `drafter` its table alone is found. `systems` are
    compared beside. `jobs` processes (None: one per core) share the cells. Raises ConfigError for an `accept` that is
    no chance or stands beside an acceptance.
    """

    accept: Annotated[
        float | None,
        Option("Short for the chance of --drafter's tokens, the others' as usual. [default: 0.7 of learned]"),
    ] = None
    drafter: Annotated[str | None, Option("The only drafter to find a table for. [default: all of the acceptance]")] = (
        None
    )
    systems: Annotated[
        str | Sequence[str] | None,
        Option(f"Systems of the table: all, or of {', '.join(SYSTEMS)}. [default: four of them]"),
    ] = None
    jobs: Annotated[int | None, Option("Processes. [default: the cores here]", min=1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accept is not None and not 0.0 < self.accept < 1.0:
            raise ConfigError(f"accept is a chance between 0 and 1, such as 0.7, got {self.accept:g}")
        if self.accept is not None and self.acceptance is not None:
            raise ConfigError(
                f"accept {self.accept:g} is short for an acceptance of one drafter: leave out one of the two"
            )

    @property
    def only_drafter(self) -> str | None:
        """The only drafter to find a table for; None: all."""
        return "learned" if self.accept is not None and self.drafter is None else self.drafter


def what_if(
    lengths: TraceSource,
    config: WhatIfConfig = WhatIfConfig(),
    *,
    reading: Reading = Reading(),
    form: Format | None = None,
    **settings: Any,
) -> WhatIf:
    """Simulate these responses with and without speculation; the answer is `verdict`, the rest is behind it.

    `lengths` are whatever `read_lengths` takes: a file of any of its formats, a trace, a DataFrame, an array.
    `settings` are fields of `WhatIfConfig` and of `Reading` (such as the `column` of the lengths) that replace those of
    `config` and `reading`; `form` is the file's format. For a training log with stages, rollouts and stages take the
    log's seconds, and one that drafts is compared with its own run first (`WhatIf.running`). Acceptance that is not
    given is the recorded one, else `tltlab.acceptance.load.DEFAULTS`.

    The best table of draft depths by batch size is found for every drafter that the acceptance names: the tables that
    `tune` searches too. The answers are the fastest of drafters that need no training and the fastest of trained ones,
    each with its range and with what `EXPECTED` placement would add. By default a sample is simulated of more than 24
    RL steps (`Scenarios.answer`). Costs O(responses) per policy, most of it the bandits among `systems`.

    >>> what_if([200] * 500 + [4000] * 12, gpus="8xH100", model="Qwen2.5-7B").verdict  # doctest: +SKIP
    """
    started = time.perf_counter()
    of_reading = {field.name for field in fields(Reading)} & settings.keys()
    check_keywords(settings, [field.name for field in (*fields(config), *fields(Reading))], what_if)
    reading = replace(reading, **{name: settings.pop(name) for name in of_reading})
    source = read_lengths(lengths, reading, form)
    trace = source.trace
    asked = with_default_machine(replace(config, **settings), trace)
    config, drafter, recorded = _with_acceptance(asked, trace)
    logged = LoggedRun.of(Scenarios(trace, config))
    scenarios = logged.scenarios
    compared_with = list(find_systems(config.systems or _DEFAULT_SYSTEMS))
    # All results are relative to VeRL, which does not speculate.
    verl = SYSTEMS["verl"]
    drafters = [drafter] if drafter else scenarios.of(trace.rl_steps[:1]).searched_drafters()
    ask = _Question(
        scenarios=scenarios, drafters=drafters, recorded=recorded, logged=logged, jobs=config.jobs,
        systems=compared_with if verl in compared_with else [verl, *compared_with], block=decision_interval(trace),
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
        example=scenarios.of([scenario.steps[median].rl_step]), config=asked,
    )  # fmt: skip


def with_default_machine(config: WhatIfConfig, trace: Trace) -> WhatIfConfig:
    """Return the settings; where they name no machine that of the trace's costs, else `GPUS`."""
    counted = config.workers is not None or trace.manifest.num_workers is not None
    has_costs = counted and file_of_run(trace, "costs.json") is not None
    if config.is_on_machine or config.costs is not None or has_costs:
        return config
    return replace(config, gpus=GPUS)


def _with_acceptance(config: WhatIfConfig, trace: Trace) -> tuple[WhatIfConfig, str | None, bool]:
    """Return the settings with the acceptance that is asked for, the only drafter, and whether the trace has it."""
    known, drafter = config.find_acceptance(trace)[0], config.only_drafter
    if drafter is not None and (known is None or drafter not in known.drafters):
        STANDARD[drafter]  # Refuses a name that no drafter has.
    if config.accept is not None and drafter is not None:
        usual, own = load_acceptance(DEFAULT, epochs=has_epochs(trace)), GeometricAcceptance(alpha=config.accept)
        return replace(config, acceptance=with_drafter(usual, drafter, own), accept=None), drafter, False
    if known is None:
        return replace(config, acceptance=DEFAULT), drafter, False
    return config, drafter, config.acceptance in (None, "trace")


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
    systems: Comparison


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

    def answer(self, rl_steps: Sequence[int]) -> _Found:
        """Simulate these RL steps without speculation, under the best table of each drafter, and under each system."""
        scenario = self.scenarios.of(rl_steps)
        plain = simulated(scenario, load_policy("none"), "none", self.scenarios.trace.manifest)
        tables = self._tables(scenario)
        table = Study(cells=list(self._cells(rl_steps, tables)), jobs=self.jobs)
        rows = table.table()
        times = {cell.name: _times(rows[rows["cell"] == at]) for at, cell in enumerate(table.cells)}
        base = times["none"]
        best = self._best(scenario, tables, times)
        answers = tuple(self._answer(scenario, name, tables[name], times, base) for name in best)
        chances = self._chances(scenario, best[0])
        curve = dict(zip(chances, self._curve(rl_steps, best[0], chances), strict=True))
        systems = self._compared(rl_steps, {name: tables[name] for name in best})
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
        placed = here.placed(EXPECTED)
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

    def _answer(self, scenario: Scenario, name: str, policy: Policy, times: Mapping[str, Times], base: Times) -> Answer:
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
            model = with_drafter(
                granted, drafter, part.with_parts([own]) if isinstance(part, ContextAcceptance) else own
            )
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
        attrs = {
            "baseline": "verl", "num_rl_steps": len(nominal.steps), "num_workers": nominal.workers,
            "num_rl_steps_of": len(self.scenarios.run), "num_gpus": nominal.workers * nominal.costs.tensor_parallel,
        }  # fmt: skip
        return comparison(compared(cells, rows, nominal, "verl"), {}, attrs)

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
