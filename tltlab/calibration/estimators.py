"""How each kind of cost model is fitted to a trace or a table of measured iterations, and what it says of such data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.calibration.measurements.times import COLUMNS, from_iterations
from tltlab.costs.base import CalibratedRange, CostModel, LinearCosts
from tltlab.costs.roofline import RooflineCosts
from tltlab.costs.table import Roofline
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model
from tltlab.strategy import MODEL_FREE, NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

from . import linear as fit_linear
from . import roofline as fit_roofline
from . import table as fit_table
from .residuals import REGIMES, regimes, worker_sums

KINDS = ("linear", "roofline", "table")
_LEVEL = 0.02
"""Outliers that add less to a rollout than this are left alone."""
_ENOUGH = 400
Data = TypeVar("Data", Trace, pd.DataFrame)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the times were measured on; names as `tltlab.hardware` knows them, else ConfigError."""

    gpu: str
    model: str
    tp: int

    def __post_init__(self) -> None:
        gpu(self.gpu), model(self.model)
        if self.tp < 1:
            raise ConfigError(f"tp counts GPUs, got {self.tp}: it is at least 1")


@dataclass(frozen=True, kw_only=True)
class Way(Generic[Data]):
    """How one kind of costs is fitted to one kind of data, and what it says about such data."""

    fit: Callable[[Data], CostModel]
    predict: Callable[[CostModel, Data], Floats]
    missing: Callable[[CostModel, Data], None] = lambda costs, data: None

    def predict_unseen(self, costs: CostModel, data: Data) -> Floats:
        """`predict` for data that the costs were not fitted to; ConfigError for a term that these lack."""
        self.missing(costs, data)
        return self.predict(costs, data)


def way_of_trace(kind: str, hardware: Hardware | None) -> Way[Trace]:
    """For recorded iterations; ConfigError for a kind that is unknown or lacks its hardware."""
    if kind == "linear":
        _refuse(hardware, "linear costs")
        return Way(
            fit=_linear_of_trace,
            predict=lambda costs, trace: fit_linear.predict(_linear(costs), _trace_rows(trace)),
            missing=lambda costs, trace: _need_terms(_linear(costs), _trace_rows(trace)),
        )
    if kind == "table":
        _refuse(hardware, "a table of a trace")
        return Way(
            fit=lambda trace: fit_table.from_trace(trace).costs,
            predict=lambda costs, trace: fit_table.predict_iterations(costs, iterations_of(trace)),
        )
    known = _needed(kind, hardware)

    def measured(trace: Trace) -> pd.DataFrame:
        source = str(trace.path or "the trace")
        return from_iterations(iterations_of(trace), source, gpu=known.gpu, model=known.model, tp=known.tp)

    return _roofline(known, measured, _thinned, _level_of_rollouts)


def way_of_points(kind: str, hardware: Hardware | None) -> Way[pd.DataFrame]:
    """For a table that `tltlab.calibration.measurements.steps` has checked; ConfigError as `way_of_trace`."""
    if kind == "linear":
        _refuse(hardware, "linear costs")
        return Way(
            fit=_linear_of_points,
            predict=lambda costs, points: fit_linear.predict(_linear(costs), fit_linear.rows_of_points(points)),
            missing=lambda costs, points: _need_terms(_linear(costs), fit_linear.rows_of_points(points)),
        )
    if kind == "table":
        return Way(fit=lambda points: table_of_points(points, hardware)[0], predict=_predict_points)
    known = _needed(kind, hardware)

    def measured(points: pd.DataFrame) -> pd.DataFrame:
        named = points.get("drafter", pd.Series("learned", points.index))
        rows = points.assign(
            kind="iteration",
            source="table",
            gpu=known.gpu,
            model=known.model,
            tp=known.tp,
            context_tokens=points["context_tokens"] / points["batch"],
            draft_levels=points["draft_depth"].where(~named.isin(list(MODEL_FREE)), 0.0),
            measured=points["seconds"],
        )
        return rows.reindex(columns=list(COLUMNS))

    return _roofline(known, measured)


def _roofline(
    known: Hardware,
    measured: Callable[[Data], pd.DataFrame],
    thinned: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows,
    level: Callable[[Data, Floats], float] = lambda data, predicted: 1.0,
) -> Way[Data]:
    """`level` is the factor from typical rows to what a rollout's sum is made of, given predictions of the rows."""

    def fit(data: Data) -> CostModel:
        every = measured(data)
        rows = thinned(every)
        found: fit_roofline.Fitted = fit_roofline.fit(rows)
        times = level(data, fit_roofline.predict(found.constants, every))
        # Constants have bounds, so the level cannot simply multiply them.
        if abs(times - 1.0) > _LEVEL:
            found = fit_roofline.fit(rows.assign(measured=rows["measured"] * times))
            note = f"outliers: typical iterations times {times:.3f} give a typical rollout's time, as these costs do"
            found = replace(found, notes=(*found.notes, note))
        found = replace(found, calibrated=_covered(every))
        if found.constants.sd_base_s is not None:
            # Whatever a loaded drafter takes in plain iterations is in their times, and so in the constants.
            note = "what a loaded drafter costs in plain decoding is inside the other constants: sd_idle_s is written 0"
            constants = found.constants.model_copy(update={"sd_idle_s": 0.0})
            found = replace(found, constants=constants, notes=(*found.notes, note))
        return found.costs(known.gpu, known.model, known.tp)

    def predict(costs: CostModel, data: Data) -> Floats:
        assert isinstance(costs, RooflineCosts)
        return fit_roofline.predict(costs.constants, measured(data))

    return Way(fit=fit, predict=predict)


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """At most `_ENOUGH` rows, evenly spaced, of each regime: a dozen constants need no more."""
    regime = regimes(rows["prefill_tokens"].to_numpy(np.float64), rows["draft_depth"].to_numpy() > 0)
    parts = [np.flatnonzero(regime == one) for one in range(len(REGIMES))]
    kept = [part[:: -(-len(part) // _ENOUGH)] for part in parts if len(part)]
    return rows.iloc[np.sort(np.concatenate(kept))].reset_index(drop=True)


def _covered(rows: pd.DataFrame) -> CalibratedRange:
    spans = {
        "batch": rows["batch"],
        "verified_tokens": rows["batch"] * rows["tokens_to_verify"],
        "context_tokens": rows["batch"] * rows["context_tokens"],
    }
    return CalibratedRange(**{name: (float(x.min()), float(x.max())) for name, x in spans.items()})


def _level_of_rollouts(trace: Trace, predicted: Floats) -> float:
    table = iterations_of(trace)
    sums = worker_sums(table, table["duration"].to_numpy(np.float64), predicted)
    return float((sums["measured_s"] / sums["predicted_s"]).median())


def _linear_of_trace(trace: Trace) -> LinearCosts:
    rows = _trace_rows(trace)
    costs, notes = fit_linear.fit_rows(rows)
    return costs.model_copy(update={"notes": tuple(notes), "calibrated": fit_linear.covered(rows)})


def _linear_of_points(points: pd.DataFrame) -> LinearCosts:
    costs, notes = fit_linear.fit_points(points)
    covered = fit_linear.covered(fit_linear.rows_of_points(points))
    return costs.model_copy(update={"notes": tuple(notes), "calibrated": covered})


def _linear(costs: CostModel) -> LinearCosts:
    assert isinstance(costs, LinearCosts)
    return costs


def _trace_rows(trace: Trace) -> fit_linear.Rows:
    return fit_linear.rows_of(iterations_of(trace), trace.steps)


def _need_terms(costs: LinearCosts, rows: fit_linear.Rows) -> None:
    if rows.spec.any():
        costs.need("sd_base_s")
    if (rows.prefill > 0).any():
        costs.need("prefill_per_token_s")


def table_of_points(points: pd.DataFrame, hardware: Hardware | None) -> tuple[CostModel, pd.DataFrame]:
    """The table, and a row per point without prefill with `held_out_error`.

    Prefill is the median over the rows that have it of the seconds that the rest of the iteration leaves.
    """
    shape = None if hardware is None else Roofline(gpu=hardware.gpu, model=hardware.model, tp=hardware.tp)
    decoding = points[points["prefill_tokens"] == 0]
    found = fit_table.from_measurements(decoding, shape)
    with_prefill = points[points["prefill_tokens"] > 0]
    if with_prefill.empty:
        note = "no iteration prefilled: prefill_per_token_s is null"
        return found.costs.model_copy(update={"notes": (*found.costs.notes, note)}), found.residuals
    left = with_prefill["seconds"] - _predict_points(found.costs, with_prefill.assign(prefill_tokens=0.0))
    each = float(np.median(left / with_prefill["prefill_tokens"]))
    return found.costs.model_copy(update={"prefill_per_token_s": max(each, 0.0)}), found.residuals


def _predict_points(costs: CostModel, points: pd.DataFrame) -> Floats:
    found = np.empty(len(points))
    columns = ["batch", "tokens_to_verify", "context_tokens", "draft_depth", "prefill_tokens"]
    for i, (batch, verify, context, depth, prefill) in enumerate(points[columns].itertuples(index=False)):
        # Of any width: what was verified is given apart.
        strategy = Strategy("any", int(depth), 2, 2) if depth else NO_SPECULATION
        found[i] = costs.iteration(strategy, tokens_to_verify=verify).seconds(int(batch), context)
        found[i] += costs.prefill_s(prefill) if prefill else 0.0
    return found


def iterations_of(trace: Trace) -> pd.DataFrame:
    """The trace's iterations; ConfigError where it has none."""
    table = trace.iterations
    if table is None or table.empty:
        raise ConfigError(f"{trace.path or 'the trace'} has no iterations.parquet to calibrate on: record a run")
    return table


def _needed(kind: str, hardware: Hardware | None) -> Hardware:
    if kind != "roofline":
        raise ConfigError(f"unknown kind of costs {kind!r}: there are {', '.join(KINDS)}")
    if hardware is None:
        raise ConfigError("a roofline needs GPU, model and tp: --gpu H100 --model Qwen2.5-32B --tp 4, say")
    return hardware


def _refuse(hardware: Hardware | None, what: str) -> None:
    if hardware is not None:
        raise ConfigError(f"{what} have no use for GPU, model and tp: leave these out, or take --kind roofline")
