"""One question, asked in one place: these responses, under these policies or systems, on these machines.

A `Study` has cells and fills one long table, a row per cell and RL step, by a backend: "simulated" here, "played" on
real engines (`tltlab.sim.verification.played`). Everything else is a reducer over that table (`reduce`, `band`).

Columns of the table, beside a column for each axis of the cells; those of a played rollout are the first
four, drafters and acceptance:

    cell, policy or system   place of the cell in the study, and its name
    backend                  simulated or played
    rl_step, seed            what was rolled out, and the seed (played: the round)
    makespan_s               seconds of the rollout
    step_s                   seconds of the whole RL step; NaN where the costs of the other stages are not known
    tokens                   tokens that are trained on; old_tokens of them are of earlier weights
    wasted_tokens            tokens that nothing trains on
    drafts, kept_tokens      verified drafts, and the tokens that came of them, bonus tokens included
    accept_length            kept_tokens / drafts; NaN without drafts
    idle_s, worker_s         worker-seconds without work, and all
    bubble_fraction          idle_s / worker_s
    iterations, outside      iterations, and how many of them the costs and the acceptance were not fitted on
    length_bias              mean length of trained responses over that of all begun
    drafters, acceptance     drafters of the policy and in words what was granted to each
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import field, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.costs.stages import StageCosts
from tltlab.errors import ConfigError, InputError, TltlabError, one_line
from tltlab.files import parse_json
from tltlab.planning.system_binding import BoundSystem
from tltlab.policies.policy import Policy
from tltlab.records import Fields, Json, frozen
from tltlab.sim.rl_steps import Colocated, RunResult, Topology, run_steps
from tltlab.sim.scenario import Scenario, is_memoryless
from tltlab.sim.simulate import SimResult, simulated
from tltlab.strategy import drafters_of
from tltlab.traces.trace import Manifest

from .jobs import side_by_side

SIMULATED, PLAYED = "simulated", "played"
_REQUEST_S, _DECISION_S = 2e-6, 3e-5
"""Seconds of a simulation by request, and by decision of a policy that learns."""

Row = Json


@frozen
class Cell:
    """A policy, or a system, under some conditions.

    `axes` has the values that tell it from cells of the same name, `scenario` all of its simulation but the policy.
    With `stages` it is whole RL steps of `num_updates` optimizer steps on `topology` (default: colocated GPUs). With a
    `delay` choices hold at once, and their outcomes come so many choices later; `entropy` seeds each worker's selector
    (default: by the scenario's seed). Both are for makespans alone. `system` is set for a system from the literature.
    Regret is to the bound of the `nominal` scenario, by default its own: the acceptance and workers as they were given.
    """

    name: str
    policy: Policy
    scenario: Scenario
    axes: Fields = field(default_factory=dict)
    system: BoundSystem | None = None
    stages: StageCosts | None = None
    topology: Topology | None = None
    num_updates: int = 1
    manifest: Manifest | None = None
    delay: int | None = None
    entropy: Sequence[Sequence[int]] | None = None
    nominal: Scenario | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A process unpickles a scenario once, however many of its cells have it.
        rest = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "scenario"}
        return _received, (_pickled(self.scenario), rest)

    @property
    def label(self) -> str:
        """Name and axes in words."""
        return ", ".join([self.name, *(f"{axis} {value}" for axis, value in self.axes.items())])

    @property
    def expected_s(self) -> float:
        """Approximate seconds of the simulation, by decisions where the policy learns, else by requests."""
        scenario = self.scenario
        if is_memoryless(self.policy):
            return _REQUEST_S * sum(map(len, scenario.steps))
        rollouts = zip(scenario.steps, scenario.queues, strict=True)
        longest = (step.lengths[queue].max() for step, queues in rollouts for queue in queues if len(queue))
        return _DECISION_S * float(sum(longest)) / scenario.decision_block

    def simulate(self, record_iterations: bool = False) -> tuple[SimResult, RunResult | None]:
        """Return the rollouts, and where stages are known the whole RL steps."""
        manifest = self.manifest or Manifest(kind="simulated", num_workers=self.scenario.workers)
        result = simulated(self.scenario, self.policy, self.name, manifest, record_iterations)
        if self.nominal is not None:
            result = replace(result, bounds_s=partial(self.bounds_s, self.nominal))
        if self.stages is None:
            return result, None
        topology = self.topology or Colocated(gpus_per_worker=self.scenario.costs.tensor_parallel)
        changes = {} if self.system is None else {n: getattr(self.system.system, n) for n in ("fused", "streamed")}
        return result, run_steps(result, self.stages, topology=topology, num_updates=self.num_updates, **changes)

    def bounds_s(self, nominal: Scenario) -> Floats | None:
        """Return `Scenario.bounds_of` a nominal scenario; None for a system that rolls out other work."""
        if self.system is not None and not self.system.system.same_work:
            return None
        planner = self.scenario.planner or nominal.planner
        if planner is not nominal.planner:
            # What moves may end before the bound of what stays.
            nominal = replace(nominal, planner=planner)
        return nominal.bounds_of(self.policy, self.scenario.acceptance)

    def makespans(self) -> list[Row]:
        """Return rows with the makespan alone; the macro-steps of a rollout are not kept."""
        rollouts = self.scenario.each_rollout(self.policy, delay=self.delay, entropy=self.entropy)
        return [{"rl_step": each.requests.rl_step, "makespan_s": each.makespan_s} for each in rollouts]

    def rows(self) -> list[Row]:
        """Return a row for each RL step with everything that the simulation shows."""
        result, whole = self.simulate()
        rollouts, stale = result.rollouts, result.asynchronous
        step_s = [math.nan] * len(rollouts) if whole is None else whole.steps["step_s"].tolist()
        rows = []
        for rollout, total, seconds in zip(rollouts, result.totals, step_s, strict=True):
            worker_s = self.scenario.workers * rollout.makespan_s
            idle_s, kept_tokens = max(0.0, worker_s - rollout.busy_s), math.fsum(total.tokens.tolist())
            rows.append(
                {
                    "rl_step": rollout.requests.rl_step,
                    "makespan_s": float(rollout.makespan_s),
                    "step_s": float(seconds),
                    "tokens": float(rollout.requests.trained_tokens.sum()),
                    "old_tokens": float(rollout.old_tokens),
                    "wasted_tokens": float(rollout.wasted_tokens),
                    "drafts": total.pairs,
                    "kept_tokens": kept_tokens,
                    "accept_length": kept_tokens / total.pairs if total.pairs else math.nan,
                    "idle_s": idle_s,
                    "worker_s": worker_s,
                    "bubble_fraction": idle_s / worker_s if worker_s else math.nan,
                    "iterations": total.iterations,
                    "outside": dict(total.outside),
                    "length_bias": 1.0 if stale is None else float(stale["length_bias"] or 1.0),
                }
            )
        return rows


@frozen
class Study:
    """Cells that share nothing but common random numbers, and how they are simulated.

    Without `details` the table has makespans alone. `jobs` processes (None: one per core) share the cells; no number
    depends on them.
    """

    cells: Sequence[Cell]
    details: bool = True
    jobs: int | None = 1

    def table(self, journal: Journal | None = None) -> pd.DataFrame:
        """Simulate every cell; return the rows of all, in their order.

        With a `journal` a finished cell is written to it, and one that is there is not simulated again. A cell that
        raises keeps the rows of the others: `attrs["failed"]` has its message by label. Raises the first error where
        every cell fails, and ConfigError, before anything is simulated, for a drafter that has no acceptance and for
        one model that would serve drafters of different kinds, in a cell or in cells of one scenario.
        """
        policies: dict[int, list[Policy]] = {}
        for cell in self.cells:
            _check(cell)
            policies.setdefault(id(cell.scenario), []).append(cell.policy)
        for scenario in {id(cell.scenario): cell.scenario for cell in self.cells}.values():
            scenario.check_acceptance(policies[id(scenario)])
        journal, keys = journal or Journal(), [_key(cell) for cell in self.cells]
        found: dict[int, list[Row]] = {at: journal.known[key] for at, key in enumerate(keys) if key in journal.known}
        failed: dict[str, TltlabError] = {}
        # The longest begin first: the last to end then ends about when the others do.
        seconds = [cell.expected_s for cell in self.cells]
        order = sorted(set(range(len(self.cells))) - found.keys(), key=lambda at: -seconds[at])
        tasks = [partial(_simulated, self.cells[at], self.details) for at in order]
        results = side_by_side(tasks, jobs=self.jobs, expected_s=[seconds[at] for at in order])
        for at, result in zip(order, results, strict=True):
            if isinstance(result, TltlabError):
                failed[self.cells[at].label] = result
                continue
            found[at] = result
            journal.add(keys[at], result)
        if failed and not found:
            raise next(iter(failed.values()))
        rows: list[Row] = []
        for at, cell in enumerate(self.cells):
            kind = "policy" if cell.system is None else "system"
            labels = {"cell": at, kind: cell.name, **cell.axes, "backend": SIMULATED, "seed": cell.scenario.seed}
            labels |= cell.scenario.granted(cell.policy.strategies) if self.details else {}
            rows += [labels | row for row in found.get(at, ())]
        table = pd.DataFrame(rows)
        table.attrs["failed"] = {label: one_line(error) for label, error in failed.items()}
        return table

    def makespans(self) -> list[Floats]:
        """Return the makespans of each cell in the order of its RL steps; ConfigError where a cell fails."""
        table = replace(self, details=False).table()
        if failed := table.attrs["failed"]:
            raise ConfigError("; ".join(f"{label}: {why}" for label, why in failed.items()))
        return [rows["makespan_s"].to_numpy(np.float64) for _, rows in table.groupby("cell", sort=False)]


def _check(cell: Cell) -> None:
    """ConfigError with the name of the policy and of the drafter where the acceptance does not have one."""
    try:
        model = cell.scenario.acceptance
        drafters = drafters_of(cell.policy.strategies)
        cell.scenario.check_drafters(drafters, cell.policy.drafters)
        if model is not None:
            settled = model.in_state({})
            for strategy in cell.policy.strategies:
                if strategy.speculates:
                    settled.check(strategy)
    except ConfigError as error:
        raise ConfigError(f"policy {cell.name}: {error}") from error


def _simulated(cell: Cell, details: bool) -> list[Row] | TltlabError:
    try:
        return cell.rows() if details else cell.makespans()
    except TltlabError as error:
        return error


def _received(pickled: bytes, rest: Json) -> Cell:
    return Cell(scenario=_unpickled(pickled), **rest)


@lru_cache(maxsize=16)
def _unpickled(pickled: bytes) -> Scenario:
    scenario: Scenario = pickle.loads(pickled)
    return scenario


_PICKLED: dict[int, tuple[Scenario, bytes]] = {}


def _pickled(scenario: Scenario) -> bytes:
    """Return the bytes of a scenario; the last few are kept, as are their scenarios, whose ids are used."""
    if id(scenario) not in _PICKLED:
        from joblib.externals.loky.backend.reduction import dumps

        while len(_PICKLED) >= 16:
            _PICKLED.pop(next(iter(_PICKLED)))
        _PICKLED[id(scenario)] = scenario, bytes(dumps(scenario))
    return _PICKLED[id(scenario)][1]


@frozen
class Journal:
    """Results by key, in a file so that interrupted work continues, also with more of it.

    `question` stands for all that the results depend on beside their keys. Nothing is written without a `path`. Raises
    ConfigError for a file of another question.
    """

    path: Path | None = None
    question: str = ""

    @cached_property
    def known(self) -> Json:
        """Results by key; a last line that was cut off is ignored."""
        if self.path is None or not self.path.exists():
            self._append(self.question)
            return {}
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error
        head, *lines = text.splitlines(keepends=True) or [""]
        if head.rstrip("\n") != self.question:
            raise ConfigError(
                f"{self.path} is of another question (trace, settings or policies): delete it, or name another --out"
            )
        if lines and not lines[-1].endswith("\n"):
            self.path.write_text(head + "".join(lines[:-1]), encoding="utf-8")
            lines = lines[:-1]
        return dict(parse_json(line) for line in lines)

    def add(self, key: str, result: Any) -> None:
        """Write a result."""
        self.known[key] = result
        if self.path is not None:
            self._append(json.dumps([key, result]))

    def _append(self, line: str) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error


def _key(cell: Cell) -> str:
    rl_steps = [step.rl_step for step in cell.scenario.steps]
    return json.dumps([cell.name, dict(cell.axes), cell.scenario.seed, rl_steps], sort_keys=True, default=str)
