"""Fits a cost model of any kind to a recorded trace or to a table of measured iterations, cross-validated.

Folds leave out runs of RL steps of a trace, or batch sizes of a table. A fold that the rest of the data cannot predict,
such as speculation where nothing else speculates, has no error, and a note names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from tltlab.arrays import Flags, Floats
from tltlab.costs import linear, roofline, table
from tltlab.costs.base import CostModel
from tltlab.costs.evidence import Evidence
from tltlab.costs.noise import IterationNoise, fit_noise
from tltlab.costs.roofline import Hardware
from tltlab.costs.samples import Fit, Fitted, Iterations
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.traces.trace import Trace

from .cross_validation import (
    MOST_FOLDS,
    Fold,
    cross_validated,
    error_bound_90,
    error_quantiles,
    held_out_errors,
    step_folds,
)
from .iterations import iterations_of, measured_rows, recorded_rows
from .residuals import coverage, residuals, row_sums, worker_sums

KINDS = ("linear", "roofline", "table")


@frozen
class CostFit:
    """A cost model, `costs.calibrated` and `costs.notes` included, and how well it holds.

    `residuals` has a row per regime: `regime`, `num_iterations`, `mean_abs_relative_error` of single iterations and the
    `bias` of their sum. `sums` has a row per RL step and worker (none for a table), which is what a rollout time is
    made of: measured and predicted seconds.
    `cross_validation` has a row per fold and one overall, as in `held_out_errors`; empty without folds.
    """

    kind: str
    costs: CostModel
    residuals: pd.DataFrame
    sums: pd.DataFrame
    cross_validation: pd.DataFrame

    @property
    def held_out_error(self) -> float | None:
        """Mean absolute relative error of single iterations that the fit had not seen, None where not known."""
        if self.cross_validation.empty:
            return None
        overall = float(self.cross_validation["mean_abs_relative_error"].iloc[-1])
        return None if np.isnan(overall) else overall


def fit_of(kind: str, hardware: Hardware | None, *, recorded: bool) -> Fit:
    """The fit to recorded iterations or to a table; ConfigError for a kind that is unknown or lacks hardware.

    `hardware` is needed for kind "roofline", and gives a table of measured iterations its shape between the knots.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of costs {kind!r}: there are {', '.join(KINDS)}")
    if kind == "roofline":
        if hardware is None:
            raise ConfigError("a roofline needs GPU, model and tp, for example --gpu H100 --model Qwen2.5-32B --tp 4")
        return partial(roofline.fit, hardware=hardware, recorded=recorded)
    if hardware is not None and (kind == "linear" or recorded):
        subject = "linear costs" if kind == "linear" else "a table of a trace"
        raise ConfigError(f"{subject} have no use for GPU, model and tp: leave these out, or take --kind roofline")
    if kind == "linear":
        return partial(linear.fit, recorded=recorded)
    return partial(table.fit, hardware=hardware, recorded=recorded)


def fit_trace(
    trace: Trace, kind: str = "linear", hardware: Hardware | None = None, *, most_folds: int = MOST_FOLDS
) -> CostFit:
    """Fit costs to `trace.iterations`; fewer than two folds, or one RL step: no cross-validation.

    The costs' `noise` is of iterations without prefill. `hardware` is for kind "roofline". Raises
    ConfigError for a trace without iterations and for an unknown kind.
    """
    iterations = iterations_of(trace)
    rows = recorded_rows(iterations, trace.steps, trace.drafters)
    fit = fit_of(kind, hardware, recorded=True)
    fitted = fit(rows)
    notes = coverage(iterations, trace.steps)
    parts = step_folds(sorted(iterations["rl_step"].unique().tolist()), most_folds)
    held_out = _held_out(fit, rows, {name: np.isin(rows.rl_step, steps) for name, steps in parts.items()}, notes)
    predicted = _with_prediction(held_out)
    errors = worker_sums(predicted, predicted["measured_s"].to_numpy(), predicted["predicted_s"].to_numpy())["bias"]
    engine = trace.manifest.name or (trace.path.name if trace.path else "this trace")
    update = {
        "notes": (*fitted.costs.notes, *notes),
        "noise": _noise(iterations, fitted.predicted_s),
        "evidence": _evidence(engine, rows, fitted, "RL steps", errors),
    }
    return _fitted(kind, rows, fitted, update, row_sums(rows, fitted.predicted_s), held_out)


def fit_points(points: pd.DataFrame, kind: str = "linear", hardware: Hardware | None = None) -> CostFit:
    """Fit costs to a table that `iterations.checked` has seen; each batch size is left out in turn.

    Raises ConfigError for data that do not identify the terms of the kind.
    """
    rows = measured_rows(points)
    fit = fit_of(kind, hardware, recorded=False)
    fitted = fit(rows)
    notes: list[str] = []
    batches = np.unique(rows.batch)
    held_out = pd.DataFrame()
    # A table of a single batch size predicts no other.
    if len(batches) < (3 if kind == "table" else 2):
        sizes = "one batch size" if len(batches) == 1 else "two batch sizes"
        notes.append(f"{sizes} only: nothing to leave out, so there is no cross-validation")
    else:
        masks = {f"batch {batch:g}": rows.batch == batch for batch in batches}
        held_out = _held_out(fit, rows, masks, notes).drop(columns=["rl_step", "worker"])
    predicted = _with_prediction(held_out)
    errors = predicted["predicted_s"] / predicted["measured_s"] - 1.0
    evidence = _evidence("this table", rows, fitted, "batch", errors)
    update = {"notes": (*fitted.costs.notes, *notes), "evidence": evidence}
    sums = pd.DataFrame(columns=["rl_step", "worker", "measured_s", "predicted_s", "bias"])
    return _fitted(kind, rows, fitted, update, sums, held_out)


def _fitted(
    kind: str, rows: Iterations, fitted: Fitted, update: dict[str, Any], sums: pd.DataFrame,
    held_out: pd.DataFrame,
) -> CostFit:  # fmt: skip
    costs = fitted.costs.model_copy(update=update)
    within = residuals(rows.regime, rows.batch, rows.seconds, fitted.predicted_s)
    return CostFit(kind=kind, costs=costs, residuals=within, sums=sums, cross_validation=held_out_errors(held_out))


def _with_prediction(held_out: pd.DataFrame) -> pd.DataFrame:
    """Left-out rows that the rest of the data could predict."""
    columns = ["rl_step", "worker", "measured_s", "predicted_s"]
    return held_out.reindex(columns=columns).dropna(subset=["predicted_s"])


def _evidence(engine: str, rows: Iterations, fit: Fitted, fold: str, errors: pd.Series[float]) -> Evidence:
    """Evidence for a fit to these rows: errors, as shares, of the parts left out of it, or inside it without any."""
    depth, fitted, parameter = rows.depth[rows.spec], {}, {}
    if fit.open is not None:
        parameter = {"all": error_bound_90(fit.open)}
        if errors.empty:
            fitted = {"all": error_quantiles(fit.predicted_s / rows.seconds - 1.0)}
    return Evidence(
        engine=engine,
        speculation=bool(len(depth)),
        left_out={} if errors.empty else {fold: error_quantiles(errors)},
        fitted=fitted,
        parameter=parameter,
        draft_depth=(float(depth.min()), float(depth.max())) if len(depth) else None,
    )


def _noise(table: pd.DataFrame, predicted: Floats) -> IterationNoise | None:
    rows = table.assign(predicted=predicted, series=table.groupby(["rl_step", "worker"]).ngroup())
    rows = rows[rows["prefill_tokens"] == 0].sort_values(["series", "iteration"], kind="stable")
    return fit_noise(rows["duration"], rows["predicted"], rows["series"])


def _held_out(fit: Fit, rows: Iterations, parts: Mapping[str, Flags], notes: list[str]) -> pd.DataFrame:
    """Rows for `held_out_errors`; NaN where the rest cannot predict a part, with the reason in `notes`."""
    folds = (Fold(name, rows.where(~out), rows.where(out)) for name, out in parts.items())
    tables = []
    for fold, predicted in cross_validated(lambda train: fit(train).costs.predict, folds):
        if isinstance(predicted, ConfigError):
            notes.append(f"{fold.name} left out: not predicted, {predicted}")
            predicted = np.full(len(fold.test), np.nan)
        columns = {"rl_step": fold.test.rl_step, "worker": fold.test.worker, "measured_s": fold.test.seconds}
        tables.append(pd.DataFrame(columns | {"fold": fold.name, "predicted_s": predicted}))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
