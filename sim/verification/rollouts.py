"""Predicted against measured: every RL step of a run from fits to the other steps, and a forecast from earlier ones.

A step is predicted from its recorded lengths, its policy and its drafter's age and updates where the run records them;
costs, acceptance and freshness are fitted to other steps only. The acceptance of drafters that remember earlier RL
steps is fitted to steps whose prompts were as new to them. A forecast uses only what is known before the step: it is
fitted to earlier steps, with lengths drawn from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import Acceptance, from_survival, scaled
from tltlab.acceptance.freshness import FreshAcceptance, MeasuredState, fit_freshness
from tltlab.acceptance.measured import BatchBand, MeasuredAcceptance, fit_acceptance
from tltlab.arrays import Array, Flags
from tltlab.calibration.iterations import iterations_of, recorded_rows
from tltlab.costs import linear
from tltlab.costs.base import DRAFTING, CostModel
from tltlab.costs.linear import LinearCosts
from tltlab.costs.samples import Iterations
from tltlab.drafters.specs import DEFAULT_DRAFTERS, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.planning.rollout import RolloutPlanner, Shape
from tltlab.policies.policy import Policy
from tltlab.records import Json, frozen
from tltlab.sim.engine.requests import Requests
from tltlab.sim.scenario import Scenario, is_memoryless
from tltlab.sim.study.jobs import side_by_side
from tltlab.sim.study.study import Cell
from tltlab.sim.workload import Prefix, requests_by_step, with_lengths
from tltlab.state import DrafterState
from tltlab.stats import finite
from tltlab.traces import metrics
from tltlab.traces.schema import KEY, TABLES
from tltlab.traces.split import regrouped
from tltlab.traces.trace import Trace, locate

from .decisions import drafters_by_step, most_requests
from .errors import Errors
from .plans import InformedPlanner
from .run_files import ActivePolicy, planner_of, policies_in_force, repeats


def rescaled(
    base: MeasuredAcceptance, drafter: str, each: Sequence[tuple[float, MeasuredAcceptance | None]]
) -> MeasuredAcceptance:
    """The base with a drafter's distributions pooled from RL steps after each one's chances were multiplied.

    Pooled first and multiplied then they would be too long: long drafts of a good drafter and short ones of a bad one
    are more tokens than as many of a drafter between them.
    """
    bands = []
    for at, band in enumerate(base.bands):
        pooled = {}
        for depth, cell in band.drafters_by_depth.get(drafter, {}).items():
            total = np.zeros(depth + 1)
            for ratio, fitted in each:
                measured = None if fitted is None else fitted.bands[at].drafters_by_depth.get(drafter, {}).get(depth)
                if measured is not None:
                    survival = np.cumsum(np.array(measured.accepted)[::-1])[::-1][1:]
                    total += (measured.num_samples or 1) * np.clip(from_survival(scaled(survival, ratio)), 0.0, 1.0)
            accepted = cell.accepted if total.sum() <= 0 else tuple((total / total.sum()).tolist())
            pooled[depth] = cell.model_copy(update={"accepted": accepted})
        cells_of = {name: cells for name, cells in band.drafters_by_depth.items() if name != drafter}
        bands.append(
            BatchBand(max_batch=band.max_batch, drafters_by_depth=cells_of | ({drafter: pooled} if pooled else {}))
        )
    return MeasuredAcceptance(bands=tuple(bands), copies=base.copies)


FORECASTS = 15
INTERVAL = (10, 90)
_ROUNDING_S = 1e-9
_PLAIN = ("base_s", "per_request_s", "per_context_s", "prefill_per_token_s")
_TABLES = ("workload", "outcomes", "iterations", "acceptance", "steps", "spans")
"""Tables that predictions are made of."""


@dataclass(frozen=True, kw_only=True)
class Verification(Errors):
    """One row per predicted RL step.

    Columns of `rows`: `rl_step`, `policy`, `measured_s`, `predicted_s`, `error` (predicted / measured - 1),
    `step_time_ratio` (the recorded iterations of the worker with the most seconds of them, measured over predicted,
    which may be two workers: how much slower the machine was than in the steps of the fit), `forecast_s` with its
    10 % and 90 % quantiles `forecast_low_s` and `forecast_high_s` (nan without two earlier steps), and `fitted_on`.
    """

    columns = (
        "step: {rl_step}; policy: {policy}; measured s: {measured_s:.2f}; predicted s: {predicted_s:.2f}; "
        "error: {error:+.1%}; step time: {step_time_ratio:.2f}x; forecast s: {forecast_s:.2f}; "
        "10-90 %: {forecast_low_s:.2f}-{forecast_high_s:.2f}"
    )
    sentences = (
        "with the machine's speed of each step known {median_error_at_step_time:.1%}, {worst_step}",
        "forecast from earlier steps alone, lengths drawn from theirs {forecast_median_error:.1%}, "
        "{forecast_coverage:.0%} within their 10-90 % interval",
        "{note:s}",
    )
    advice = (
        "--decisions shows whether a policy's choices differ; an idle machine and more RL steps make times surer",
        "tltlab tune RUN --out policy.json",
    )

    note: str | None = None

    def _at_step_time(self, rows: pd.DataFrame) -> float:
        return float((rows["predicted_s"] * rows["step_time_ratio"] / rows["measured_s"] - 1).abs().median())

    @property
    def median_error_at_step_time(self) -> float:
        """Median error with the machine's speed of each step known."""
        return self._at_step_time(self.rows)

    @property
    def worst_step(self) -> str:
        """The largest error once the machine's speed is known, and that speed."""
        row = self.rows[self.rows["error"].abs() == self.worst_error]
        (rl_step, *_), (ratio, *_) = row["rl_step"], row["step_time_ratio"]
        return f"{self._at_step_time(row):.1%} in the worst, RL step {rl_step}, whose iterations took {ratio:.2f}x"

    def json(self) -> Json:
        """The keys of `tltlab verify --json`."""
        foreseen = self.rows[self.rows["forecast_s"].notna()]
        within = foreseen["measured_s"].between(foreseen["forecast_low_s"], foreseen["forecast_high_s"])
        names = ("median_error_at_step_time", "worst_step", "repeat_spread", "repeat_bias", "note")
        figures = {name: getattr(self, name) for name in names} | {
            "forecast_median_error": finite((foreseen["forecast_s"] / foreseen["measured_s"] - 1).abs().median()),
            "forecast_coverage": finite(within.mean()),
        }
        return self.judged(super().json() | figures)


def verify(
    run: str | Path | Trace,
    *,
    rl_steps: Sequence[int] | None = None,
    window: int = 8,
    samples: int = 3,
    seed: int = 0,
    allow_code: Sequence[str] = (),
    jobs: int | None = 1,
) -> Verification:
    """Predict each RL step of a recorded run from the `window` nearest other steps, and forecast it from earlier ones.

    A prediction is the mean of `samples` sampled simulations with the recorded placement; `jobs` processes (None: one
    per core) share the RL steps. One or two RL steps are each predicted from a part of themselves (`_held_out`). Raises
    ConfigError for a trace without iterations, fewer than three prompts, a policy that the run does not record, and
    one that is a class of a module which `allow_code` does not name.
    """
    trace = read(run)
    if not isinstance(run, Trace):
        # Recordings of several engines, put together, are in no folder; the first one's has their policy.
        trace.path = trace.path or locate(run)
    if trace.iterations is None or trace.steps is None:
        raise ConfigError(f"{run}: only a run with iterations.parquet and steps.parquet can be verified")
    recorded = trace.rl_steps
    chosen = recorded if rl_steps is None else list(rl_steps)
    if not chosen or not set(chosen) <= set(recorded):
        raise ConfigError(f"{run}: RL steps {chosen} were asked for; there are {recorded[0]}..{recorded[-1]}")
    measured = _measured(trace)
    forces = without_budget(policies_in_force(trace, allow_code))
    known = with_engine_tool_times(Trace.from_tables(trace.manifest, {name: trace.arrow(name) for name in _TABLES}))
    planner = None
    if (plans := trace.table("plans")) is not None:
        planner, known = planner_of(trace, allow_code), with_first_workers(known, plans)
    prediction = _Prediction(
        trace=known, window=window, samples=samples, forecasts=FORECASTS, seed=seed, planner=planner
    )  # fmt: skip
    # Backwards: the last RL steps take longest, as they have a past to be forecast from.
    of_parts = len(recorded) < 3
    if of_parts and planner is not None:
        raise ConfigError(f"{run}: a run with a planner is verified from three RL steps on")
    tasks = [
        partial(prediction.row_of_parts if of_parts else prediction.row, forces[step], step, measured[step])
        for step in reversed(chosen)
    ]
    rows = pd.DataFrame(list(side_by_side(tasks, jobs=jobs))[::-1])
    return Verification(rows=rows, note=_NOTE if of_parts else None, **repeats(trace))


_NOTE = (
    "fewer than three RL steps: each is predicted from three quarters of its own iterations, and forecast with lengths "
    "drawn from half of its prompts; this tests the simulation, not whether another RL step is foreseen"
)


def _held_out(trace: Trace) -> Trace:
    """Return an RL step as number 2, with a quarter of its iterations; 0 and 1 share the rest, and half its prompts.

    Raises ConfigError for fewer than three prompts.
    """
    number, iterations = trace.outcomes.groupby("prompt_id").ngroup().to_numpy(), iterations_of(trace)
    if number.max() < 2:
        raise ConfigError(f"{trace.path}: of {number.max() + 1} prompts none can be held out")
    # A rollout whose prompts came at once has few iterations with prefill.
    turn = (iterations.groupby("worker").cumcount() % 4).where(iterations["prefill_tokens"] == 0, 0)
    parts = [(0, number % 4 == 0), (1, number % 4 == 2), (2, number >= 0)]
    return regrouped(trace, parts, iterations=iterations.assign(rl_step=turn.map({0: 0, 1: 1, 2: 0, 3: 2})))


def without_budget(forces: dict[int, ActivePolicy]) -> dict[int, ActivePolicy]:
    """The same without the budget that ruled all RL steps: acceptance that is fitted to them is of what it allotted."""
    budgets = [force.policy.budget for force in forces.values()]
    if any(budget != budgets[0] for budget in budgets):
        return forces
    return {
        step: replace(force, policy=force.policy.model_copy(update={"budget": None})) for step, force in forces.items()
    }


def _measured(trace: Trace) -> dict[int, float]:
    """Rollout seconds of every RL step. Raises ConfigError for a step that cannot be held against anything."""
    assert trace.iterations is not None
    ran = set(trace.iterations["rl_step"].tolist())
    measured = {}
    for step, seconds in metrics.rollout_s(trace).items():
        if not (seconds or 0.0) > 0.0 or step not in ran:
            raise ConfigError(
                f"{trace.path}: RL step {step} has no rollout_s above 0 in steps.parquet, or no row in "
                "iterations.parquet: leave it out of the trace to verify the others"
            )
        measured[step] = float(seconds or 0.0)
    return measured


def nearest(rl_steps: Sequence[int], step: int, window: int) -> list[int]:
    """The `window` steps nearest to `step`, itself left out; of two equally near the earlier one first.

    >>> nearest([0, 1, 2, 3, 4], 2, 3)
    [0, 1, 3]
    """
    candidates = sorted((s for s in rl_steps if s != step), key=lambda s: (abs(s - step), s))
    return sorted(candidates[:window])


@frozen
class Fit:
    """Costs and acceptance fitted to `rl_steps`, for the prediction of another one.

    `costs` are by the engines' shape, "" those of the first engines. `outside_s` are seconds of a rollout beside its
    iterations, `gather_s` those until engines of another shape run.
    """

    costs: Mapping[str, LinearCosts]
    acceptance: Acceptance | None
    rl_steps: Sequence[int] = ()
    outside_s: float = 0.0
    gather_s: float = 0.0


@frozen
class RecordedRun:
    """A recorded run, fits to any of its RL steps, and simulations of these under their own lengths, `samples` of each.

    Costs have no noise: they are for predicting a rollout time. Engines that share cores slow each other down. To a fit
    that is scatter of each, but it is common to all, and drawn apart for each worker it would make the slowest of four
    some 10 % slower than it is.
    """

    trace: Trace
    samples: int = 1
    seed: int = 0
    planner: tuple[RolloutPlanner, Mapping[Shape, CostModel]] | None = None

    @cached_property
    def iterations(self) -> pd.DataFrame:
        return iterations_of(self.trace)

    @cached_property
    def gathers(self) -> pd.DataFrame:
        """The spans of gathers, one of each, whose `detail` is the shape that requests went to."""
        rows = pd.DataFrame(columns=TABLES["spans"].names) if self.trace.spans is None else self.trace.spans
        return rows[rows["kind"] == "move"].dropna(subset="detail").drop_duplicates(["rl_step", "t_start"])

    @cached_property
    def shapes(self) -> Array:
        """By row of `iterations` the shape of its engine, where requests were gathered onto it; "" of the first."""
        shapes, iterations = np.full(len(self.iterations), "", object), self.iterations
        for move in self.gathers.itertuples():
            after = (iterations["rl_step"] == move.rl_step) & (iterations["t_start"] >= move.t_start)
            shapes[after.to_numpy()] = move.detail
        return shapes

    @cached_property
    def _rows(self) -> Iterations:
        return recorded_rows(self.iterations, self.trace.steps)

    @cached_property
    def overhead_s(self) -> pd.Series[float]:
        """Seconds of each RL step's rollout beside its busiest worker's iterations: calls, starts, collecting."""
        if self.planner is not None or (self.trace.outcomes["turn"] > 0).any():
            # Between its iterations a worker waits for tools or requests, as in a simulation.
            rows = self.iterations.assign(end=self.iterations["t_start"] + self.iterations["duration"])
            ends = rows.groupby(["rl_step", "worker"])
            busiest = ends["end"].max() - ends["t_start"].min()
        else:
            busiest = self.iterations.groupby(["rl_step", "worker"])["duration"].sum()
        return pd.Series(metrics.rollout_s(self.trace), dtype=np.float64) - busiest.groupby("rl_step").max()

    @cached_property
    def drafters(self) -> dict[int, DrafterState]:
        """The learned drafter in service in each RL step whose row in `steps` has its age and updates."""
        return drafters_by_step(self.trace)

    def of(self, rl_steps: Collection[int]) -> Flags:
        """The rows of `iterations` in these RL steps."""
        return np.isin(self._rows.rl_step, list(rl_steps))

    def costs(self, rl_steps: Collection[int], shape: str = "") -> LinearCosts:
        """Linear costs of RL steps, as `calibrate` fits them, on engines of a `shape`, by default the first ones.

        Raises ConfigError where there are no iterations.
        """
        rows = self._rows.where(self.of(rl_steps) & (self.shapes == shape))
        if not len(rows):
            raise ConfigError("there are no iterations to calibrate on")
        return linear.fit(rows, recorded=True)

    def timed(self, costs: Mapping[str, LinearCosts], rl_steps: Collection[int]) -> pd.DataFrame:
        """Iterations of some RL steps, with their `predicted` seconds and their `shape`, by which costs are."""
        parts = []
        for shape, each in costs.items():
            here: Flags = self.of(rl_steps) & (self.shapes == shape)
            predicted = each.identified_s(self._rows.where(here))
            parts.append(self.iterations[here].assign(predicted=predicted, shape=shape))
        return pd.concat(parts)

    def accepted(self, rows: Flags | pd.Series[bool]) -> MeasuredAcceptance | None:
        """Acceptance of these rows of `iterations`; None where nothing was speculated."""
        return fit_acceptance(self.iterations[rows], self.trace.drafters)[0]

    def acceptance(
        self, base: MeasuredAcceptance | None, step: int, fit_on: Sequence[int], seen_steps: Sequence[int]
    ) -> MeasuredAcceptance | FreshAcceptance | None:
        """Acceptance of some RL steps as it holds for the drafter of another one.

        Each of them is scaled by the level of its drafter, with a freshness fitted to acceptance.parquet in the RL
        steps `seen_steps` but `step`. Without several ages or numbers of updates there, or with an RL step whose
        drafter is unknown, it is the base itself.
        """
        table, rows = self.trace.acceptance, self.iterations
        if base is None or table is None or not {*fit_on, step} <= self.drafters.keys():
            return base
        history = table[table["rl_step"].isin([rl_step for rl_step in seen_steps if rl_step != step])]
        drafted = rows["drafter"].where(rows["draft_depth"] > 0)
        for drafter in sorted({*base.drafters} & {*history["drafter"]} & {*drafted[self.of(fit_on)]}):
            try:
                freshness, _ = fit_freshness(history, drafter)
            except ConfigError:
                continue
            state = self.drafters[step]
            level = {s: freshness.level(self.drafters[s].age, self.drafters[s].updates) for s in (*fit_on, step)}
            for s in {*fit_on} - {of for name, of in self._fits if name == drafter}:
                self._fits[drafter, s] = self.accepted((rows["rl_step"] == s) & (drafted == drafter))
            ratios = [(level[step] / level[s], self._fits[drafter, s]) for s in fit_on if level[s] > 0.0]
            return FreshAcceptance(
                base=rescaled(base, drafter, ratios),
                drafter=drafter,
                freshness=freshness,
                measured=MeasuredState(age=state.age, updates=state.updates),
            )
        return base

    @cached_property
    def _fits(self) -> dict[tuple[str, int], MeasuredAcceptance | None]:
        """Acceptance of a drafter's drafts in one RL step; None without drafts."""
        return {}

    @cached_property
    def prefix(self) -> Prefix:
        """Fate of prefixes of turns, judged by prefilled tokens: small engines have blocks too large to keep."""
        rows = self.iterations
        steps = [step for step in requests_by_step(self.trace) if step.turns is not None]
        whole, uncached = (float(sum(getattr(step, of).sum() for step in steps)) for of in ("prompts", "uncached"))
        prefilled = float(rows.loc[rows["rl_step"].isin([step.rl_step for step in steps]), "prefill_tokens"].sum())
        return "kept" if abs(prefilled - uncached) <= abs(prefilled - whole) else "recomputed"

    def scenario(self, rl_steps: list[int], fit: Fit) -> Scenario:
        """Return the simulation of these RL steps, with their drafters, on engines of the size of the recorded ones."""
        most = {"max_num_seqs": most_requests(self.iterations)}
        costs = {shape: each.model_copy(update=most) for shape, each in fit.costs.items()}
        scenario = Scenario.of(
            self.trace.select(rl_steps), acceptance=fit.acceptance, placement="recorded", prefix=self.prefix,
            costs=costs.pop(""), mode="sampled", seed=self.seed,
        )  # fmt: skip
        if self.planner is not None:
            scenario = replace(
                scenario, planner=InformedPlanner(*self.planner, self.trace, rl_steps[-1]),
                shapes={Shape.of(shape): each for shape, each in costs.items()}, gather_s=fit.gather_s,
            )  # fmt: skip
        if (last := self.drafters.get(rl_steps[-1])) is None:
            return scenario
        # A learning policy's past counts as drafted by today's drafter where its drafter is unknown.
        return replace(scenario, drafter_states=tuple(self.drafters.get(rl_step, last) for rl_step in rl_steps))

    def cells(self, force: ActivePolicy, scenario: Scenario, **axes: Any) -> list[Cell]:
        """Return the scenario's simulations under a policy, which starts as on the engines."""
        return [
            Cell(
                name=force.name, policy=force.policy, scenario=replace(scenario, seed=scenario.seed + sample),
                axes={"sample": sample, **axes}, entropy=force.entropy(scenario.workers),
            )
            for sample in range(self.samples)
        ]  # fmt: skip


@frozen
class _Prediction(RecordedRun):
    """How the RL steps of a run are predicted from one another."""

    window: int
    forecasts: int
    outside_s: float | None = None

    def row_of_parts(self, force: ActivePolicy, step: int, measured_s: float) -> dict[str, Any]:
        """The row of an RL step that is predicted from a part of itself."""
        parts = replace(self, trace=_held_out(self.trace.select([step])), outside_s=self.overhead_s[step])
        return parts.row(replace(force, since=2), 2, measured_s) | {"rl_step": step}

    def row(self, force: ActivePolicy, step: int, measured_s: float) -> Json:
        """The RL step's row of `Verification.rows`."""
        rl_steps = self.trace.rl_steps
        fit = self._fitted([s for s in rl_steps if s != step], force.policy, step)
        # Only a policy that learns or draws lots has a past that matters.
        since = step if is_memoryless(force.policy) else force.since
        past = self.scenario([s for s in rl_steps if since <= s <= step], fit)
        predicted_s = float(np.mean([last_s(cell) for cell in self.cells(force, past)])) + fit.outside_s
        rows = self.timed(fit.costs, [step])
        # Engines of one shape run before those of another.
        sums = rows.groupby(["shape", "worker"])[["duration", "predicted"]].sum()
        most = sums.groupby("shape").max().sum()
        forecast_s, forecast_low_s, forecast_high_s = self._forecast(force, step)
        return {
            "rl_step": step,
            "policy": force.name,
            "measured_s": measured_s,
            "predicted_s": predicted_s,
            "error": predicted_s / measured_s - 1,
            "step_time_ratio": float(most["duration"] / most["predicted"]),
            "forecast_s": forecast_s,
            "forecast_low_s": forecast_low_s,
            "forecast_high_s": forecast_high_s,
            "fitted_on": fit.rl_steps,
        }

    def _fitted(self, candidates: list[int], policy: Policy, step: int) -> Fit:
        """Fit to the nearest candidates, as many as show what the step needs."""
        speculates, needed = any(s.speculates for s in policy.strategies), {"", *self.shapes[self.of([step])]}
        for size in range(min(self.window, len(candidates)), len(candidates) + 1):
            fit_on = nearest(candidates, step, size)
            rows = self.of(fit_on)
            costs, acceptance = self._by_shape(fit_on, policy), self.accepted(rows)
            drafted = not speculates or (
                acceptance is not None and all(each.per_token_s is not None for each in costs.values())
            )
            if drafted and needed <= costs.keys():
                unlike = self._unlike(rows, policy, step)
                acceptance = self.accepted(rows & ~unlike) if unlike.any() else acceptance
                accepted = self.acceptance(acceptance, step, fit_on, candidates)
                outside_s = self.overhead_s.loc[fit_on].median() if self.outside_s is None else self.outside_s
                gathers = self.gathers[self.gathers["rl_step"].isin(fit_on)]
                return Fit(
                    costs=costs, acceptance=accepted, rl_steps=fit_on, outside_s=float(outside_s),
                    gather_s=float(gathers["duration"].median()) if len(gathers) else 0.0,
                )  # fmt: skip
        does = f"gathers onto {max(needed)}" if len(needed) > 1 else "speculates"
        raise ConfigError(f"RL step {step} {does}, and too little in the other steps does: what it costs is not known")

    def _by_shape(self, fit_on: Sequence[int], policy: Policy) -> dict[str, LinearCosts]:
        """Return costs by shape, "" those of the first engines.

        The few iterations after gathers may have one batch size. Where engines of one shape made no drafts, these cost
        what they do on the others.
        """
        rows, costs = self.of(fit_on), dict[str, LinearCosts]()
        for shape in {*self.shapes[rows]}:
            costs[shape] = single_shape(
                self.costs(fit_on, shape), self.iterations[rows & (self.shapes == shape)], policy
            )
        drafted = next((each for each in costs.values() if each.per_token_s is not None), None)
        for shape, each in costs.items():
            terms: Json = dict.fromkeys(_PLAIN if shape else (), 0.0)
            terms |= drafted.model_dump(include={*DRAFTING}) if drafted is not None else {}
            missing = {name: value for name, value in terms.items() if getattr(each, name) is None}
            costs[shape] = each.model_copy(update=missing)
        return costs

    def _unlike(self, fitted: Flags, policy: Policy, step: int) -> Flags:
        """Rows of `fitted` whose drafter remembers earlier RL steps, where prompts were not as new to it as in a step.

        Strategies that none of the others drafted are left out: these are fitted to all.
        """
        specs = DEFAULT_DRAFTERS | policy.drafters
        remember = [name for name, spec in specs.items() if isinstance(spec, SuffixSpec) and spec.remembers]
        rows = self.iterations
        mine = fitted & rows["drafter"].isin(remember).to_numpy()
        if not mine.any():
            return mine
        epochs = self.trace.workload.groupby("rl_step")["epoch"].median() > 0
        alike = (rows["rl_step"].map(epochs) == epochs[step]).to_numpy()
        drafted = pd.MultiIndex.from_frame(rows[["drafter", "draft_depth", "tokens_to_verify"]])
        unlike: Flags = mine & ~alike & drafted.isin(drafted[mine & alike])
        return unlike

    def _forecast(self, force: ActivePolicy, step: int) -> tuple[float, float, float]:
        """Median and interval of the rollout time as it looks before the step, nan where history is too short."""
        earlier = [s for s in self.trace.rl_steps if s < step]
        try:
            if len(earlier) < 2:
                raise ConfigError("history is too short")
            fit = self._fitted(earlier, force.policy, step)
        except ConfigError:
            return (float("nan"),) * 3
        rng = np.random.default_rng([self.seed, step])
        scenario = self.scenario([step], fit)
        drawn = drawn_lengths(scenario.steps[0], self.trace.select(fit.rl_steps), rng, self.prefix)
        # As if the policy was set at this step: a forecast does not replay what it learned before.
        afresh = replace(force, since=step)
        cells = replace(self, samples=self.forecasts).cells(afresh, scenario)
        makespans_s = [
            last_s(replace(cell, scenario=replace(cell.scenario, steps=(requests,))))
            for cell, requests in zip(cells, drawn, strict=False)
        ]
        median, low, high = np.percentile(makespans_s, (50, *INTERVAL)) + fit.outside_s
        return float(median), float(low), float(high)


def last_s(cell: Cell) -> float:
    """Seconds of the last RL step, after those before it."""
    return float(cell.makespans()[-1]["makespan_s"])


def single_shape(costs: LinearCosts, iterations: pd.DataFrame, policy: Policy) -> LinearCosts:
    """The same where every draft of the data and of the policy has one shape: what its tokens cost is in other terms
    then, and nothing else is asked of these costs."""
    drafts = iterations.loc[iterations["draft_depth"] > 0, ["draft_depth", "top_k", "tokens_to_verify"]]
    shapes = set(drafts.drop_duplicates().itertuples(index=False, name=None))
    policy_shapes = {(s.draft_depth, s.top_k, s.tokens_to_verify) for s in policy.strategies if s.speculates}
    if costs.per_token_s is not None or len(shapes) != 1 or shapes != policy_shapes:
        return costs
    return costs.model_copy(update={"per_token_s": 0.0, "sd_base_s": costs.sd_base_s or 0.0})


def with_engine_tool_times(trace: Trace) -> Trace:
    """The trace with `tool_s` from the end of a turn's last iteration until its engine could continue with the next
    turn.

    An engine that has nothing else waits until all that came back is handed over, which with tools of microseconds is
    most of the time.
    """
    outcomes, iterations = trace.outcomes, trace.iterations
    if iterations is None or not (outcomes["turn"] > 0).any():
        return trace
    before = outcomes[[*KEY, "t_finish"]].assign(turn=outcomes["turn"] + 1).rename(columns={"t_finish": "left_s"})
    rows = outcomes.merge(before, on=list(KEY), how="left")
    iterations_of = {place: turns.sort_values("t_start") for place, turns in iterations.groupby(["rl_step", "worker"])}
    tool_s = rows["tool_s"].to_numpy(np.float64, copy=True)
    for place, turns in rows[rows["left_s"].notna() & rows["t_submit"].notna()].groupby(["rl_step", "worker"]):
        if place not in iterations_of:
            continue
        starts = iterations_of[place]["t_start"].to_numpy()
        ends = starts + iterations_of[place]["duration"].to_numpy()
        # Turns of one iteration end together, and are recorded one by one.
        last = np.searchsorted(ends, turns["left_s"] + _ROUNDING_S, "right") - 1
        first = np.searchsorted(starts, turns["t_submit"] - _ROUNDING_S)
        valid = (last >= 0) & (first > last) & (first < len(starts))
        last, first, turns = last[valid], first[valid], turns[valid]
        idle = starts[first] - ends[first - 1] > _ROUNDING_S
        tool_s[turns.index] = np.where(idle, starts[first], turns["t_submit"]) - ends[last]
    return trace.replace(outcomes=outcomes.assign(tool_s=tool_s))


def with_first_workers(trace: Trace, plans: pd.DataFrame) -> Trace:
    """The trace with each response's `worker` when the rollout began, as its planner saw it, in place of the last."""
    begun = plans[plans["plan"] == 0].explode(["prompts", "samples", "workers"])
    begun = begun[["rl_step", "prompts", "samples", "workers"]].set_axis([*KEY[:3], "first"], axis=1)
    rows = trace.outcomes.merge(begun.astype({"sample": np.int32}), on=list(KEY[:3]), how="left")
    return trace.replace(outcomes=trace.outcomes.assign(worker=rows["first"].fillna(rows["worker"]).to_numpy()))


def drawn_lengths(step: Requests, history: Trace, rng: np.random.Generator, prefix: str) -> Iterator[Requests]:
    """The RL step again and again, with response lengths of whole groups drawn from history, each cut at its cap."""
    groups = [group.to_numpy() for _, group in history.outcomes.groupby(["rl_step", "prompt_id"])["response_tokens"]]
    places = [np.flatnonzero(step.groups == group) for group in np.unique(step.groups)]
    while True:
        drawn = np.empty(len(step), np.int64)
        for place in places:
            drawn[place] = rng.choice(groups[rng.integers(len(groups))], size=len(place), replace=True)
        yield with_lengths(step, np.clip(drawn, 1, step.max_response_tokens).tolist(), prefix)
