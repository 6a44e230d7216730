"""`compare`: policies, or systems from the literature, on one trace and at every combination of the axes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from tltlab.costs.load import load_stages
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.options import check, option, to_json
from tltlab.own import split
from tltlab.planning.composition import System
from tltlab.planning.planners import PLANNERS
from tltlab.planning.systems import find_systems
from tltlab.policies.policy import Policy, PolicySource
from tltlab.records import Fields, Json, frozen
from tltlab.sim.config import SimulationConfig, Source, decision_interval
from tltlab.sim.options import Jobs
from tltlab.sim.placement import PLACEMENTS
from tltlab.sim.rl_steps import Colocated
from tltlab.sim.scenario import Scenario, named_policies
from tltlab.traces.trace import Trace

from .logged import LoggedRun
from .reduce import Comparison, compared, comparison, intervals_of
from .sample import Scenarios, samples, small
from .study import Cell, Journal, Study
from .systems import bind_all, left_out, system_cell

POLICIES = "none,table,beg-mab,adaptive"
Policies = Mapping[str, PolicySource] | Sequence[PolicySource] | str


def _several(text: str) -> Any:
    """Return the value of an option, or a list of them; models of acceptance by drafter have ; between."""
    parts = split(text, ";") if ";" in text or ("=" in text and "(" not in text) else split(text)
    values = [int(part) if part.strip().isdigit() else part for part in parts]
    return values if len(values) > 1 else values[0] if values else text


def _axis(help: str, **more: Any) -> Any:
    return option(f"{help}; several make a grid.", parse=_several, **more)


@frozen
class StudyConfig(SimulationConfig):
    """Settings of a comparison: those of its simulations, of which lists for some fields make a grid, and its own.

    `stages` are the costs of the other stages of RL steps, by
    default those of the machine that `gpus` name, and `gpus_per_worker` places them. `repeats` are seeds, `jobs` the
    processes (None: one per core), on which no number depends. Raises ConfigError for axes that contradict, and a value
    of an axis that comes twice or is below 1.

    >>> [axes for axes, _ in StudyConfig(workers=[1, 2], acceptance="0.7").points()]
    [{'workers': 1}, {'workers': 2}]
    """

    workers: int | Sequence[int] | None = _axis("Rollout workers, such as 4,8")  # type: ignore[assignment]
    costs: Any = _axis("Cost file, preset or module:Class [default: the trace's, else cpu-small]")
    gpus: str | Sequence[str] | None = _axis("Such as 8xH100,8xB200, in place of costs and workers")  # type: ignore[assignment]
    model: Any = _axis("On --gpus: Qwen/Qwen2.5-7B or another name, or a config.json")
    engine: str | Sequence[str] | None = _axis("On --gpus: the engine's profile")  # type: ignore[assignment]
    acceptance: Any = _axis(
        "As simulate's, by drafter learned=0.7,ngram=0.4 (others keep their default) or 0.7 for one, with ; between"
    )
    placement: Any = _axis(f"One of {', '.join(PLACEMENTS)}, or module:Class")
    planner: Any = _axis(f"Who moves requests: {', '.join(PLANNERS)}, or module:Class")
    max_response_tokens: int | Sequence[int] | None = _axis(
        "Cap that cuts longer responses", names=("--cap", "--max-response-tokens")
    )  # type: ignore[assignment]
    rl_steps: Sequence[int] | str | None = option(
        "a:b, RL steps a to b - 1; or one; or all. [default: of more than 24 a sample]"
    )
    decision_block: int | None = option(
        "Iterations between decisions. [default: 1; systems on long or many responses: cap / 256]", min=1
    )  # type: ignore[assignment]
    stages: StageCosts | Source | None = option(
        "Stage costs, a file or preset, for whole RL steps too. [default: of --gpus]"
    )
    gpus_per_worker: int | None = option(
        "With stages: GPUs of a rollout worker. [default: the costs' tp, else 1]", min=1
    )
    repeats: int = option("Seeds, each the same for all policies.", 1, min=1)
    jobs: Jobs = 1

    def __post_init__(self) -> None:
        # Fields of the simulations are checked where these are built, at each point.
        check(self)
        for name, values in self.axes.items():
            if len(set(map(str, values))) < len(values):
                raise ConfigError(f"{name}: a value comes twice in {', '.join(map(str, values))}")
        list(self.points())

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """The values of each field that has a list of them."""
        lists = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rl_steps", "seed")}
        return {name: tuple(value) for name, value in lists.items() if isinstance(value, list | tuple)}

    def points(self) -> Iterator[tuple[Json, SimulationConfig]]:
        """Yield each combination of the axes' values, and the settings of the simulations there."""
        base = {field.name: getattr(self, field.name) for field in fields(SimulationConfig)}
        base["decision_block"] = self.decision_block or 1
        for values in product(*self.axes.values()):
            axes = dict(zip(self.axes, values, strict=True))
            yield axes, SimulationConfig(**base | {name: value for name, value in axes.items() if name in base})


def compare(
    trace: TraceSource,
    policies: Policies | None = None,
    config: StudyConfig = StudyConfig(),
    *,
    systems: str | Sequence[str | System] | None = None,
    baseline: str | None = None,
    journal: Path | None = None,
    **settings: Any,
) -> Comparison:
    """Compare policies, or `systems` from the literature, on the same responses with common random numbers.

    `policies` are a dict of policies by name, a list, or names with commas between, each as `simulate` takes it.
    `settings` are fields of `StudyConfig` that replace those of `config`: lists make a grid, with a row for each policy
    at every combination. Systems bring their own placement and idle use, and all have the GPUs of all workers.

    Rows are ordered by RL step, else by rollout, the fastest first; those of a grid by its points. Columns: `policy` or
    `system` (with its `title`), a column for each axis, `drafters` and the `acceptance` granted to each, `makespan_s`
    (of a rollout, mean over RL steps and repeats), `ratio` to the `baseline` (the first policy, `verl`; plain decoding
    on a grid; below 1 is faster) with its paired interval `ratio_low` to `ratio_high` over RL steps (Student's below
    ten), `speed_up` (1 / `ratio`) with its interval likewise, `tokens_per_s` that are trained on and its ratio,
    `regret` of the rollout to the clairvoyant bound over all chains that the acceptance covers (None under a
    per-request budget), `mean_accept_length`, `bubble_fraction`, `off_policy_share` and `wasted_share` of tokens,
    with stages `step_s`, `step_ratio`, `step_speed_up` and their intervals, and
    `rollout_share`; of a grid `num_rl_steps`. Systems have `lossless`, `runs_here` (True, or the parts that no engine
    here has), `length_bias` (mean length of trained responses over that of all begun), `claim` of the system's paper
    beside what is found, `workers` (those that generate), `assumptions`, `stand_ins`, `defaults` (numbers that were
    missing) and `source`. The acceptance of a grid over it is the column `granted`.

    A step's repeats are averaged before resampling, since they share its lengths. Where `rl_steps` are left open in a
    trace of more than 24, a sample is simulated (`tltlab.sim.study.sample`), of each point its own. `journal` is a file
    in which finished cells are kept, from which an interrupted comparison continues.

    `attrs` has `axes`, `baseline`, `num_rl_steps` of the trace's `num_rl_steps_of`, `num_workers`, `num_gpus`, the
    names of `costs` and `acceptance`, `evidence` (`Scenario.evidence`), of the baseline and the fastest the largest
    `outside_calibration`, `failed`: the message of each cell that raised, and `left_out`: why some of all systems are
    not there. Raises ConfigError before anything runs.

    >>> compare("traces/tiny", "none,beg-mab", workers=[1, 2]).speed_up.tolist()  # doctest: +SKIP
    >>> compare("traces/tiny", systems="verl,tlt-base").set_index("system").ratio  # doctest: +SKIP
    """
    if systems is not None and policies is not None:
        raise ConfigError("systems bring their policies: compare one of the two")
    config = config.changed(settings, compare)
    source, axes = read(trace), config.axes
    found = None if systems is None else list(find_systems(systems))
    chosen = {} if found is not None else named_policies(POLICIES if policies is None else policies)
    if axes:
        # Each point has plain decoding, to which its other rows are compared.
        plain = find_systems("verl")[0]
        found = found and [plain, *(system for system in found if system.name != plain.name)]
        chosen = chosen and named_policies("none") | chosen
    listed = [system.name for system in found] if found else list(chosen)
    baseline = baseline or ("verl" if found and "verl" in listed else listed[0])
    if baseline not in listed:
        raise ConfigError(f"the baseline {baseline!r} is none of {', '.join(listed)}")
    points = [
        _Point.of(source, each, axes=at, chosen=chosen, systems=found, asked=config) for at, each in config.points()
    ]
    kept = None
    if journal is not None:
        about = [source.num_rows("outcomes"), int(source.outcomes["response_tokens"].sum()), found is not None]
        asked = {name: value for name, value in to_json(config).items() if value is not None and name not in axes}
        policies_json = {name: policy.model_dump(mode="json") for name, policy in chosen.items()}
        asked.pop("jobs", None)
        kept = Journal(path=journal, question=json.dumps([*about, asked, policies_json], sort_keys=True))
    rows_of: dict[int, list[Json]] = {}
    attrs: Json = {}
    failed: dict[str, str] = {}
    pending = list(range(len(points)))
    for rl_steps in samples(source.rl_steps, config.steps_of(source)):
        cells = {at: list(points[at].cells(rl_steps)) for at in pending}
        study = Study(cells=[cell for each in cells.values() for cell in each], jobs=config.jobs)
        table, first, again = study.table(kept), 0, []
        for at in pending:
            part = table[table["cell"].between(first, first + len(cells[at]) - 1)]
            first += len(cells[at])
            nominal = points[at].scenarios.of(rl_steps)
            rows_of[at] = compared(cells[at], part, nominal, baseline) if len(part) else []
            scenarios = points[at].scenarios
            attrs = attrs_of(scenarios, nominal, found or (), cells[at], part, rows_of[at], baseline)
            is_enough = small(intervals_of(rows_of[at]), attrs["evidence"]["speedup_error"])
            if not is_enough and len(rl_steps) < len(source.rl_steps):
                again.append(at)
            for row in rows_of[at] if axes else ():
                row["num_rl_steps"] = len(rl_steps)
        # A failure at a point with fewer RL steps stands again in its larger sample.
        tried = {cell.label for cell in study.cells}
        failed = {label: why for label, why in failed.items() if label not in tried} | table.attrs["failed"]
        pending = again
        if not pending:
            break
    rows = [row for at in range(len(points)) for row in rows_of[at]]
    attrs["failed"] = failed
    return comparison(rows, {name: list(values) for name, values in axes.items()}, attrs)


@frozen
class _Point:
    """A combination of the axes' values, the scenarios there, and the policies or systems that are compared."""

    axes: Fields
    chosen: Mapping[str, Policy]
    systems: Sequence[System] | None
    asked: StudyConfig
    scenarios: Scenarios
    stages: StageCosts | None

    @classmethod
    def of(cls, trace: Trace, config: SimulationConfig, *, asked: StudyConfig, **question: Any) -> _Point:
        """Return the point of the trace under these settings; ConfigError for a placement that a system fixes."""
        if (systems := question["systems"]) is not None:
            fixed = [system for system in systems if system.placement != "contiguous"]
            if config.placement is not None and fixed:
                raise ConfigError(
                    f"system {fixed[0].name} fixes its placement, {fixed[0].placement}: leave out placement"
                )
            config = replace(config, decision_block=asked.decision_block or decision_interval(trace), spot=None)
        scenarios = Scenarios(trace, config)
        stages = None if asked.stages is None else load_stages(asked.stages)
        if stages is None:
            logged = LoggedRun.of(scenarios)
            scenarios, stages = logged.scenarios, logged.stages
        if stages is None and asked.gpus_per_worker is not None:
            raise ConfigError("--gpus-per-worker places the stages of RL steps: give --stages or --gpus")
        return cls(asked=asked, scenarios=scenarios, stages=stages, **question)

    def cells(self, rl_steps: Sequence[int]) -> Iterator[Cell]:
        """Yield a cell for each policy or system and seed."""
        nominal, gpus = self.scenarios.of(rl_steps), self.asked.gpus_per_worker
        bound = [] if self.systems is None else bind_all(self.systems, nominal)
        nominal.registry_of(self.chosen)
        for seed in range(nominal.seed, nominal.seed + self.asked.repeats):
            for binding in bound:
                cell = system_cell(binding, self.scenarios, rl_steps, self.stages, gpus, seed=seed)
                yield replace(cell, axes=self.axes)
            scenario = replace(nominal, seed=seed)
            for name, policy in self.chosen.items():
                yield Cell(
                    name=name, policy=policy, scenario=scenario, axes=self.axes, stages=self.stages,
                    topology=Colocated(gpus_per_worker=gpus or scenario.costs.tensor_parallel),
                    manifest=self.scenarios.trace.manifest,
                )  # fmt: skip


def attrs_of(
    scenarios: Scenarios,
    nominal: Scenario,
    systems: Sequence[System],
    cells: Sequence[Cell],
    table: pd.DataFrame,
    rows: Sequence[Fields],
    baseline: str,
) -> Json:
    """Return what a comparison's `attrs` have of a point, whose scenario is `nominal`."""
    kind = "policy" if "policy" in table else "system"
    fastest = min(rows, key=lambda row: row.get("step_s", row["makespan_s"]))[kind] if rows else baseline
    outside: dict[str, float] = {}
    for name in (baseline, fastest):
        part = table[(table[kind] == name) & (table["seed"] == nominal.seed)]
        counts = pd.DataFrame(part["outside"].tolist()).sum()
        for what, share in (counts / max(1, part["iterations"].sum())).items():
            outside[str(what)] = max(outside.get(str(what), 0.0), float(share))
    outside = {what: share for what, share in sorted(outside.items()) if share}
    gpus = cells[0].topology.gpus_per_worker if cells and cells[0].topology else nominal.costs.tensor_parallel
    return {
        "baseline": baseline,
        "num_rl_steps": len(nominal.steps),
        "num_rl_steps_of": len(scenarios.run),
        "num_workers": nominal.workers,
        "num_gpus": nominal.workers * gpus,
        "costs": nominal.costs_name,
        "acceptance": nominal.acceptance_name,
        "evidence": nominal.evidence((s for cell in cells for s in cell.policy.strategies), outside),
        "outside_calibration": outside,
        "left_out": left_out(systems, nominal),
    }
