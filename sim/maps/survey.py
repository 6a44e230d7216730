"""Every point of a grid simulated under every family: what pays there, by how much, and how sure that is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from joblib import Parallel, delayed, parallel_config

from tltlab.acceptance.load import load_acceptance
from tltlab.arrays import Floats
from tltlab.costs.evidence import interval
from tltlab.costs.roofline import RooflineCosts
from tltlab.errors import ConfigError
from tltlab.planning.system_binding import LEARNED_DEFAULT, TEXT_DEFAULT, BoundSystem, bind
from tltlab.sim.config import SimulationConfig, at_least
from tltlab.sim.sensitivity import RANGES, ScaledChances
from tltlab.sim.simulate import outside_calibration
from tltlab.sim.systems import simulate_system
from tltlab.stats import Interval, interval_json, paired_ratio

from .grid import FAMILIES, WARM_UP_STEPS, MapGrid, Point, beyond_measured, scheduled, shown_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["pays", "likely pays", "open", "does not pay"]
TRIED = [name for name in FAMILIES if name != "off"]
DECISIONS = 256
"""Decisions of a bandit in a response of the whole length."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A family at a point, against no speculation in the contiguous order.

    `step` and `rollout` are times as fast, with Student's 95 % interval over RL steps on the same responses. `believed`
    is where the RL step's would be measured, by the same interval and what nine in ten speed-ups of the costs are off;
    None where nobody knows how far they are off. `least` is the RL step's where a drafted token's chance is at the low
    end of its plausible range, None where nothing is drafted.
    """

    step: Interval
    rollout: Interval
    believed: tuple[float, float] | None
    least: float | None

    @property
    def verdict(self) -> Verdict:
        """`pays` holds for what costs are off and for the least acceptance; `likely pays` for the luck of lengths."""
        if self.step.high <= 1.0:
            return "does not pay"
        if self.step.low <= 1.0:
            return "open"
        sure = self.believed is not None and self.believed[0] > 1.0
        return "pays" if sure and (self.least is None or self.least > 1.0) else "likely pays"

    def json(self) -> dict[str, Any]:
        return {
            "step": interval_json(self.step), "rollout": interval_json(self.rollout), "believed": self.believed,
            "least_acceptance": self.least, "verdict": self.verdict,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """What is found at a point; `fault` says why nothing could be.

    `distance` is that of GPU, model and weights to a measurement, `beyond` what of the point no measurement with them
    has, `says` both in words. `step_s` and `rollout_share` are those of
    plain decoding, `gpus` those of all workers.
    """

    point: Point
    gains: Mapping[str, Gain]
    engine: str = ""
    gpus: int = 0
    distance: str = ""
    beyond: tuple[str, ...] = ()
    says: str = ""
    step_s: float = 0.0
    rollout_share: float = 0.0
    fault: str | None = None

    @property
    def best(self) -> str:
        """The family with the fastest RL step among those that are faster than plain decoding; else `off`."""
        faster = {name: gain.step.estimate for name, gain in self.gains.items() if gain.verdict != "does not pay"}
        return max(faster, key=lambda name: faster[name], default="off")

    @property
    def gain(self) -> Gain | None:
        return self.gains.get(self.best)

    @property
    def times(self) -> float:
        """How many times as fast the best family's RL step is as plain decoding's; NaN where nothing could be found."""
        if self.fault is not None:
            return math.nan
        return 1.0 if self.gain is None else self.gain.step.estimate

    @property
    def sure(self) -> str:
        """How sure the best family is: its verdict; of `off`, that nothing else pays."""
        return "pays" if self.gain is None else self.gain.verdict

    def json(self) -> dict[str, Any]:
        point = self.point
        keys = {
            "model": point.model, "kind": point.kind, "weights": point.weights, "schedule": point.schedule,
            "context": point.context, "load": point.load,
        }  # fmt: skip
        if self.fault is not None:
            return keys | {"fault": self.fault}
        return keys | {
            "best": self.best, "sure": self.sure, "engine": self.engine, "gpus": self.gpus, "distance": self.distance,
            "beyond": list(self.beyond), "evidence": self.says, "step_s": self.step_s,
            "rollout_share": self.rollout_share, "families": {name: gain.json() for name, gain in self.gains.items()},
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Map:
    """The points of a grid with what pays at each."""

    grid: MapGrid
    results: tuple[PointResult, ...]
    wall_s: float

    def __repr__(self) -> str:
        return f"<Map of {len(self.results)} points: {self.verdict}>"

    @cached_property
    def verdict(self) -> str:
        """How often each family is the best, in a sentence."""
        results = [result for result in self.results if result.fault is None]
        counts = {name: sum(result.best == name for result in results) for name in ("off", *TRIED)}
        parts = [f"{name} at {count}" for name, count in sorted(counts.items(), key=lambda c: -c[1]) if count]
        surely = sum(result.sure == "pays" and result.best != "off" for result in results)
        return (
            f"Fastest RL step of {len(results)} points: {', '.join(parts)}; at {surely} beyond doubt of lengths, costs "
            "and acceptance (simulated)."
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per point and family."""
        rows = []
        for result in self.results:
            point = {name: value for name, value in result.json().items() if name not in ("families", "best", "sure")}
            for name, gain in result.gains.items():
                ends = {"step_low": gain.step.low, "step": gain.step.estimate, "step_high": gain.step.high}
                believed = gain.believed or (None, None)
                rows.append(
                    point | {"family": name, "best": name == result.best, "verdict": gain.verdict} | ends
                    | {"rollout": gain.rollout.estimate, "believed_low": believed[0], "believed_high": believed[1]}
                    | {"step_least_acceptance": gain.least}
                )  # fmt: skip
        return pd.DataFrame(rows)

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab map --json`."""
        return {
            "verdict": self.verdict,
            "families": {name: {"title": s.title, "source": s.source} for name, s in FAMILIES.items()},
            "assumptions": list(ASSUMPTIONS),
            "gpu": self.grid.gpu, "num_workers": self.grid.workers, "num_rl_steps": self.grid.rl_steps,
            "regime": self.grid.regime, "points": [result.json() for result in self.results], "wall_s": self.wall_s,
        }  # fmt: skip

    def plot(self) -> Figure:
        """A panel per schedule: models and weights down, length limits and loads across; how much the best brings."""
        from tltlab.charts import heat_maps

        grid = self.grid
        down = [f"{name} {weights}" for name in grid.models for weights in grid.weights]
        across = [f"{shown_tokens(context)}\n{load}" for context in grid.contexts for load in grid.loads]

        def tables(cell: Callable[[PointResult], float | str]) -> dict[str, pd.DataFrame]:
            cells = {name: [cell(r) for r in self.results if r.point.schedule == name] for name in grid.schedules}
            return {name: pd.DataFrame(np.reshape(row, (len(down), -1)), down, across) for name, row in cells.items()}

        initials = ", ".join(f"{_initials(name)} {name}" for name in TRIED)
        return heat_maps(
            tables(lambda result: result.times), texts=tables(_cell),
            xlabel=f"length limit in tokens, responses to a worker\n{initials}; ? not beyond doubt", ylabel="",
            title="RL step of the best family, times as fast as without (simulated)",
        )  # fmt: skip


ASSUMPTIONS = (
    f"a trained drafter is accepted as {LEARNED_DEFAULT}, a model-free one as {TEXT_DEFAULT}, for every model; `least` "
    "has the low end of the plausible range of each",
    "log-probs, training and weight sync by FLOPs and bytes; grading takes nothing",
    "lengths of one regime, stretched to each limit; prompts' mean lengths are known from an epoch before",
    "FP8 speeds up generation alone",
)


def survey(grid: MapGrid = MapGrid(), *, jobs: int = 1, say: Callable[[str], None] = lambda message: None) -> Map:
    """Simulate the families at all points; `jobs` processes share them, which changes no number.

    Costs O(points x families x responses). A point whose model does not fit has a `fault` and no gains. Raises
    ConfigError for jobs < 1.

    >>> survey(MapGrid(contexts=(32768,), loads=(64,))).verdict  # doctest: +SKIP
    """
    at_least(1, jobs=jobs)
    started = time.perf_counter()
    points = list(grid.points())
    say(f"{len(points)} points, {len(FAMILIES)} families")
    with parallel_config(backend="loky", inner_max_num_threads=1):
        results = Parallel(n_jobs=jobs)(delayed(_point_result)(grid, point) for point in points)
    return Map(grid=grid, results=tuple(results), wall_s=time.perf_counter() - started)


def _point_result(grid: MapGrid, point: Point) -> PointResult:
    try:
        costs = grid.costs(point)
    except ConfigError as error:
        return PointResult(point=point, gains={}, fault=str(error))
    simulation = _PointSimulation(grid, point, costs)
    plain = simulation.measure("off")
    gains = {name: simulation.gain(name, plain) for name in TRIED}
    evidence = costs.evidence
    assert evidence is not None
    speculating = any(gain.least is not None for gain in gains.values())
    beyond = sorted(simulation.beyond | set(evidence.beyond(simulation.depths)))
    return PointResult(
        point=point, gains=gains, engine=evidence.engine, gpus=grid.workers * costs.tensor_parallel,
        distance=evidence.distance, beyond=tuple(beyond),
        says=evidence.says(speculates=speculating, beyond=beyond), step_s=float(plain.step.mean()),
        rollout_share=float(plain.rollout.sum() / plain.step.sum()),
    )  # fmt: skip


class _Seconds(NamedTuple):
    """Of the RL steps that count."""

    step: Floats
    rollout: Floats


class _PointSimulation:
    """A point's simulations. `beyond` collects what of them was never measured, `depths` what was drafted."""

    def __init__(self, grid: MapGrid, point: Point, costs: RooflineCosts) -> None:
        self.point, self.costs = point, costs
        self.trace, self.stages = grid.trace(point), grid.stages(point, costs)
        self.config = SimulationConfig(
            costs=costs, workers=grid.workers, seed=grid.seed, decision_block=max(1, point.context // DECISIONS)
        )
        self.beyond = set(beyond_measured(costs, point.context))
        self.depths: set[int] = set()

    def bound(self, family: str) -> BoundSystem:
        """The family's system under the point's schedule, with the default acceptance of its drafter."""
        system = scheduled(FAMILIES[family], self.point.schedule)
        learned = load_acceptance(LEARNED_DEFAULT) if "learned" in system.drafters else None
        text = load_acceptance(TEXT_DEFAULT) if system.drafters and learned is None else None
        return replace(bind(system, self.costs, learned, text), defaults=("acceptance",) if system.drafters else ())

    def measure(self, family: str, bound: BoundSystem | None = None) -> _Seconds:
        run = simulate_system(
            self.trace, bound or self.bound(family), self.config, stages=self.stages,
            gpus_per_worker=self.costs.tensor_parallel,
        )  # fmt: skip
        assert run.whole is not None
        outside = outside_calibration(run.result.scenario, run.result.rollouts) or {}
        self.beyond |= {name.replace("_", " ") for name in outside} - {"acceptance"}
        self.depths |= {s.draft_depth for s in run.bound.policy.strategies if s.speculates}
        rollout_s = np.array([rollout.makespan_s for rollout in run.result.rollouts])
        step_s = run.whole.steps["step_s"].to_numpy(np.float64)
        return _Seconds(step_s[WARM_UP_STEPS:], rollout_s[WARM_UP_STEPS:])

    def gain(self, family: str, plain: _Seconds) -> Gain:
        bound = self.bound(family)
        seconds = self.measure(family, bound)
        rng = np.random.default_rng(self.config.seed)
        step = paired_ratio(plain.step, seconds.step, rng=rng)
        rollout = paired_ratio(plain.rollout, seconds.rollout, rng=rng)
        evidence = self.costs.evidence
        assert evidence is not None
        if not bound.policy.strategies or not any(s.speculates for s in bound.policy.strategies):
            # The same iterations in another order: what costs are off is off in both.
            return Gain(step=step, rollout=rollout, believed=(step.low, step.high), least=None)
        beyond = self.beyond | set(evidence.beyond(self.depths))
        error = evidence.speedup_error(extrapolated=bool(beyond))
        low, high = interval(step.low, error), interval(step.high, error)
        believed = None if low is None or high is None else (low[0], high[1])
        least = [
            float(plain.step.sum() / self.measure(family, changed[0]).step.sum())
            for number in RANGES[:2]
            if (changed := number.change((bound, self.costs), number.ends[0])) is not None
        ]
        return Gain(step=step, rollout=rollout, believed=believed, least=min(least, default=None))


def break_even(grid: MapGrid, point: Point, family: str, *, within: float = 0.02) -> float | None:
    """What the chance of a drafted token must be multiplied by for a family's RL step to be just as fast as plain.

    1 is the default acceptance; found by bisection to `within`. None where nothing from 0 to 2 turns it. Costs
    O(log(1 / within)) simulations.
    """
    simulation = _PointSimulation(grid, point, grid.costs(point))
    plain_s, bound = float(simulation.measure("off").step.sum()), simulation.bound(family)
    drafters = tuple(sorted({s.drafter for s in bound.policy.strategies if s.speculates}))
    if not drafters or bound.acceptance is None:
        return None

    def pays(factor: float) -> bool:
        assert bound.acceptance is not None
        changed = replace(bound, acceptance=ScaledChances(bound.acceptance, drafters, factor))
        return float(simulation.measure(family, changed).step.sum()) < plain_s

    low, high = 0.0, 2.0
    if pays(low) or not pays(high):
        return None
    while high - low > within:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _initials(family: str) -> str:
    return "+".join(word[0].upper() for word in family.split(" + "))


def _cell(result: PointResult) -> str:
    if result.gain is None:
        return f"{result.times:.2f}"
    return f"{result.times:.2f} {_initials(result.best)}" + "?" * (result.sure != "pays")


def table_rows(results: Sequence[PointResult]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table for people: a point each, its best family first, then the others' RL steps."""
    columns = ["model", "weights", "schedule", "context", "load", "best", "RL step", "95 % interval", "sure", "costs"]
    columns += TRIED
    rows = []
    for result in results:
        point = result.point
        keys = [point.model, point.weights, point.schedule, shown_tokens(point.context), str(point.load)]
        if result.fault is not None:
            rows.append([*keys, "does not fit", *[""] * (len(columns) - len(keys) - 1)])
            continue
        gain = result.gain
        cells = ["1.00x", "", "nothing pays"] if gain is None else [
            f"{gain.step.estimate:.2f}x", f"[{gain.step.low:.2f}, {gain.step.high:.2f}]", result.sure,
        ]  # fmt: skip
        speed_ups = [f"{result.gains[name].step.estimate:.2f}x" for name in TRIED]
        costs = f"{result.distance}, beyond in {', '.join(result.beyond)}" if result.beyond else result.distance
        rows.append([*keys, result.best, *cells, costs, *speed_ups])
    return columns, rows
