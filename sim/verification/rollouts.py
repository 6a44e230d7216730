"""Predicted against measured: every RL step of a run from what the other steps taught, and what history foresaw.

A step is predicted from its recorded lengths, its policy and its drafter's age and updates where the run tells them;
costs, acceptance and freshness are fitted to other steps only, the acceptance of drafters that remember earlier RL
steps to those whose prompts were as new to them. Beside it stands a forecast as one has it before the step: fitted to
earlier steps, with lengths drawn from theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.measured import MeasuredAcceptance
from tltlab.calibration.acceptance.measured import fit_acceptance
from tltlab.calibration.api import Calibration, calibrate, iteration_times
from tltlab.console import table
from tltlab.drafters.specs import DEFAULT_DRAFTERS, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.policies.policy import Policy
from tltlab.sim.engine.requests import Prefix, requests_by_step
from tltlab.sim.engine.worker import SimulatedRollout
from tltlab.sim.scenario import Scenario
from tltlab.stats import finite
from tltlab.traces import metrics
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .decisions import most_requests
from .drafter_state import DrafterStates
from .run_files import InForce, policies_in_force, repeats

FORECASTS = 15
FEWEST_PLAIN = 20
"""Plain iterations of an RL step, without prefill, that tell how fast its machine was."""
INTERVAL = (10, 90)
_ROUNDING_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Verification:
    """One row per predicted RL step, and what they come to.

    Columns of `rows`: `rl_step`, `policy`, `measured_s`, `predicted_s`, `error` (predicted / measured - 1),
    `step_time_ratio` (the recorded iterations of the busiest worker, measured over predicted: how much slower the
    machine was than in the steps of the fit), `plain_iterations` of the step and `plain_time_ratio`, their median time
    over that of the fit (nan below `FEWEST_PLAIN`), `scaled_s` and `scaled_error`, the prediction at that speed,
    `forecast_s` with its 10 % and 90 % quantiles `forecast_low_s` and `forecast_high_s` (nan without two earlier
    steps), and `fitted_on`.

    Plain decoding is what a run does over and over whatever its policy, so its own plain iterations tell how fast the
    machine was in a step. `scaled_median_error`, `scaled_worst_error` and `scaled_raw_median_error` (the prediction as
    it is) are over the `scaled_steps` steps that have enough of them; None where none has.

    Where the run did rollouts twice, `repeat_bias` is the median of repeat / rollout - 1 and `repeat_spread` the median
    distance from that: what all second runs have in common is no noise. None where it did not.
    """

    rows: pd.DataFrame
    median_error: float
    worst_error: float
    median_error_at_step_time: float
    scaled_median_error: float | None
    scaled_worst_error: float | None
    scaled_raw_median_error: float | None
    scaled_steps: int
    forecast_median_error: float | None
    forecast_coverage: float | None
    repeat_spread: float | None
    repeat_bias: float | None

    @property
    def goal(self) -> float:
        """Bound of the median error: 5 %, or the machine's own variation."""
        return max(0.05, self.repeat_spread or 0.0)

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab verify --json`."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"},
            "goal": self.goal,
            "met": self.median_error <= self.goal,
            "num_steps": len(self.rows),
            "steps": json.loads(self.rows.to_json(orient="records")),
        }


def verify(
    run: str | Path | Trace,
    *,
    rl_steps: Sequence[int] | None = None,
    window: int = 8,
    samples: int = 3,
    seed: int = 0,
    allow_code: Sequence[str] = (),
) -> Verification:
    """Predict each RL step of a recorded run from the `window` nearest other steps, and forecast it from earlier ones.

    A prediction is the mean of `samples` sampled simulations with the recorded placement. Raises ConfigError for a
    trace without iterations, fewer than three RL steps, a policy that the run does not tell, and one that is a class of
    a module which `allow_code` does not name.
    """
    trace = read(run)
    if trace.iterations is None or trace.steps is None:
        raise ConfigError(f"{run}: only a run with iterations.parquet and steps.parquet can be verified")
    recorded = trace.rl_steps
    if len(recorded) < 3:
        raise ConfigError(f"{run}: {len(recorded)} RL steps are too few: two to fit on and one to predict are needed")
    measured = _measured(trace)
    drafters = DrafterStates(trace=trace)
    prediction = _Prediction(
        trace=tools_as_engines_saw(trace), drafters=drafters, window=window, samples=samples, seed=seed
    )
    forces = _budgeted_once(policies_in_force(trace, allow_code))
    rows = []
    for step in recorded if rl_steps is None else rl_steps:
        if step not in recorded:
            raise ConfigError(f"{run}: no RL step {step}; there are {recorded[0]}..{recorded[-1]}")
        rows.append(prediction.row(forces[step], step, measured[step]))
    if not rows:
        raise ConfigError(f"{run}: no RL step was asked for")
    table = pd.DataFrame(rows)
    bias, spread = repeats(trace)
    at_step_time = (table["predicted_s"] * table["step_time_ratio"] / table["measured_s"] - 1).abs()
    foreseen, scaled = table[table["forecast_s"].notna()], table[table["scaled_error"].notna()]
    within = foreseen["measured_s"].between(foreseen["forecast_low_s"], foreseen["forecast_high_s"])
    return Verification(
        rows=table,
        median_error=float(table["error"].abs().median()),
        worst_error=float(table["error"].abs().max()),
        median_error_at_step_time=float(at_step_time.median()),
        scaled_median_error=finite(scaled["scaled_error"].abs().median()),
        scaled_worst_error=finite(scaled["scaled_error"].abs().max()),
        scaled_raw_median_error=finite(scaled["error"].abs().median()),
        scaled_steps=len(scaled),
        forecast_median_error=finite((foreseen["forecast_s"] / foreseen["measured_s"] - 1).abs().median()),
        forecast_coverage=finite(within.mean()),
        repeat_spread=spread,
        repeat_bias=bias,
    )


def _budgeted_once(forces: dict[int, InForce]) -> dict[int, InForce]:
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


@dataclass(frozen=True, kw_only=True)
class _Prediction:
    """A recorded run, and how its RL steps are predicted from one another."""

    trace: Trace
    drafters: DrafterStates
    window: int
    samples: int
    seed: int

    def row(self, force: InForce, step: int, measured_s: float) -> dict[str, Any]:
        """The RL step's row of `Verification.rows`."""
        trace = self.trace
        history, fitted = self._fitted([s for s in trace.rl_steps if s != step], force.policy, step)
        fit_on = history.rl_steps
        # Only a policy that learns or draws lots has a past that matters.
        since = step if force.policy.build(np.random.default_rng(0)).memoryless else force.since
        spans = [s for s in trace.rl_steps if since <= s <= step]
        past = trace.select(spans)
        accepted = self.drafters.acceptance(fitted.acceptance, step, fit_on, trace.rl_steps)
        rollouts = [self._simulate(past, force, fitted, accepted, k) for k in range(self.samples)]
        makespan_s, beside_s = float(np.mean([rollout.makespan_s for rollout in rollouts])), overhead_s(trace, fit_on)
        predicted_s = makespan_s + beside_s
        this_step = trace.select([step])
        assert this_step.iterations is not None
        times = this_step.iterations[["worker", "duration"]].assign(predicted=iteration_times(fitted.costs, this_step))
        plain = (this_step.iterations["draft_depth"] == 0) & (this_step.iterations["prefill_tokens"] == 0)
        num_plain, ratio = int(plain.sum()), float("nan")
        if num_plain >= FEWEST_PLAIN:
            ratio = _speed(times[plain], history, fitted)
        scaled_s = makespan_s * ratio + beside_s
        busiest = times.groupby("worker").sum().sort_values("duration").iloc[-1]
        forecast_s, forecast_low_s, forecast_high_s = self._forecast(force, step)
        return {
            "rl_step": step,
            "policy": force.name,
            "measured_s": measured_s,
            "predicted_s": predicted_s,
            "error": predicted_s / measured_s - 1,
            "step_time_ratio": float(busiest["duration"] / busiest["predicted"]),
            "plain_iterations": num_plain,
            "plain_time_ratio": ratio,
            "scaled_s": scaled_s,
            "scaled_error": scaled_s / measured_s - 1,
            "forecast_s": forecast_s,
            "forecast_low_s": forecast_low_s,
            "forecast_high_s": forecast_high_s,
            "fitted_on": fit_on,
        }

    @cached_property
    def most_requests(self) -> int | None:
        """Requests that an engine of the run has at most."""
        assert self.trace.iterations is not None
        return most_requests(self.trace.iterations)

    @cached_property
    def prefix(self) -> Prefix:
        """Fate of prefixes of turns, judged by prefilled tokens: small engines have blocks too large to keep."""
        rows = self.trace.iterations
        assert rows is not None
        steps = [step for step in requests_by_step(self.trace) if step.turns is not None]
        whole, uncached = (float(sum(tokens.sum() for tokens in each)) for each in (
            [step.prompts for step in steps], [step.uncached for step in steps]
        ))  # fmt: skip
        prefilled = float(rows.loc[rows["rl_step"].isin([step.rl_step for step in steps]), "prefill_tokens"].sum())
        return "kept" if abs(prefilled - uncached) <= abs(prefilled - whole) else "recomputed"

    def _fitted(self, candidates: list[int], policy: Policy, step: int) -> tuple[Trace, Calibration]:
        """The nearest candidates and a calibration on them; as many more as it takes to see what the policy needs."""
        speculates = any(s.speculates for s in policy.strategies)
        for size in range(min(self.window, len(candidates)), len(candidates) + 1):
            trace = self.trace.select(nearest(candidates, step, size))
            fitted = _of_one_shape(calibrate(trace).without_noise(), trace, policy)
            if not speculates or (fitted.acceptance is not None and fitted.costs.per_token_s is not None):
                return trace, self._as_remembered(fitted, trace, policy, step)
        raise ConfigError(
            f"RL step {step} speculates, and too little in the other steps does: what it costs is not known"
        )

    def _as_remembered(self, fitted: Calibration, trace: Trace, policy: Policy, step: int) -> Calibration:
        """The same, with acceptance of drafters that remember earlier RL steps as where prompts were as new to them.

        Strategies that none of those RL steps drafted are fitted to all.
        """
        specs = DEFAULT_DRAFTERS | policy.drafters
        remember = [name for name, spec in specs.items() if isinstance(spec, SuffixSpec) and spec.remembers]
        rows, epochs = trace.iterations, self.trace.workload.groupby("rl_step")["epoch"].median() > 0
        assert rows is not None
        alike, mine = rows["rl_step"].map(epochs) == epochs[step], rows["drafter"].isin(remember)
        drafted = pd.MultiIndex.from_frame(rows[["drafter", "draft_depth", "tokens_to_verify"]])
        unlike = mine & ~alike & drafted.isin(drafted[mine & alike])
        return replace(fitted, acceptance=fit_acceptance(rows[~unlike], trace.drafters)[0]) if unlike.any() else fitted

    def _simulate(
        self,
        trace: Trace,
        force: InForce,
        fitted: Calibration,
        accepted: MeasuredAcceptance | FreshAcceptance | None,
        sample: int,
    ) -> SimulatedRollout:
        """The last RL step of `trace`, after those before it."""
        states, last = self.drafters.by_step, trace.rl_steps[-1]
        scenario = Scenario.of(
            trace,
            costs=fitted.costs.model_copy(update={"max_num_seqs": self.most_requests}),
            acceptance=accepted,
            placement="recorded",
            prefix=self.prefix,
            mode="sampled",
            seed=self.seed + sample,
        )
        entropy = [[force.seed, worker, force.since] for worker in range(scenario.workers)]
        # A learning policy's past counts as drafted by today's drafter where it is not told by which.
        drafter = [states.get(step, states[last]) for step in trace.rl_steps] if last in states else None
        return scenario.rollouts(force.policy, entropy=entropy, drafter=drafter)[-1]

    def _forecast(self, force: InForce, step: int) -> tuple[float, float, float]:
        """Median and interval of the rollout time as it looks before the step, nan where history is too short."""
        trace, unknown = self.trace, (float("nan"),) * 3
        earlier = [s for s in trace.rl_steps if s < step]
        if len(earlier) < 2:
            return unknown
        try:
            history, fitted = self._fitted(earlier, force.policy, step)
        except ConfigError:
            return unknown
        fit_on = history.rl_steps
        beside_s = overhead_s(trace, fit_on)
        rng = np.random.default_rng([self.seed, step])
        drawn = islice(drawn_lengths(trace.select([step]), history, rng), FORECASTS)
        accepted = self.drafters.acceptance(fitted.acceptance, step, fit_on, earlier)
        # As if the policy was set at this step: a forecast does not replay what it learned before.
        afresh = replace(force, since=step)
        makespans = [self._simulate(draw, afresh, fitted, accepted, k).makespan_s for k, draw in enumerate(drawn)]
        low, high = np.percentile(makespans, INTERVAL)
        return float(np.median(makespans)) + beside_s, float(low) + beside_s, float(high) + beside_s


def _speed(plain: pd.DataFrame, fit_on: Trace, fitted: Calibration) -> float:
    """How many times as long plain iterations took as those of the fit, both over what the costs say.

    Medians, by which a few that were interrupted do not count; the fit's own ratio takes out what its costs are off by.
    """
    assert fit_on.iterations is not None
    ratio = float((plain["duration"] / plain["predicted"]).median())
    rows = fit_on.iterations
    like = (rows["draft_depth"] == 0) & (rows["prefill_tokens"] == 0)
    if like.sum() < FEWEST_PLAIN:
        return ratio
    return ratio / float((rows["duration"] / iteration_times(fitted.costs, fit_on))[like].median())


def _of_one_shape(fitted: Calibration, trace: Trace, policy: Policy) -> Calibration:
    """The same where every draft of the data and of the policy has one shape: what its tokens cost is in other terms
    then, and nothing else is asked of these costs."""
    assert trace.iterations is not None
    drafts = trace.iterations.loc[trace.iterations["draft_depth"] > 0, ["draft_depth", "top_k", "tokens_to_verify"]]
    shapes = set(drafts.itertuples(index=False, name=None))
    policy_shapes = {(s.draft_depth, s.top_k, s.tokens_to_verify) for s in policy.strategies if s.speculates}
    if fitted.costs.per_token_s is not None or len(shapes) != 1 or shapes != policy_shapes:
        return fitted
    inside = {"per_token_s": 0.0, "sd_base_s": fitted.costs.sd_base_s or 0.0}
    return replace(fitted, costs=fitted.costs.model_copy(update=inside))


def overhead_s(trace: Trace, rl_steps: list[int]) -> float:
    """Seconds of a rollout beside its busiest worker's iterations: calls, starts, collecting responses."""
    assert trace.iterations is not None
    iterations = trace.iterations
    if (trace.outcomes["turn"] > 0).any():
        # Between its iterations a worker waits for tools, which a simulation of turns has too.
        ends = iterations.assign(end=iterations["t_start"] + iterations["duration"]).groupby(["rl_step", "worker"])
        busiest = (ends["end"].max() - ends["t_start"].min()).groupby("rl_step").max()
    else:
        busiest = iterations.groupby(["rl_step", "worker"])["duration"].sum().groupby("rl_step").max()
    beside = pd.Series(metrics.rollout_s(trace.select(rl_steps)), dtype=np.float64) - busiest
    return float(beside.loc[rl_steps].median())


def tools_as_engines_saw(trace: Trace) -> Trace:
    """The trace with `tool_s` from the end of a turn's last iteration until its engine could go on with the next turn.

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
        # Turns of one iteration end together, and are told one after the other.
        last = np.searchsorted(ends, turns["left_s"] + _ROUNDING_S, "right") - 1
        first = np.searchsorted(starts, turns["t_submit"] - _ROUNDING_S)
        valid = (last >= 0) & (first > last) & (first < len(starts))
        last, first, turns = last[valid], first[valid], turns[valid]
        idle = starts[first] - ends[first - 1] > _ROUNDING_S
        tool_s[turns.index] = np.where(idle, starts[first], turns["t_submit"]) - ends[last]
    return trace.replace(outcomes=outcomes.assign(tool_s=tool_s))


def drawn_lengths(step: Trace, history: Trace, rng: np.random.Generator) -> Iterator[Trace]:
    """The step again and again, with response lengths of whole groups drawn from history, each cut at its cap."""
    groups = [group.to_numpy() for _, group in history.outcomes.groupby(["rl_step", "prompt_id"])["response_tokens"]]
    rows = step.outcomes[[*KEY, "worker", "tool_s"]]
    of = rows.groupby("prompt_id", sort=False).ngroup().to_numpy()
    places = [np.flatnonzero(of == group) for group in np.unique(of)]
    caps = step.workload.merge(rows[list(KEY)], how="right", on=list(KEY))["max_response_tokens"].to_numpy()
    while True:
        drawn = np.empty(len(rows), np.int64)
        for place in places:
            drawn[place] = rng.choice(groups[rng.integers(len(groups))], size=len(place), replace=True)
        outcomes = rows.assign(
            response_tokens=np.clip(drawn, 1, caps), finish_reason=np.where(drawn >= caps, "length", "stop")
        )
        yield Trace.from_tables(step.manifest, {"workload": step.workload, "outcomes": outcomes})


def text(verification: Verification) -> str:
    """The table for people."""
    rows = []
    for row in verification.rows.to_dict("records"):
        ahead = f"{row['forecast_s']:.2f}", f"{row['forecast_low_s']:.2f}-{row['forecast_high_s']:.2f}"
        rows.append((
            row["rl_step"], row["policy"], f"{row['measured_s']:.2f}", f"{row['predicted_s']:.2f}",
            f"{row['error']:+.1%}", f"{row['step_time_ratio']:.2f}x", *(() if np.isnan(row["forecast_s"]) else ahead),
        ))  # fmt: skip
    columns = ["step", "policy", "measured s", "predicted s", "error", "step time", "forecast s", "10-90 %"]
    lines = [table(columns, rows, left=2)]
    v, repeated = verification, "no rollout was run twice"
    if v.repeat_spread is not None:
        repeated = (
            f"a second run of the same rollout takes {v.repeat_bias:+.1%} of the first's time, give or take "
            f"{v.repeat_spread:.1%}"
        )
    lines += [
        "",
        f"rollout time on steps not fitted on: median error {v.median_error:.1%}, worst {v.worst_error:.1%}",
        f"{repeated}; goal {v.goal:.1%}: {'met' if v.median_error <= v.goal else 'MISSED'}",
        f"with the machine's speed of each step known: median error {v.median_error_at_step_time:.1%}",
    ]
    if v.scaled_median_error is not None:
        assert v.scaled_worst_error is not None
        assert v.scaled_raw_median_error is not None
        lines.append(
            f"scaled by the speed of each step's own plain iterations ({v.scaled_steps} of {len(v.rows)} steps have "
            f"{FEWEST_PLAIN}): median error {v.scaled_median_error:.1%}, worst {v.scaled_worst_error:.1%}, unscaled "
            f"{v.scaled_raw_median_error:.1%}"
        )
    if v.forecast_median_error is not None:
        lines.append(
            f"forecast from earlier steps alone, lengths drawn from theirs: median error "
            f"{v.forecast_median_error:.1%}; {v.forecast_coverage:.0%} within their 10-90 % interval"
        )
    return "\n".join(lines)
