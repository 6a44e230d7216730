"""Fits a cost model of any kind to a recorded trace or to a table of measured iterations, cross-validated.

Folds leave out runs of RL steps of a trace, or batch sizes of a table. A fold that the rest of the data cannot predict,
such as speculation where nothing else speculates, has no error, and a note names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from tltlab.arrays import Flags, Floats
from tltlab.costs import linear, table
from tltlab.costs.base import CostModel, Fit, Waiting
from tltlab.costs.evidence import Evidence
from tltlab.costs.noise import IterationNoise, fit_noise
from tltlab.costs.roofline import Hardware
from tltlab.costs.samples import Iterations, robust_fit
from tltlab.errors import ConfigError
from tltlab.records import Json, frozen
from tltlab.traces.trace import Trace

from .cross_validation import (
    MOST_FOLDS,
    error_quantiles,
    held_out_errors,
    step_folds,
)
from .iterations import iterations_of, measured_rows, measured_waiting, recorded_rows
from .residuals import coverage, residuals, seconds_of, worker_sums

KINDS = ("linear", "table")


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
    """The fit to recorded iterations or to a table; ConfigError for a kind that is unknown, or not for these.

    `hardware` gives a table of measured iterations its shape between the knots.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of costs {kind!r}: there are {', '.join(KINDS)}")
    if kind == "table" and recorded:
        raise ConfigError("a table is made of measured iterations (`tltlab profile`): of a recorded trace take linear")
    if kind == "table":
        return partial(table.fit, hardware=hardware)
    if hardware is not None:
        raise ConfigError("linear costs have no use for GPU, model and tp: leave these out, or take --kind table")
    return partial(linear.fit, recorded=recorded)


def fit_trace(
    trace: Trace, kind: str = "linear", hardware: Hardware | None = None, *, most_folds: int = MOST_FOLDS
) -> CostFit:
    """Fit costs to `trace.iterations`; fewer than two folds, or one RL step: no cross-validation.

    The costs' `noise` is of iterations without prefill. Raises ConfigError for a trace without iterations and for
    another kind than linear.
    """
    iterations = iterations_of(trace)
    rows = recorded_rows(iterations, trace.steps)
    folds = step_folds(sorted(iterations["rl_step"].unique().tolist()), most_folds)
    masks = {name: np.isin(rows.rl_step, steps) for name, steps in folds.items()}
    engine = trace.manifest.name or (trace.path.name if trace.path else "this trace")
    notes = coverage(iterations, trace.steps)
    found, predicted_s = _fitted(kind, hardware, rows, masks, notes, engine=engine, recorded=True)
    update: Json = {"noise": _noise(iterations, predicted_s)}
    if found.costs.waiting is None:
        update["waiting"] = measured_waiting(trace)
    return replace(found, costs=found.costs.model_copy(update=update))


def fit_points(points: pd.DataFrame, kind: str = "linear", hardware: Hardware | None = None) -> CostFit:
    """Fit costs to a table that `iterations.checked` has seen; each batch size is left out in turn.

    Raises ConfigError for data that do not identify the terms of the kind.
    """
    rows, notes = measured_rows(points), []
    masks = {f"batch {batch:g}": rows.batch == batch for batch in np.unique(rows.batch)}
    # A table of a single batch size predicts no other.
    if len(masks) < (3 if kind == "table" else 2):
        sizes = "one batch size" if len(masks) == 1 else "two batch sizes"
        notes.append(f"{sizes} only: nothing to leave out, so there is no cross-validation")
        masks = {}
    return _fitted(kind, hardware, rows, masks, notes, engine="this table", recorded=False)[0]


def _fitted(
    kind: str, hardware: Hardware | None, rows: Iterations, masks: Mapping[str, Flags], notes: list[str], *,
    engine: str, recorded: bool,
) -> tuple[CostFit, Floats]:  # fmt: skip
    """The fit to these rows, each of `masks` left out in turn, and the rows' seconds by it; more `notes` are added."""
    fit = fit_of(kind, hardware, recorded=recorded)
    rows, scheduling = _scheduled_alike(rows, engine)
    costs = fit(rows)
    predicted_s = costs.identified_s(rows)
    held_out = _held_out(fit, rows, masks, notes)
    known = held_out.dropna(subset=["predicted_s"])
    if recorded:
        fold, errors = "RL steps", worker_sums(known)["bias"]
    else:
        fold, errors = "batch", known["predicted_s"] / known["measured_s"] - 1.0
        held_out = held_out.drop(columns=["rl_step", "worker"])
    evidence = _evidence(engine, rows, fold, errors)
    found = CostFit(
        kind=kind,
        costs=costs.model_copy(update={"notes": (*costs.notes, *notes), "evidence": evidence, **scheduling}),
        residuals=residuals(rows, predicted_s),
        sums=worker_sums(seconds_of(rows, predicted_s)[: None if recorded else 0]),
        cross_validation=held_out_errors(held_out),
    )
    return found, predicted_s


def _scheduled_alike(rows: Iterations, source: str) -> tuple[Iterations, Json]:
    """The rows as without waiting for the host, where some of them waited and some did not; fields of the costs."""
    waited, unknown = rows.synchronous == 1.0, np.isnan(rows.synchronous)
    if not waited.any() or not (rows.synchronous == 0.0).any():
        return rows, {"synchronous": None if unknown.any() else bool(waited.any())}
    plain = rows.where((rows.regime == 0) & ~unknown)
    columns = {
        "base_s": np.ones(len(plain)),
        "per_request_s": plain.batch,
        "per_context_s": plain.context,
        "waiting": plain.synchronous,
        "waiting, per request": plain.synchronous * plain.batch,
    }
    found = robust_fit(columns, plain.seconds, plain.group, plain.block).coefficients
    waiting = Waiting(base_s=found["waiting"] or 0.0, per_request_s=found["waiting, per request"] or 0.0, source=source)
    alike = replace(rows, seconds=rows.seconds - waited * waiting.seconds(rows.batch))
    return alike, {"synchronous": False, "waiting": waiting}


def _evidence(engine: str, rows: Iterations, fold: str, errors: pd.Series[float]) -> Evidence:
    """Evidence for a fit to these rows: errors, as shares, of the parts left out of it."""
    depth = rows.depth[rows.spec]
    return Evidence(
        engine=engine,
        speculation=bool(len(depth)),
        left_out={} if errors.empty else {fold: error_quantiles(errors)},
        draft_depth=(float(depth.min()), float(depth.max())) if len(depth) else None,
    )


def _noise(table: pd.DataFrame, predicted: Floats) -> IterationNoise | None:
    rows = table.assign(predicted=predicted, series=table.groupby(["rl_step", "worker"]).ngroup())
    rows = rows[rows["prefill_tokens"] == 0].sort_values(["series", "iteration"], kind="stable")
    return fit_noise(rows["duration"], rows["predicted"], rows["series"])


def _held_out(fit: Fit, rows: Iterations, parts: Mapping[str, Flags], notes: list[str]) -> pd.DataFrame:
    """Rows for `held_out_errors`; NaN where the rest cannot predict a part, with the reason in `notes`."""
    tables = [seconds_of(rows, rows.seconds)[:0].assign(fold="")]
    for name, out in parts.items():
        test = rows.where(out)
        try:
            predicted = fit(rows.where(~out)).predict(test)
        except ConfigError as error:
            notes.append(f"{name} left out: not predicted, {error}")
            predicted = np.full(len(test), np.nan)
        tables.append(seconds_of(test, predicted).assign(fold=name))
    return pd.concat(tables[1:] or tables, ignore_index=True)
