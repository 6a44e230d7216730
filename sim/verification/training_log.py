"""Training logs, which have no iterations: costs that they identify, and later RL steps predicted from earlier ones.

An RL step of a log has lengths (often maximum-entropy ones), the rollout's seconds and perhaps the accept length. With
costs its rollout takes the simulated time, multiplied by one level, and a time outside of iterations:

    rollout_s = level * simulated_s + outside_s

Without, it takes the linear costs of a worker that has its share of the tokens and the longest response, with A tokens
kept per iteration:

    rollout_s = base_s * longest / A + per_request_s * tokens / (workers * A) + outside_s
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.calibration.cross_validation import error_quantiles, held_out_predictions
from tltlab.calibration.logged import LoggedDrafting
from tltlab.calibration.stages import (
    constant,
    fit_terms,
    measured_stages,
    multiples_s,
    rollout_rows,
    rollout_share,
    workloads,
)
from tltlab.costs.base import DRAFTING, CostModel
from tltlab.costs.evidence import LEVEL, CalibratedRange, Evidence, interval
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.scaled import ScaledCosts
from tltlab.errors import ConfigError
from tltlab.records import Json, frozen
from tltlab.sim.config import SimulationConfig
from tltlab.sim.study.jobs import side_by_side
from tltlab.sim.study.logged import LoggedRun
from tltlab.sim.study.sample import Scenarios
from tltlab.traces.trace import Trace

from .errors import Errors

Terms = Sequence[Sequence[str]]
LINEAR_TERMS: Terms = (("base_s",), ("base_s", "per_request_s"), ("base_s", "per_request_s", "outside_s"))
LEVEL_TERMS: Terms = (("level",), ("level", "outside_s"))
BESIDE_TERMS = (("base_s",), ("base_s", "per_token_s"))
"""Terms of the time outside a rollout: a constant and, where it lowers the left-out error, a time per token."""
PREDICTED = (
    "rl_step", "measured_s", "predicted_s", "error", "low_s", "high_s", "forecast_s", "forecast_low_s",
    "forecast_high_s", "constant_s",
)  # fmt: skip
"""Columns of `LogVerification.rows`."""
WINDOW = 24
FEWEST = 6
"""RL steps from which on a later one is predicted."""


def is_log(trace: Trace) -> bool:
    """True if a trace has rollout times and no iterations, as one of a training log."""
    steps = trace.steps
    return trace.iterations is None and steps is not None and "rollout_s" in steps and trace.manifest.kind == "imported"


@frozen
class StepColumns:
    """Data for the fit of rollout times: a row per RL step with rl_step, measured_s and a column per term."""

    rows: pd.DataFrame
    terms: Terms
    workers: int
    accept_length: pd.Series[float]
    shape: CostModel | None = None
    unit: str = "rollout"

    @classmethod
    def of(
        cls, trace: Trace, costs: str | None = None, workers: int | None = None, jobs: int | None = 1
    ) -> StepColumns:
        """The RL steps of a trace whose rollouts have a time, or as a whole where none has, as in TRL's logs.

        `jobs` processes (None: one per core) simulate them with `costs`. Raises ConfigError where fewer than three
        have a time.
        """
        steps = trace.steps
        if steps is None or "rollout_s" not in steps:
            raise ConfigError(f"{trace.path or 'the log'}: no rollout times in it, so nothing to fit")
        column, unit = "rollout_s", "rollout"
        if steps[column].isna().all() and "step_s" in steps:
            column, unit = "step_s", "whole RL step"
        timed = steps[steps[column] > 0].set_index("rl_step")
        if len(timed) < 3:
            raise ConfigError(
                f"{trace.path or 'the log'}: {len(timed)} RL steps have their time or that of their rollout "
                "(timing_s/gen, step_time and the like); three are needed"
            )
        accepted = timed["accept_length"] if "accept_length" in timed else pd.Series(np.nan, timed.index)
        accepted = accepted.astype(np.float64).fillna(1.0).clip(lower=1.0)
        rows = pd.DataFrame({"rl_step": timed.index, "measured_s": timed[column].to_numpy(np.float64)})
        rows["outside_s"] = 1.0
        num_workers, terms = workers or trace.manifest.num_workers, LINEAR_TERMS
        shape: CostModel | None = None
        if costs is None:
            lengths = trace.outcomes.groupby("rl_step")["response_tokens"].agg(["max", "sum"]).loc[timed.index]
            iterations = lengths.div(accepted, axis=0)
            rows["base_s"] = iterations["max"].to_numpy()
            rows["per_request_s"] = iterations["sum"].to_numpy() / (num_workers or 1)
        else:
            if num_workers is None:
                raise ConfigError("the log does not have the number of its engines: give --workers")
            shape, terms = load_costs(costs), LEVEL_TERMS
            if isinstance(shape, ScaledCosts):
                raise ConfigError(f"{costs} were fitted to a log themselves: name what they were made of")
            scenarios = Scenarios(trace, SimulationConfig(costs=shape, workers=num_workers))
            run = LoggedRun(scenarios=scenarios, stages=None, drafting=LoggedDrafting.of(trace))
            rows["level"] = run.seconds(timed.index.tolist(), jobs)
        return cls(rows=rows, terms=terms, workers=num_workers or 1, accept_length=accepted, shape=shape, unit=unit)


@dataclass(frozen=True, kw_only=True)
class LogFit(Errors):
    """Fit of a log: costs, the `terms` they are made of, and relative errors of RL steps left out.

    `accept_length` is the mean over RL steps that log it, `accept_spread` their standard deviation (None: not logged).
    """

    costs: LinearCosts | ScaledCosts
    terms: dict[str, float]
    constant_error: float
    accept_length: float | None
    accept_spread: float | None
    notes: tuple[str, ...]
    unit: str = "rollout"

    def json(self) -> Json:
        """The keys of `log` in `tltlab calibrate --json`."""
        names = ("terms", "constant_error", "outside_share", "accept_length", "accept_spread")
        return super().json() | {name: getattr(self, name) for name in names}

    @property
    def outside_share(self) -> float:
        """Share of the median rollout outside of iterations."""
        return self.costs.outside_s / float(self.rows["measured_s"].median())

    def text(self, lists: Mapping[str, Sequence[str]] = {}) -> str:
        """The same for people; RL steps are in the JSON."""
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.terms.items())
        drafts = "" if self.accept_length is None else f"; accept length {self.accept_length:.2f}"
        return (
            f"{terms}\n{self.unit} of {len(self.rows)} RL steps, each left out: median error {self.median_error:.1%}, "
            f"worst {self.worst_error:.1%}; by the others' median {self.constant_error:.1%}\noutside of iterations: "
            f"{self.costs.outside_s:.3g} s, {self.outside_share:.0%} of a {self.unit}{drafts}"
        )


def fit_log(trace: Trace, costs: str | None = None, workers: int | None = None) -> LogFit:
    """Fit what the rollout times of a log identify; `costs` (a preset, a profile, a file) give the shape."""
    columns = StepColumns.of(trace, costs, workers)
    found, held_out = fit_terms(columns.terms, columns.rows)
    terms = {name: found.get(name, 0.0) for name in columns.terms[-1]}
    rows = columns.rows[["rl_step", "measured_s"]].assign(predicted_s=held_out)
    error = _errors(rows, held_out)
    notes = [f"fitted to the {columns.unit} times of {len(rows)} RL steps; lengths within an RL step are as logged"]
    if columns.unit != "rollout":
        notes.append("no rollout has a separate time in this log: the terms include training")
    constant_error = float(np.median(np.abs(_errors(rows, held_out_predictions(constant, columns.rows)))))
    if constant_error <= float(np.median(np.abs(error))):
        notes.append("the other RL steps' median predicts as well: the lengths in this log do not explain the times")
    if missing := [name for name in columns.terms[-1] if name not in found]:
        notes.append(f"not separately identified by these RL steps, written 0: {', '.join(missing)}")
    speculated = columns.accept_length > 1.0
    if speculated.any():
        notes.append(
            "how deep was drafted is not in the log: drafting is in the other terms, for drafts like the log's"
        )
    notes.append("acceptance of single requests is not in the log: what is known is the spread between RL steps")
    evidence = Evidence(
        engine=trace.manifest.name or "this log",
        speculation=bool(speculated.any()),
        left_out={"RL steps": error_quantiles(error)},
    )
    if columns.shape is None and trace.manifest.num_workers is None and workers is None:
        notes.append("the number of engines is not logged: one is taken, give --workers")
    origin = {"evidence": evidence, "notes": tuple(notes)}
    fitted: LinearCosts | ScaledCosts
    if columns.shape is None:
        batch = math.ceil(trace.outcomes.groupby("rl_step").size().max() / columns.workers)
        coefficients: Json = {"per_context_s": 0.0, "prefill_per_token_s": 0.0}
        if speculated.any():
            coefficients |= dict.fromkeys(DRAFTING, 0.0)
        coefficients |= terms | origin | {"calibrated": CalibratedRange(batch=(1.0, float(batch)))}
        fitted = LinearCosts(**coefficients)
    else:
        level, switch_s = terms["level"], columns.shape.switch_s * terms["level"]
        fitted = ScaledCosts.wrapping(
            columns.shape, level=level, switch_s=switch_s, outside_s=terms["outside_s"], noise=None, **origin
        )
    accepted = columns.accept_length[speculated]
    return LogFit(
        costs=fitted,
        terms=terms,
        rows=rows.assign(error=error),
        constant_error=constant_error,
        accept_length=float(accepted.mean()) if len(accepted) else None,
        accept_spread=float(accepted.std(ddof=0)) if len(accepted) else None,
        notes=tuple(notes),
        unit=columns.unit,
    )


@dataclass(frozen=True, kw_only=True)
class LogVerification(Errors):
    """Later RL steps of a log from earlier ones; None of a figure where no RL step was predicted.

    Columns of `rows`: `rl_step`, `measured_s`, `predicted_s` from the earlier steps' times and this one's lengths, its
    `error`, its 90 % interval `low_s` to `high_s`, the same without knowing its lengths (`forecast_s`,
    `forecast_low_s`, `forecast_high_s`), and `constant_s`, the median of the earlier ones. `whole` has the first four
    columns of whole RL steps, empty where the log does not time them; `share` is the rollout's of the RL step, None
    where that is not known.
    """

    columns = (
        "step: {rl_step}; measured s: {measured_s:.2f}; predicted s: {predicted_s:.2f}; error: {error:+.1%}; "
        "90 %: {low_s:.2f}-{high_s:.2f}; forecast s: {forecast_s:.2f}; "
        "90 % ahead: {forecast_low_s:.2f}-{forecast_high_s:.2f}"
    )
    sentences = (
        "{coverage:.0%} within their 90 % interval; by the earlier ones' median {constant_median_error:.1%}",
        "forecast without their lengths: median error {forecast_median_error:.1%}, {forecast_coverage:.0%} within "
        "their 90 % interval",
        "whole RL steps from earlier ones: mean error {step[mean_error]:.1%}, worst {step[worst_error]:.1%}",
        "the rollout is {rollout_share:.0%} of the RL step",
    )
    advice = (
        "--costs PRESET --workers N takes the shape of measured costs; a recording, which has iterations, is surer",
        "tltlab what-if LOG",
    )

    whole: pd.DataFrame
    share: float | None
    unit: str = "rollout"

    def json(self) -> Json:
        """The keys of `tltlab verify --json` for a log."""
        rows = self.rows

        def median_error(name: str) -> float:
            return float((rows[name] / rows["measured_s"] - 1).abs().median())

        def covered(name: str) -> float:
            return float(rows["measured_s"].between(rows[f"{name}low_s"], rows[f"{name}high_s"]).mean())

        return self.judged(
            super().json()
            | {
                "coverage": covered(""),
                "forecast_median_error": median_error("forecast_s"),
                "forecast_coverage": covered("forecast_"),
                "constant_median_error": median_error("constant_s"),
                "rollout": _mean_error(rows if self.unit == "rollout" else rows[:0]),
                "step": _mean_error(self.whole),
                "rollout_share": self.share,
                "whole_steps": json.loads(self.whole.to_json(orient="records")),
            }
        )


def verify_log(
    trace: Trace,
    *,
    costs: str | None = None,
    workers: int | None = None,
    window: int = WINDOW,
    jobs: int | None = 1,
) -> LogVerification:
    """Predict each RL step from the `window` before it, from the seventh on. Raises ConfigError where there are fewer.

    Intervals are conformal: of the errors of the fit on its own RL steps, each left out, and of the last predictions.
    `jobs` processes (None: one per core) share the fits.
    """
    LoggedDrafting.of(trace)  # Refuses accept lengths without a draft depth.
    columns = StepColumns.of(trace, costs, workers, jobs)
    rows = _from_earlier(columns.rows, columns.terms, window, jobs)
    if rows.empty:
        raise ConfigError(f"{len(columns.rows)} RL steps with a rollout time are too few: {FEWEST + 1} are needed")
    assert trace.steps is not None
    stages = measured_stages(trace.steps)
    share = None if (found := rollout_share(stages)) is None else found.estimate
    whole = rows if columns.unit != "rollout" else _whole_steps(trace, stages, rows, window)
    whole = whole[["rl_step", "measured_s", "predicted_s", "error"]]
    return LogVerification(rows=rows, whole=whole, share=share, unit=columns.unit)


def _from_earlier(rows: pd.DataFrame, choices: Terms, window: int, jobs: int | None = 1) -> pd.DataFrame:
    """Return the rows of `LogVerification`: each of these RL steps from fits to the `window` before it."""
    places = range(FEWEST, len(rows))
    histories = [rows.iloc[max(0, at - window) : at] for at in places]
    fits = side_by_side([partial(fit_terms, choices, earlier) for earlier in histories], jobs=jobs)
    predictions: list[dict[str, float]] = []
    for at, earlier, (found, held_out) in zip(places, histories, fits, strict=True):
        current = rows.iloc[[at]]
        past = [row["error"] for row in predictions[-window:]]
        _, most = error_quantiles(np.concatenate([_errors(earlier, held_out), past]))
        measured_s, predicted_s = float(current["measured_s"].iloc[0]), float(multiples_s(found, current)[0])
        # Lengths like those of the earlier steps: the ends of what they take, and the fit's error beyond.
        like = multiples_s(found, earlier)
        ends = predicted_s, *map(float, np.quantile(like, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        (low_s, high_s), ahead_low, ahead_high = (interval(end, most) or (math.nan, math.nan) for end in ends)
        row = (
            int(current["rl_step"].iloc[0]), measured_s, predicted_s, predicted_s / measured_s - 1, low_s, high_s,
            float(np.median(like)), ahead_low[0], ahead_high[1], float(earlier["measured_s"].median()),
        )  # fmt: skip
        predictions.append(dict(zip(PREDICTED, row, strict=True)))
    return pd.DataFrame(predictions, columns=PREDICTED)


def _whole_steps(trace: Trace, stages: pd.DataFrame, rollouts: pd.DataFrame, window: int) -> pd.DataFrame:
    """Return the RL steps whose rollouts are predicted, with the time outside from fits to earlier ones' tokens.

    Where rollouts continue beside training the RL step as a whole is predicted so.
    """
    assert trace.steps is not None
    rows, part = rollout_rows(stages)
    timed = trace.steps.reindex(columns=["rl_step", "step_s"]).dropna()
    rows = rows[rows.index.isin(timed["rl_step"])]
    works, during = workloads(trace), part == "rollout"
    beside = pd.DataFrame({"rl_step": rows.index, "step_s": rows["step"].to_numpy(np.float64), "base_s": 1.0})
    beside["measured_s"] = (rows["step"] - (rows[part] if during else 0.0)).to_numpy(np.float64)
    beside["per_token_s"] = [float(works[step].num_tokens) for step in rows.index]
    beside = beside[beside["measured_s"] > 0]
    whole = _from_earlier(beside, BESIDE_TERMS, window).merge(rollouts, on="rl_step", suffixes=("", "_of_rollout"))
    whole["measured_s"] = whole["rl_step"].map(beside.set_index("rl_step")["step_s"])
    whole["predicted_s"] += whole["predicted_s_of_rollout"] if during else 0.0
    return whole.assign(error=whole["predicted_s"] / whole["measured_s"] - 1)


def _mean_error(rows: pd.DataFrame) -> dict[str, float] | None:
    if rows.empty:
        return None
    error = rows["error"].abs()
    return {"mean_error": float(error.mean()), "worst_error": float(error.max()), "num_steps": len(rows)}


def _errors(rows: pd.DataFrame, predicted_s: pd.Series[float]) -> Floats:
    """Relative errors of predictions."""
    return np.asarray(predicted_s / rows["measured_s"] - 1, np.float64)
