"""Estimate of the speed-up of speculation for responses of these lengths: cells of a study, and the verdict of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np

from tltlab.acceptance.base import Acceptance, GeometricAcceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.load import DEFAULT, DEFAULTS, WITH_EPOCHS, load_acceptance, with_drafter
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.costs.deployment import GPUS
from tltlab.drafters.specs import STANDARD
from tltlab.errors import ConfigError
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format, Imported, TraceSource, read_lengths
from tltlab.options import Option
from tltlab.planning.composition import System
from tltlab.planning.system_binding import BoundSystem
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.policies.policy import Policy, load_policy
from tltlab.sim.config import (
    SimulationConfig,
    beside_trace,
    check_keywords,
    decision_interval,
    has_epochs,
)
from tltlab.sim.placement import EXPECTED
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import simulated
from tltlab.sim.tuning.drafter_training import best_table, drafter_training
from tltlab.traces.trace import Trace

from .band import Band, InputErrors, Times, bands
from .logged import LoggedRun, Running
from .reduce import Comparison, compared, comparison, intervals_of
from .sample import Scenarios, small
from .study import Cell, Study
from .systems import bind_all, replayable, system_cell
from .verdict import LEAST, MOST, Answer, WhatIf

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
    compared_with = list(find_systems(config.systems or _DEFAULT_SYSTEMS))
    # All results are relative to VeRL, which does not speculate.
    verl = SYSTEMS["verl"]
    drafters = [drafter] if drafter else logged.scenarios.of(trace.rl_steps[:1]).searched_drafters()
    ask = _Question(
        source=source, config=asked, drafters=drafters, recorded=recorded, logged=logged, jobs=config.jobs,
        systems=compared_with if verl in compared_with else [verl, *compared_with], block=decision_interval(trace),
    )  # fmt: skip
    found = logged.scenarios.answer(ask.answer, ask.is_enough)
    training = drafter_training(trace, found.scenario)
    return replace(found, training=training, wall_s=time.perf_counter() - started)


def with_default_machine(config: WhatIfConfig, trace: Trace) -> WhatIfConfig:
    """Return the settings; where they name no machine that of the trace's costs, else `GPUS`."""
    counted = config.workers is not None or trace.manifest.num_workers is not None
    has_costs = counted and beside_trace(trace, "costs.json") is not None
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
class _Question:
    """A question without its RL steps."""

    source: Imported
    config: SimulationConfig
    drafters: Sequence[str]
    systems: Sequence[System]
    recorded: bool
    block: int
    logged: LoggedRun
    jobs: int | None

    def answer(self, rl_steps: Sequence[int]) -> WhatIf:
        """Simulate these RL steps without speculation, under the best table of each drafter, and under each system."""
        scenario, none = self.logged.scenarios.of(rl_steps), load_policy("none")
        tables, placed = self._tables(scenario), scenario.placed(EXPECTED)
        cells = [self._cell(name, policy, scenario) for name, policy in {"none": none, **tables}.items()]
        cells += [self._cell(f"{name} {EXPECTED}", policy, placed) for name, policy in tables.items()]
        times = self._times(cells)
        base, best = times["none"], list[str]()
        # The fastest drafter that needs no training, then the fastest with a network.
        for trained in (False, True):
            names = [name for name in tables if scenario.registry[name].has_network == trained]
            if names:
                best.append(min(names, key=lambda name: float(times[name].rollout_s.sum())))
        answers = tuple(self._answer(scenario, name, tables[name], times) for name in best)
        by_accept = self._times(self._at_chances(rl_steps, best[0]))
        epochs = [float(found.rollout_s.sum()) for found in self._times(self._with_epochs(rl_steps)).values()]
        return WhatIf(
            source=self.source, config=self.config, logged=self.logged, recorded=self.recorded,
            decision_block=self.block, scenario=scenario, base=base, answers=answers,
            plain=simulated(scenario, none, "none", self.source.trace.manifest),
            by_accept={float(chance): found for chance, found in by_accept.items()},
            with_epochs=float(base.rollout_s.sum()) / min(epochs) if epochs else None,
            running=self._running(scenario, answers[0], base),
            systems=self._compared(rl_steps, {name: tables[name] for name in best}),
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

    def _cell(self, name: str, policy: Policy, scenario: Scenario) -> Cell:
        return Cell(name=name, policy=policy, scenario=scenario, stages=self.logged.stages)

    def _times(self, cells: Iterable[Cell]) -> dict[str, Times]:
        """Simulate the cells; return the seconds of each by its name."""
        cells, found = list(cells), {}
        table = Study(cells=cells, jobs=self.jobs).table()
        for at, cell in enumerate(cells):
            rows = table[table["cell"] == at]
            rollout_s, step_s = (rows[name].to_numpy(np.float64) for name in ("makespan_s", "step_s"))
            found[cell.name] = Times(rollout_s=rollout_s, step_s=step_s if np.isfinite(step_s).all() else None)
        return found

    def _answer(self, scenario: Scenario, name: str, policy: Policy, times: Mapping[str, Times]) -> Answer:
        own, base = times[name], times["none"]
        return Answer.of(
            base, own, self._ranges(scenario, policy, name, own, base), scenario.seed, drafter=name,
            trained=scenario.registry[name].has_network, policy=policy, times=own,
            placement_gain=float(own.rollout_s.sum() / times[f"{name} {EXPECTED}"].rollout_s.sum()),
            accept=self._chance(name), acceptance=scenario.granted([*scenario.covered_chains([name])[0]])["acceptance"],
        )  # fmt: skip

    def _running(self, scenario: Scenario, answer: Answer, base: Times) -> Running | None:
        """Return the speed-up over the log's own run; None where that does not draft."""
        drafting, own = self.logged.drafting, self.logged.running([step.rl_step for step in scenario.steps], base)
        if drafting is None or own is None:
            return None
        ranges = self._ranges(scenario, answer.policy, answer.drafter, answer.times, own, self.logged.policy)
        return Running.of(own, answer.times, ranges, scenario.seed, drafting=drafting)

    def _ranges(
        self, scenario: Scenario, policy: Policy, drafter: str, own: Times, base: Times, baseline: Policy | None = None
    ) -> tuple[Band, Band | None]:
        """Return the ranges of an answer; a table without drafts has those of the best ones at the inputs' ends."""
        chains, _ = scenario.covered_chains([drafter])
        strategies = [s for s in policy.strategies if s.speculates]
        errors = InputErrors.of(scenario, strategies or chains, self.source.trace, recorded=self.recorded)
        if self.logged.share is not None:
            errors = replace(errors, seconds=0.0, stages=0.0)

        def policy_at(end: Scenario) -> Policy:
            return policy if strategies else best_table(end, chains)

        return bands(scenario, policy_at, base, own, errors, baseline=baseline, jobs=self.jobs)

    def _granted(self, drafter: str) -> Acceptance | None:
        model = self.logged.scenarios.acceptance
        return model.of(drafter) if isinstance(model, PerDrafter) else model

    def _chance(self, drafter: str) -> float | None:
        """Return the chance that a token of a drafter is accepted, where it is the same for all of them."""
        part = self._granted(drafter)
        inner = part.base if isinstance(part, ContextAcceptance) else part
        return inner.alpha if isinstance(inner, GeometricAcceptance) and not self.recorded else None

    def _at_chances(self, rl_steps: Sequence[int], drafter: str) -> Iterator[Cell]:
        """Yield the best tables at other chances of the drafter's tokens; none where these were recorded."""
        if (known := self._chance(drafter)) is None:
            return
        part = self._granted(drafter)
        for chance in sorted({LEAST, MOST, known}):
            own = GeometricAcceptance(alpha=chance)
            # The chances are those within the trained length.
            model = part.with_parts([own]) if isinstance(part, ContextAcceptance) else own
            yield self._best_cell(str(chance), rl_steps, drafter, model)

    def _best_cell(self, name: str, rl_steps: Sequence[int], drafter: str, model: Acceptance) -> Cell:
        """Return the best table of a drafter of this acceptance."""
        granted = self.logged.scenarios.acceptance
        assert granted is not None
        scenario = self.logged.scenarios.of(rl_steps, acceptance=with_drafter(granted, drafter, model))
        return self._cell(name, best_table(scenario, scenario.covered_chains([drafter])[0]), scenario)

    def _with_epochs(self, rl_steps: Sequence[int]) -> Iterator[Cell]:
        """Yield the best tables of drafts from earlier epochs of the same prompts.

        None where the trace has earlier epochs, and where the acceptance of those drafters was given.
        """
        granted = self.logged.scenarios.acceptance
        for name, text in WITH_EPOCHS.items():
            usual = f"{DEFAULTS[name]} ({DEFAULT})"
            if name in self.drafters and isinstance(granted, PerDrafter) and granted.texts.get(name) == usual:
                yield self._best_cell(name, rl_steps, name, load_acceptance(text))

    def _compared(self, rl_steps: Sequence[int], tables: Mapping[str, Policy]) -> Comparison:
        """Compare systems, and the answers' tables with the acceptance that is given beside them."""
        scenarios = self.logged.scenarios.under(decision_block=self.block)
        nominal = scenarios.of(rl_steps)
        bound = bind_all(self.systems, nominal)
        acceptance = replayable(nominal.acceptance, nominal.steps)
        for name, policy in tables.items():
            row = table_row(name)
            bound.append(
                BoundSystem(system=row, policy=policy, acceptance=acceptance, spot=None, assumptions=row.assumptions)
            )
        cells = [system_cell(binding, scenarios, rl_steps, self.logged.stages) for binding in bound]
        rows = Study(cells=cells, jobs=self.jobs).table()
        attrs = {
            "baseline": "verl", "num_rl_steps": len(nominal.steps), "num_workers": nominal.workers,
            "num_rl_steps_of": len(scenarios.run), "num_gpus": nominal.workers * nominal.costs.tensor_parallel,
        }  # fmt: skip
        return comparison(compared(cells, rows, nominal, "verl"), {}, attrs)

    def is_enough(self, found: WhatIf) -> bool:
        """True if RL steps more would not make the speed-ups much surer, as their costs are off."""
        ratios = [ratio for a in found.answers for ratio in (a.rollout, a.rl_step) if ratio is not None]
        rows: Any = found.systems.to_dict("records")
        ratios += [ratio for name in ("ratio", "step_ratio") for ratio in intervals_of(rows, name)]
        return small(ratios, found.scenario.evidence(found.best.policy.strategies)["speedup_error"])


def table_row(drafter: str) -> System:
    """Return the row of `systems` that an answer is about."""
    return System(
        name=f"table-{drafter}",
        title=f"Best table of {drafter}",
        source="tltlab what-if, the table under drafting",
        algorithm="the exact table of up to four draft depths by batch size for these costs and this acceptance",
        assumptions=("a static split, as VeRL's; the acceptance that the verdict names",),
    )
