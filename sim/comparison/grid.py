"""A grid over workload, machine and policies or systems, simulated by points: parallel, resumable, a heat map."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from tltlab.acceptance.load import load_acceptance
from tltlab.costs.deployment import MODEL, Deployment
from tltlab.errors import ConfigError, InputError
from tltlab.files import parse_json
from tltlab.importers.sources import TraceSource, read
from tltlab.planning.systems import find_systems
from tltlab.policies.policy import Policy
from tltlab.sim.comparison.jobs import side_by_side
from tltlab.sim.comparison.sample import Scenarios, samples, small
from tltlab.sim.comparison.sweep import intervals_of, ratio_columns, speed_ups
from tltlab.sim.comparison.systems import SystemComparison, ratios_are_small
from tltlab.sim.config import SimulationConfig, at_least, check_keywords
from tltlab.sim.scenario import Scenario, named_policies
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = {"policy": "none", "system": "verl"}
"""Plain decoding, as a policy and as a system."""
_MOST_PANELS = 6


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The values of each axis; an empty one keeps the value of the trace and the settings.

    `workers` and `gpus` (such as 8xH100, with `model`) set the machine, `caps` cut responses, `group_sizes` keep the
    first samples of each prompt, `acceptance` are models as `simulate` takes.
    `systems` are names in `tltlab.planning.systems` that every point compares in place of policies. Raises ConfigError
    for a value that is no such thing, or comes twice.
    """

    workers: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    acceptance: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    model: str = MODEL

    def __post_init__(self) -> None:
        if self.gpus and self.workers:
            raise ConfigError("GPUs determine the number of workers: sweep over one of the two")
        for name in self.names:
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}: a value comes twice in {', '.join(map(str, values))}")
            if any(isinstance(value, int) and value < 1 for value in values):
                raise ConfigError(f"{name} are whole numbers above 0, got {', '.join(map(str, values))}")
        for value in self.gpus:
            Deployment.of(value, self.model)
        for value in self.acceptance:
            load_acceptance(value)
        if self.systems:
            find_systems(self.systems)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of axes with values, in the order of their columns."""
        every = (field.name for field in fields(self) if field.name not in ("systems", "model"))
        return tuple(name for name in every if getattr(self, name))

    @property
    def compared(self) -> Literal["policy", "system"]:
        """The column that distinguishes the rows of a point."""
        return "system" if self.systems else "policy"

    def points(self) -> list[dict[str, Any]]:
        """A dict for each combination of values; a single one, which is empty, without any."""
        return [
            dict(zip(self.names, values, strict=True)) for values in product(*(getattr(self, n) for n in self.names))
        ]


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepGrid:
    """Rows of `frame`: a point's values, `policy` or `system`, `makespan_s`, and `speed_up` over plain decoding at the
    same point with its 95 % interval over the RL steps, `speed_up_low` to `speed_up_high` (NaN of a single RL step).

    `drafters` are those of the policy or system, `granted` the acceptance of each in words. Systems on GPUs have
    `step_s` and `step_speed_up` of whole RL steps likewise, and `assumed` lists the acceptance that is assumed.
    `num_rl_steps` of the trace's `num_rl_steps_of` were simulated. `resumed` of the points had been done before.
    """

    frame: pd.DataFrame
    axes: Axes
    resumed: int
    num_rl_steps_of: int

    def __repr__(self) -> str:
        return f"<Grid of {len(self.frame)} simulations over {', '.join((*self.axes.names, self.axes.compared))}>"

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False, float_format=lambda value: f"{value:.4g}")

    def to_frame(self) -> pd.DataFrame:
        return self.frame

    def plot(self) -> Figure:
        """A heat map of speed-ups over the two axes with most values, a panel for each policy, else over policies.

        Systems likewise, by their RL steps where those are known. Other axes are averaged over, as the title states.
        """
        from tltlab.charts import heat_maps

        frame, compared = self.frame, self.axes.compared
        sizes = {name: len(getattr(self.axes, name)) for name in self.axes.names}
        across = sorted((name for name in sizes if sizes[name] > 1), key=lambda name: -sizes[name])
        x = across[0] if across else next(iter(sizes), None)
        if x is None:
            frame, x = frame.assign(trace="trace"), "trace"
        y = across[1] if len(across) > 1 else compared
        kinds = {"policy": "policies", "system": "systems"}
        panels = frame.groupby(compared, sort=False) if y != compared else [(f"all {kinds[compared]}", frame)]
        whole = "step_speed_up" in frame
        values = "step_speed_up" if whole else "speed_up"
        tables = {
            str(name): rows.pivot_table(index=y, columns=x, values=values, sort=False, aggfunc="mean")
            for name, rows in panels
            if y == compared or name != BASELINES[compared]
        }
        averaged = [name for name in across[2:] if name not in (x, y)]
        mean = f", mean over {', '.join(averaged)}" if averaged else ""
        what = "speed-up of the RL step over verl's" if whole else "speed-up over plain decoding"
        return heat_maps(dict(list(tables.items())[:_MOST_PANELS]), xlabel=x, ylabel=y,
                         title=f"{what} (simulated{mean})")  # fmt: skip


def sweep(
    trace: TraceSource,
    axes: Axes | Mapping[str, Any],
    policies: Sequence[str] | Mapping[str, Any] | str | None = None,
    config: SimulationConfig = SimulationConfig(),
    *,
    jobs: int | None = 1,
    journal: Path | None = None,
    done: Callable[[str], None] = lambda point: None,
) -> SweepGrid:
    """Simulate every policy, or every system of `axes`, at every point. O(points x policies) simulations.

    All have common random numbers. `policies` are as `compare` takes them, by default adaptive. Systems are compared
    to verl, which is always among them, as `compare_systems` does without ranges.

    Where `rl_steps` are left open in a trace of more than 24, each point simulates its own sample, so a point that
    varies more does not slow down the others. The smaller sample is part of the larger one.

    `jobs` processes share the points; the numbers do not depend on them. `journal` is a file that each finished point
    is written to: a sweep of the same trace, settings and policies continues where it ended, with more values of an
    axis too, and another one is refused. `done` is called after each point.

    Raises ConfigError, before anything is simulated, for what cannot be.

    >>> sweep("traces/tiny", {"workers": (1, 2), "systems": ("tlt-base",)}).frame.speed_up.max()  # doctest: +SKIP
    """
    at_least(1, jobs=jobs)
    if not isinstance(axes, Axes):
        check_keywords(axes, [field.name for field in fields(Axes)], Axes)
        axes = Axes(**axes)
    if axes.systems and policies is not None:
        raise ConfigError("systems bring their policies: sweep over one of the two")
    trace = read(trace)
    policies = "adaptive" if policies is None else policies
    chosen = {} if axes.systems else named_policies(BASELINES["policy"]) | named_policies(policies)
    points = axes.points()
    widest = trace.workload.groupby(["rl_step", "prompt_id"]).size().max()
    if any(size > widest for size in axes.group_sizes):
        raise ConfigError(
            f"group sizes: the trace has {widest} responses per prompt, asked were {max(axes.group_sizes)}"
        )
    question = json.dumps(
        {
            "responses": trace.num_rows("outcomes"),
            "tokens": int(trace.outcomes["response_tokens"].sum()),
            "policies": {name: policy.model_dump(mode="json") for name, policy in chosen.items()},
            "settings": {f.name: str(value) for f in fields(config) if (value := getattr(config, f.name)) is not None},
            "model": axes.model if axes.gpus else None,
        }
        | ({"systems": axes.systems} if axes.systems else {}),
        sort_keys=True,
    )
    rows_of = _read_journal(journal, question)
    pending = [point for point in points if _key(point) not in rows_of]
    resumed = len(points) - len(pending)
    if journal is not None and not journal.exists():
        journal.parent.mkdir(parents=True, exist_ok=True)
        _append(journal, question)
    for point in points:
        if _key(point) in rows_of:
            done(_label(point))
    places = dict(zip(map(_key, pending), _at(trace, axes, config, pending), strict=True))
    named = config.steps_of(trace)
    for rl_steps in [list(named)] if named is not None else samples(trace.rl_steps):
        tasks = [_task(axes, chosen, places[_key(point)], rl_steps) for point in pending]
        found = zip(pending, side_by_side(tasks, jobs=jobs), strict=True)
        pending = []
        for point, (rows, is_enough) in found:
            if not is_enough and named is None and len(rl_steps) < len(trace.rl_steps):
                pending.append(point)
                continue
            rows_of[_key(point)] = rows
            if journal is not None:
                _append(journal, json.dumps([_key(point), rows]))
            done(_label(point))
        if not pending:
            break
    frame = pd.DataFrame([point | row for point in points for row in rows_of[_key(point)]])
    num_of = len(trace.rl_steps)
    return SweepGrid(frame=frame, axes=axes, resumed=resumed, num_rl_steps_of=num_of)


def _task(
    axes: Axes, policies: Mapping[str, Policy], at: Scenarios, rl_steps: Sequence[int]
) -> Callable[[], tuple[list[dict[str, Any]], bool]]:
    """The task of a point on these RL steps: its rows, one per policy or system, and True if they are enough."""
    if axes.systems:
        names = list(dict.fromkeys((BASELINES["system"], *axes.systems)))
        stages = None if at.machine is None else at.machine.stages
        asked = SystemComparison(scenarios=at.only(rl_steps), systems=find_systems(names), stages=stages, ranges=False)
        return partial(_system_rows, asked, rl_steps)
    return partial(_rows, at.of(rl_steps), policies)


def _rows(scenario: Scenario, policies: Mapping[str, Policy]) -> tuple[list[dict[str, Any]], bool]:
    scenario.check_acceptance(policies.values())
    seconds = {name: np.array([r.makespan_s for r in scenario.each_rollout(policies[name])]) for name in policies}
    evidence = scenario.evidence(s for policy in policies.values() for s in policy.strategies)
    rows, ratios = [], []
    for name, steps in seconds.items():
        # The ratio of plain decoding to the policy: its interval is that of the speed-up.
        columns = ratio_columns("speed_up", seconds[BASELINES["policy"]], steps, scenario.seed)
        ratios.append(columns)
        finite = {key: None if value != value else value for key, value in columns.items()}
        drafts = scenario.granted(policies[name].strategies)
        drafts["granted"] = drafts.pop("acceptance")
        times = {"makespan_s": float(steps.mean())} | finite
        rows.append({"policy": name, **drafts, **times, "num_rl_steps": len(steps)})
    return rows, small(intervals_of(pd.DataFrame(ratios), "speed_up"), evidence["speedup_error"])


def _system_rows(asked: SystemComparison, rl_steps: Sequence[int]) -> tuple[list[dict[str, Any]], bool]:
    found = asked.table(rl_steps)
    table = found.set_index("system").loc[[system.name for system in asked.systems]]
    rows = []
    for name, row in table.iterrows():
        times = {"makespan_s": row["makespan_s"]} | speed_ups("speed_up", row, "ratio")
        if asked.stages is not None:
            times |= {"step_s": row["step_s"]} | speed_ups("step_speed_up", row, "step_ratio")
        drafts = {"drafters": row["drafters"], "granted": row["acceptance"]}
        assumed = {"assumed": "; ".join(row["defaults"]) or None, "num_rl_steps": len(rl_steps)}
        rows.append({"system": name, **drafts, **times, **assumed})
    return rows, ratios_are_small(found)


def _at(trace: Trace, axes: Axes, config: SimulationConfig, points: Sequence[Mapping[str, Any]]) -> Iterator[Scenarios]:
    """The scenarios of each of these points."""
    own = any("acceptance" not in point for point in points)
    known = config.find_acceptance(trace) if own else (None, None)
    traces: dict[int, Trace] = {}
    for point in points:
        changes: dict[str, Any] = {}
        part = trace
        if "group_sizes" in point:
            # They lie next to the trace, or were measured of all its responses.
            changes = {"costs": config.find_costs(trace)[0], "acceptance": known[0]}
            size = point["group_sizes"]
            part = traces[size] = traces.get(size) or _first_samples(trace, size)
        if "caps" in point:
            changes["max_response_tokens"] = point["caps"]
        if "workers" in point:
            changes["workers"] = point["workers"]
        if "gpus" in point:
            changes |= {"gpus": point["gpus"], "model": axes.model, "costs": None, "workers": None}
        if "acceptance" in point:
            changes["acceptance"] = point["acceptance"]
        if axes.systems:
            # Systems bring their placement and what idle workers do.
            changes |= {"placement": None, "spot": None}
        yield Scenarios(part, replace(config, **changes), None if "acceptance" in changes else known)


def _first_samples(trace: Trace, size: int) -> Trace:
    """With so many samples of each prompt, and nothing of the others."""
    rank = trace.workload.sort_values("sample").groupby(["rl_step", "prompt_id"]).cumcount().sort_index()
    workload = trace.workload[rank < size]
    outcomes = trace.outcomes.merge(workload[list(KEY)], on=list(KEY))
    return Trace.from_tables(trace.manifest, {"workload": workload, "outcomes": outcomes})


def _read_journal(journal: Path | None, question: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of a journal by point; a last line that was cut off is ignored."""
    if journal is None or not journal.exists():
        return {}
    head, *lines = journal.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
    if head.rstrip("\n") != question:
        raise ConfigError(
            f"{journal} is of another sweep (trace, settings or policies): delete it, or name another --out"
        )
    whole = [parse_json(line) for line in lines if line.endswith("\n")]
    if lines and not lines[-1].endswith("\n"):
        journal.write_text(head + "".join(line for line in lines if line.endswith("\n")), encoding="utf-8")
    return dict(whole)


def _append(journal: Path, line: str) -> None:
    try:
        with journal.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise InputError(f"cannot write {journal}: {error.strerror}") from error


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


def _label(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.items()) or "the trace as it is"
