"""`compare`: policies, or systems from the literature, on one trace and at every combination of the axes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.costs.load import load_stages
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.planning.composition import System
from tltlab.planning.systems import find_systems
from tltlab.policies.policy import Policy, PolicySource
from tltlab.sim.config import SimulationConfig, Source, at_least, check_keywords, decision_interval
from tltlab.sim.scenario import Scenario, named_policies
from tltlab.stats import Interval
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .logged import LoggedRun, machine_of
from .reduce import Comparison, compared, intervals_of
from .sample import Scenarios, samples, small
from .study import Cell, Journal, Study
from .systems import bind_all, system_cell

AXES = ("workers", "gpus", "model", "engine", "tp", "costs", "acceptance", "placement", "max_response_tokens", "group_size")  # fmt: skip
"""Settings of which a list makes a grid; `group_size` keeps the first samples of each prompt."""
POLICIES = "none,table,beg-mab,adaptive"
Policies = Mapping[str, PolicySource] | Sequence[PolicySource] | str


def compare(
    trace: TraceSource,
    policies: Policies | None = None,
    config: SimulationConfig = SimulationConfig(),
    *,
    systems: str | Sequence[str | System] | None = None,
    baseline: str | None = None,
    stages: StageCosts | Source | None = None,
    gpus_per_worker: int | None = None,
    repeats: int = 1,
    jobs: int | None = 1,
    journal: Path | None = None,
    done: Callable[[str], None] = lambda label: None,
    **settings: Any,
) -> Comparison:
    """Compare policies, or `systems` from the literature, on the same responses with common random numbers.

    `policies` are a dict of policies by name, a list, or names with commas between, each as `simulate` takes it.
    `settings` are fields of `SimulationConfig` that replace those of `config`; a list of values for one of `AXES` makes
    a grid, with a row for each policy at every combination. Systems bring their own placement and idle use, and all
    have the GPUs of `workers` workers of `gpus_per_worker` (default: the costs' tensor parallelism). With `stages`, or
    on `gpus`, whole RL steps are compared too.

    Rows are ordered by RL step, else by rollout, the fastest first; those of a grid by its points. Columns: `policy` or
    `system` (with its `title`), a column for each axis, `drafters` and the `acceptance` granted to each, `makespan_s`
    (of a rollout, mean over RL steps and repeats), `ratio` to the `baseline` (the first policy, `verl`; plain decoding
    on a grid; below 1 is faster) with its paired interval `ratio_low` to `ratio_high` over RL steps (Student's below
    ten), `speed_up` (1 / `ratio`) with its interval likewise, `tokens_per_s` that are trained on and its ratio,
    `regret` of the rollout to the clairvoyant bound over all chains that the acceptance covers (None under a
    per-request budget), `mean_accept_length`, `bubble_fraction`, `off_policy_share` and `wasted_share` of tokens,
    `intervals` of what has one by name; with stages `step_s`, `step_ratio`, `step_speed_up` and their intervals, and
    `rollout_share`; of a grid `num_rl_steps`. Systems have `lossless`, `runs_here` (True, or the parts that no engine
    here has), `length_bias` (mean length of trained responses over that of all begun), `claim` of the system's paper
    beside what is found, `workers` (those that generate), `assumptions`, `stand_ins`, `defaults` (numbers that were
    missing) and `source`.

    `repeats` are seeds, each with common random numbers for all; a step's repeats are averaged before resampling, since
    they share its lengths. Where `rl_steps` are left open in a trace of more than 24, a sample is simulated
    (`tltlab.sim.study.sample`), of each point its own. `jobs` processes (None: one per core) share the cells. `journal`
    is a file in which finished cells are kept, from which an interrupted comparison continues; `done` receives each.

    `attrs` has `axes`, `baseline`, `num_rl_steps` of the trace's `num_rl_steps_of`, `num_workers`, `num_gpus`, the
    names of `costs` and `acceptance`, `evidence` (`Scenario.evidence`), of the baseline and the fastest the largest
    `outside_calibration`, and `failed`: the message of each cell that raised. Raises ConfigError before anything runs.

    >>> compare("traces/tiny", "none,beg-mab", workers=[1, 2]).speed_up.tolist()  # doctest: +SKIP
    >>> compare("traces/tiny", systems="verl,tlt-base").set_index("system").ratio  # doctest: +SKIP
    """
    at_least(1, repeats=repeats, jobs=jobs)
    if systems is not None and policies is not None:
        raise ConfigError("systems bring their policies: compare one of the two")
    names = [field.name for field in fields(config)]
    check_keywords(settings, [*names, "group_size"], compare)
    axes = _axes(settings)
    config = replace(config, **{name: value for name, value in settings.items() if name in names and name not in axes})
    if not isinstance(settings.get("group_size"), int | None) and "group_size" not in axes:
        raise ConfigError(f"group_size is a whole number, got {settings['group_size']!r}")
    source = read(trace)
    if systems is not None:
        config = _of_systems(config, source, settings, systems := list(find_systems(systems)))
    chosen = {} if systems is not None else named_policies(POLICIES if policies is None else policies)
    if axes:
        # Each point has plain decoding, to which its other rows are compared.
        plain = find_systems("verl")[0]
        systems = systems and [plain, *(system for system in systems if system.name != plain.name)]
        chosen = chosen and named_policies("none") | chosen
    listed = [system.name for system in systems] if systems else list(chosen)
    baseline = baseline or ("verl" if systems and "verl" in listed else listed[0])
    if baseline not in listed:
        raise ConfigError(f"the baseline {baseline!r} is none of {', '.join(listed)}")
    question = _Question(
        chosen=chosen, systems=systems, stages=None if stages is None else load_stages(stages), repeats=repeats,
        gpus_per_worker=gpus_per_worker,
    )  # fmt: skip
    points = [_Point.of(source, config, dict(zip(axes, each, strict=True)), settings.get("group_size"), question.stages)
              for each in product(*axes.values())]  # fmt: skip
    kept = None
    if journal is not None:
        asked = [f"{f.name} {value}" for f in fields(config) if (value := getattr(config, f.name)) is not None]
        policies_json = {name: policy.model_dump(mode="json") for name, policy in chosen.items()}
        about = [source.num_rows("outcomes"), int(source.outcomes["response_tokens"].sum()), asked, policies_json, repeats]
        kept = Journal(path=journal, question=json.dumps([*about, systems is not None]), done=done)
    rows_of: dict[int, list[dict[str, Any]]] = {}
    attrs: dict[str, Any] = {"failed": {}}
    pending = list(range(len(points)))
    chosen_steps = points[0].scenarios.config.rl_steps
    for rl_steps in samples(source.rl_steps) if chosen_steps is None else [list(chosen_steps)]:
        cells = {at: list(question.cells(points[at], rl_steps)) for at in pending}
        study = Study(cells=[cell for each in cells.values() for cell in each], jobs=jobs)
        table, first = study.table(kept), 0
        again = []
        for at in pending:
            part = table[table["cell"].between(first, first + len(cells[at]) - 1)]
            first += len(cells[at])
            nominal = points[at].scenarios.of(rl_steps)
            rows_of[at] = compared(cells[at], part, nominal, baseline) if len(part) else []
            found = _about(points[at], nominal, cells[at], part, rows_of[at], baseline)
            attrs |= found | {"failed": table.attrs["failed"]}
            ratios = [interval for name in ("ratio", "step_ratio") for interval in intervals_of(rows_of[at], name)]
            if not _enough(ratios, found["evidence"]) and chosen_steps is None and len(rl_steps) < len(source.rl_steps):
                again.append(at)
            for row in rows_of[at] if axes else ():
                row["num_rl_steps"] = len(rl_steps)
        pending = again
        if not pending:
            break
    frame = pd.DataFrame([row for at in range(len(points)) for row in rows_of[at]])
    if not axes:
        order = "step_s" if "step_s" in frame else "makespan_s"
        frame = frame.sort_values(order, kind="stable", ignore_index=True)
    result = Comparison(frame)
    result.attrs |= attrs | {"axes": {n: list(v) for n, v in axes.items()}, "baseline": baseline}
    return result


def _enough(ratios: Sequence[Interval], evidence: Mapping[str, Any]) -> bool:
    """True if RL steps more would not make the ratios much surer, as the costs are off."""
    return small(ratios, evidence["speedup_error"])


def _axes(settings: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each axis in `settings`. ConfigError for what contradicts, and a value that comes twice."""
    axes = {name: tuple(settings[name]) for name in AXES if isinstance(settings.get(name), list | tuple)}
    for name, values in axes.items():
        if len(set(map(str, values))) < len(values):
            raise ConfigError(f"{name}: a value comes twice in {', '.join(map(str, values))}")
        if not values:
            raise ConfigError(f"{name}: an axis needs a value")
        if any(isinstance(value, int) and value < 1 for value in values):
            raise ConfigError(f"{name} are whole numbers above 0, got {', '.join(map(str, values))}")
    if other := {"workers", "costs"} & axes.keys():
        if any(settings.get(name) is not None for name in ("gpus", "model", "engine", "tp")):
            raise ConfigError(f"GPUs determine {' and '.join(sorted(other))}: give one of the two")
    return axes


def _of_systems(
    config: SimulationConfig, trace: Trace, settings: Mapping[str, Any], systems: Sequence[System]
) -> SimulationConfig:
    """Return the settings under which systems are compared; ConfigError for a placement that a system fixes."""
    fixed = [system for system in systems if system.placement != "contiguous"]
    if settings.get("placement", config.placement) is not None and fixed:
        raise ConfigError(f"system {fixed[0].name} fixes its placement, {fixed[0].placement}: leave out placement")
    if "decision_block" not in settings and config.decision_block == 1:
        config = replace(config, decision_block=decision_interval(trace))
    return replace(config, spot=None)


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A combination of the axes' values, and the scenarios there."""

    axes: Mapping[str, Any]
    scenarios: Scenarios
    stages: StageCosts | None

    @classmethod
    def of(
        cls, trace: Trace, config: SimulationConfig, axes: dict[str, Any], group_size: int | None,
        stages: StageCosts | None,
    ) -> _Point:  # fmt: skip
        size = axes.get("group_size", group_size)
        changes = {name: value for name, value in axes.items() if name != "group_size"}
        config = replace(config, **changes)
        if size is not None:
            # Costs and acceptance lie next to the trace, or were measured of all its responses.
            known = config.find_acceptance(trace)[0]
            config = replace(config, acceptance=known if config.acceptance is None else config.acceptance)
            if not config.is_on_machine:
                config = replace(config, costs=config.find_costs(trace)[0])
            trace = _first_samples(trace, size)
        scenarios = Scenarios(trace, with_machine(config, trace))
        if stages is None:
            logged = LoggedRun.of(scenarios)
            scenarios, stages = logged.scenarios, logged.stages
        return cls(axes=axes, scenarios=scenarios, stages=stages)


def with_machine(config: SimulationConfig, trace: Trace) -> SimulationConfig:
    """Return the settings, on the machine that a log names where they name none."""
    if config.is_on_machine or config.costs is not None or config.workers is not None:
        return config
    found = machine_of(trace)
    return replace(config, **found) if "gpus" in found else config


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What is compared at each point."""

    chosen: Mapping[str, Policy]
    systems: Sequence[System] | None
    stages: StageCosts | None
    repeats: int
    gpus_per_worker: int | None

    def cells(self, point: _Point, rl_steps: Sequence[int]) -> Iterator[Cell]:
        """Yield a cell for each policy or system and seed."""
        scenarios, nominal = point.scenarios, point.scenarios.of(rl_steps)
        bound = [] if self.systems is None else bind_all(self.systems, nominal)
        for repeat in range(self.repeats):
            seed = nominal.seed + repeat
            for binding in bound:
                cell = system_cell(binding, scenarios, rl_steps, point.stages, self.gpus_per_worker, seed=seed)
                yield replace(cell, axes=point.axes)
            if self.chosen:
                nominal.registry_of(self.chosen)
                scenario = replace(nominal, seed=seed)
                for name, policy in self.chosen.items():
                    yield Cell(
                        name=name, policy=policy, scenario=scenario, axes=point.axes, stages=point.stages,
                        manifest=scenarios.trace.manifest,
                    )  # fmt: skip


def _about(
    point: _Point, nominal: Scenario, cells: Sequence[Cell], table: pd.DataFrame, rows: Sequence[Mapping[str, Any]],
    baseline: str,
) -> dict[str, Any]:  # fmt: skip
    """Return what a comparison's `attrs` have of a point."""
    kind = "policy" if "policy" in table else "system"
    fastest = min(rows, key=lambda row: row.get("step_s", row["makespan_s"]))[kind] if rows else baseline
    outside: dict[str, float] = {}
    for name in (baseline, fastest):
        part = table[(table[kind] == name) & (table["seed"] == nominal.seed)] if len(table) else table
        iterations = max(1, int(part["iterations"].sum())) if len(part) else 1
        for what in {what for counts in part.get("outside", ()) for what in counts}:
            share = sum(counts[what] for counts in part["outside"]) / iterations
            outside[what] = max(outside.get(what, 0.0), share)
    outside = {what: share for what, share in sorted(outside.items()) if share}
    gpus = cells[0].topology.gpus_per_worker if cells and cells[0].topology else nominal.costs.tensor_parallel
    return {
        "num_rl_steps": len(nominal.steps),
        "num_rl_steps_of": len(point.scenarios.run),
        "num_workers": nominal.workers,
        "num_gpus": nominal.workers * gpus,
        "costs": nominal.costs_name,
        "acceptance": nominal.acceptance_name,
        "evidence": nominal.evidence((s for cell in cells for s in cell.policy.strategies), outside),
        "outside_calibration": outside,
    }


def _first_samples(trace: Trace, size: int) -> Trace:
    """Return the trace with so many samples of each prompt, and nothing of the others. ConfigError for too many."""
    most = int(trace.workload.groupby(["rl_step", "prompt_id"]).size().max())
    if size > most:
        raise ConfigError(f"group sizes: the trace has {most} responses per prompt, asked were {size}")
    rank = trace.workload.sort_values("sample").groupby(["rl_step", "prompt_id"]).cumcount().sort_index()
    workload = trace.workload[rank < size]
    outcomes = trace.outcomes.merge(workload[list(KEY)], on=list(KEY))
    return Trace.from_tables(trace.manifest, {"workload": workload, "outcomes": outcomes})
