"""Fits a cost model of any kind to a recorded trace or to a table of measured iterations, cross-validated.

Of a trace runs of RL steps are left out in turn, of a table batch sizes. What the rest of the data cannot predict, such
as speculation where nothing else speculates, has no error, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.costs.base import CostModel
from tltlab.costs.noise import IterationNoise, fit_noise
from tltlab.errors import ConfigError
from tltlab.traces.trace import Trace

from .estimators import Data, Hardware, Way, iterations_of, table_of_points, way_of_points, way_of_trace
from .residuals import MOST_FOLDS, coverage, folds, held_out_errors, regimes, residuals, worker_sums


@dataclass(frozen=True, kw_only=True)
class CostFit:
    """A cost model, `costs.calibrated` and `costs.notes` included, and how well it holds.

    `residuals` has a row per regime: `regime`, `num_iterations`, `mean_abs_relative_error` of single iterations and the
    `bias` of their sum. `sums` has a row per RL step and worker (none for a table): measured and predicted seconds.
    `cross_validation` has a row per fold and one overall, as `residuals.held_out_errors` says; empty without folds.
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


def fit_trace(
    trace: Trace, kind: str = "linear", hardware: Hardware | None = None, *, most_folds: int = MOST_FOLDS
) -> CostFit:
    """Fit costs to `trace.iterations`; fewer than two folds, or one RL step: no cross-validation.

    The costs' `noise` is that of iterations which prefilled nothing. `hardware` is for kind "roofline". Raises
    ConfigError for a trace without iterations and for an unknown kind.
    """
    table = iterations_of(trace)
    way = way_of_trace(kind, hardware)
    costs = way.fit(trace)
    predicted = way.predict(costs, trace)
    duration = table["duration"].to_numpy(np.float64)
    regime = regimes(table["prefill_tokens"].to_numpy(np.float64), table["draft_depth"].to_numpy() > 0)
    notes = coverage(table, trace.steps)
    parts = folds(sorted(table["rl_step"].unique().tolist()), most_folds)
    held = []
    for name, steps in parts.items():
        out = trace.select(steps)
        rest = trace.select([s for s in trace.rl_steps if s not in steps])
        rows = iterations_of(out)
        found = rows[["rl_step", "worker"]].assign(fold=name, measured_s=rows["duration"])
        held.append(found.assign(predicted_s=_left_out(way, name, rest, out, len(rows), notes)))
    return CostFit(
        kind=kind,
        costs=_with_notes(costs, notes).model_copy(update={"noise": _noise(table, predicted)}),
        residuals=residuals(regime, table["batch"].to_numpy(np.float64), duration, predicted),
        sums=worker_sums(table, duration, predicted),
        cross_validation=held_out_errors(pd.concat(held, ignore_index=True) if held else pd.DataFrame()),
    )


def fit_points(points: pd.DataFrame, kind: str = "linear", hardware: Hardware | None = None) -> CostFit:
    """Fit costs to a table that `calibration.measurements.steps` has checked; each batch size is left out in turn.

    `hardware` is needed for kind "roofline", and gives a table the roofline's shape between its knots. Raises
    ConfigError for data that cannot tell what the kind needs.
    """
    way = way_of_points(kind, hardware)
    costs = way.fit(points)
    predicted = way.predict(costs, points)
    notes: list[str] = []
    batches = np.unique(points["batch"])
    held = []
    if len(batches) < 2:
        notes.append("one batch size only: nothing to leave out, so there is no cross-validation")
    elif kind == "table":
        held.append(_held_out_by_table(points, hardware, notes))
    else:
        for batch in batches:
            out = points["batch"] == batch
            name = f"batch {batch:g}"
            rows = points.loc[out, ["seconds"]].rename(columns={"seconds": "measured_s"}).assign(fold=name)
            rest, left = (points[m].reset_index(drop=True) for m in (~out, out))
            held.append(rows.assign(predicted_s=_left_out(way, name, rest, left, len(rows), notes)))
    prefill, depth, verify = (
        points[c].to_numpy(np.float64) for c in ("prefill_tokens", "draft_depth", "tokens_to_verify")
    )
    return CostFit(
        kind=kind,
        costs=_with_notes(costs, notes),
        residuals=residuals(
            regimes(prefill, (depth > 0) | (verify > 1)),
            points["batch"].to_numpy(np.float64),
            points["seconds"].to_numpy(np.float64),
            predicted,
        ),
        sums=pd.DataFrame(columns=["rl_step", "worker", "measured_s", "predicted_s", "bias"]),
        cross_validation=held_out_errors(pd.concat(held, ignore_index=True) if held else pd.DataFrame()),
    )


def _noise(table: pd.DataFrame, predicted: Floats) -> IterationNoise | None:
    rows = table.assign(predicted=predicted, series=table.groupby(["rl_step", "worker"]).ngroup())
    rows = rows[rows["prefill_tokens"] == 0].sort_values(["series", "iteration"], kind="stable")
    return fit_noise(rows["duration"], rows["predicted"], rows["series"])


def _left_out(way: Way[Data], fold: str, rest: Data, out: Data, num: int, notes: list[str]) -> Floats:
    try:
        return way.predict_unseen(way.fit(rest), out)
    except ConfigError as error:
        notes.append(f"{fold} left out: not predicted, {error}")
        return np.full(num, np.nan)


def _held_out_by_table(points: pd.DataFrame, hardware: Hardware | None, notes: list[str]) -> pd.DataFrame:
    """`from_measurements` leaves each batch out itself."""
    rows = table_of_points(points, hardware)[1]
    if rows["held_out_error"].isna().all():
        notes.append("two batch sizes only: a table without one of them says nothing, so there is no cross-validation")
        return pd.DataFrame()
    if len(rows) < len(points):
        notes.append(f"{len(points) - len(rows)} rows with prefill are not cross-validated")
    fold = "batch " + rows["batch"].map("{:g}".format)
    predicted = rows["seconds"] * (1.0 + rows["held_out_error"])
    return pd.DataFrame({"fold": fold, "measured_s": rows["seconds"], "predicted_s": predicted})


def _with_notes(costs: CostModel, notes: Sequence[str]) -> CostModel:
    return costs.model_copy(update={"notes": (*costs.notes, *notes)})
