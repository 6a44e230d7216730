"""Makes cost tables: from a grid of measured iterations, from kernel times, or from a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tltlab.arrays import Floats, Ints
from tltlab.costs.base import CalibratedRange, CostModel
from tltlab.costs.table import Roofline, TableCosts
from tltlab.errors import ConfigError
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

from .isotonic import (
    LEAST_S,
    attention_knots,
    context_columns,
    fixed_columns,
    forward_columns,
    forward_knots,
    non_negative,
)
from .residuals import NUM_BANDS, band, residuals, worker_sums
from .robust import fit

_MEASURED = ("batch", "tokens_to_verify", "context_tokens", "seconds")
_DRAFTING = ("sd_base_s", "draft_level_s", "draft_level_per_request_s")


@dataclass(frozen=True, kw_only=True)
class TableFit:
    """A cost table and how far it is from what it was made of; relative errors.

    `residuals` of `from_measurements`: a row per point, with `predicted_s`, `error` and, predicted by a table without
    its batch, `held_out_error`. Of `from_kernels`: a row per batch, how linear attention is in the context. Of
    `from_trace`: a row per regime. `cross_validated_error` is the mean absolute held-out error, None where there is
    none.
    """

    costs: TableCosts
    residuals: pd.DataFrame
    cross_validated_error: float | None = None


def from_measurements(points: pd.DataFrame, roofline: Roofline | None = None) -> TableFit:
    """A table through measured iterations: columns batch, tokens_to_verify, context_tokens (summed over the batch) and
    seconds, with draft_depth where drafting was in the time.

    One non-negative least-squares fit of relative errors, in which times can only grow with tokens, with batch and with
    context: noise that falls is smoothed. Each batch is left out in turn. Raises ConfigError for a missing column, a
    value that is no count or no time, or a single context per batch, which shows nothing of attention.
    """
    rows = _checked(points)
    fitted = _fit_points(rows, roofline)
    predicted = _predict_points(fitted, rows)
    held_out = np.full(len(rows), np.nan)
    batches = np.unique(rows["batch"])
    if len(batches) > 2:
        for batch in batches:
            out = (rows["batch"] == batch).to_numpy()
            held_out[out] = _predict_points(_fit_points(rows[~out], roofline), rows[out])
    measured = rows["seconds"].to_numpy(np.float64)
    table = rows.assign(
        predicted_s=predicted, error=predicted / measured - 1, held_out_error=held_out / measured - 1
    ).reset_index(drop=True)
    off = table["held_out_error"].abs()
    ends = table["batch"].isin([batches[0], batches[-1]])
    notes = [_smoothing_note(rows, table["error"])]
    if len(batches) > 2:
        notes.append(
            f"each batch left out in turn: {off[~ends].mean():.1%} mean absolute error inside the range, "
            f"{off[ends].mean():.1%} at its ends"
        )
    return TableFit(
        costs=fitted.model_copy(update={"notes": (*fitted.notes, *notes)}),
        residuals=table,
        cross_validated_error=float(off.mean()) if len(batches) > 2 else None,
    )


def from_trace(trace: Trace, rl_steps: Sequence[int] | None = None) -> TableFit:
    """A table from `trace.iterations`, of some RL steps or all: knots at powers of four of batch and of tokens.

    Robust to outliers as `calibrate` is, with the same split of an iteration into verification and drafting. Raises
    ConfigError for a trace without iterations.
    """
    chosen = trace if rl_steps is None else trace.select(rl_steps)
    table = chosen.iterations
    if table is None or table.empty:
        raise ConfigError(f"{trace.path or 'the trace'} has no iterations.parquet to fit a table to: record a run")
    batch, context = (table[c].to_numpy(np.float64) for c in ("batch", "context_tokens"))
    tokens = batch + table["num_drafted"].to_numpy(np.float64)
    prefill = table["prefill_tokens"].to_numpy(np.float64)
    spec = table["draft_depth"].to_numpy() > 0
    duration = table["duration"].to_numpy(np.float64)
    draft = table["draft_duration"].fillna(0).to_numpy(np.float64) if "draft_duration" in table else 0 * duration
    block = np.asarray(table.groupby(["rl_step", "worker"]).ngroup(), np.int64)
    regime = np.where(prefill > 0, 2, spec.astype(np.int64))

    forward_at, batch_at = _knots(tokens), _knots(batch)
    # One slope for all batches: on recorded traces a slope for each predicts other RL steps worse.
    columns = forward_columns(tokens, forward_at) | {"per_context_s": context} | fixed_columns(batch, batch_at)
    columns |= {"sd_base_s": spec.astype(np.float64), "prefill_per_token_s": prefill}
    found = fit(columns, duration - draft, regime * NUM_BANDS + band(batch), block).coefficients
    terms: dict[str, float | None] = {"prefill_per_token_s": found["prefill_per_token_s"]}
    notes = [] if found["prefill_per_token_s"] is not None else ["no iteration prefilled: prefill_per_token_s is null"]
    if spec.any():
        terms |= _drafting(table, batch, draft, block)
        terms["sd_base_s"] = (found["sd_base_s"] or 0.0) + (terms["sd_base_s"] or 0.0)
        idle = draft[~spec & (draft > 0) & (_next_depth(table) == 0)]
        terms["sd_idle_s"] = float(idle.mean()) if len(idle) else 0.0
        if not len(idle):
            notes.append("what a loaded drafter costs in plain decoding was not recorded apart: sd_idle_s is written 0")
    else:
        notes.append("nothing was speculated: the drafting terms are null")
    knots = {
        "forward": forward_knots(found, forward_at),
        "attention": attention_knots(found, batch_at, found["per_context_s"] or 0.0),
        "calibrated": _covered(batch, tokens, context),
        "notes": tuple(notes),
    }
    costs = TableCosts.model_validate(knots | terms)
    return TableFit(costs=costs, residuals=residuals(regime, batch, duration, predict_iterations(costs, table)))


def predict_iterations(costs: CostModel, table: pd.DataFrame) -> Floats:
    """Seconds of each row of iterations.parquet under any cost model: what it verified, drafted and prefilled.

    Drafting counts in the iteration that verifies it: sums over a rollout are right, single rows are off by that.
    """
    with_drafter = set(table.loc[table["draft_depth"] > 0, "rl_step"])
    found = np.empty(len(table))
    needed = table[["rl_step", "batch", "num_drafted", "context_tokens", "prefill_tokens", "draft_depth"]]
    for i, (step, batch, drafted, context, prefill, depth) in enumerate(needed.itertuples(index=False)):
        # Of any width: what was verified is given apart, and stands in no strategy's own number.
        strategy = Strategy("any", int(depth), 2, 2) if depth > 0 else NO_SPECULATION
        loaded = step in with_drafter and depth == 0
        cost = costs.iteration(strategy, tokens_to_verify=1.0 + drafted / max(batch, 1), drafter_loaded=loaded)
        found[i] = cost.seconds(int(batch), context) + (costs.prefill_s(prefill) if prefill else 0.0)
    return found


def rollout_sums(costs: CostModel, trace: Trace, rl_steps: Sequence[int]) -> pd.DataFrame:
    """Measured and predicted seconds per RL step and worker, and the bias: what a rollout time is made of."""
    table = trace.select(rl_steps).iterations
    if table is None or table.empty:
        raise ConfigError(f"{trace.path or 'the trace'} has no iterations to predict in RL steps {list(rl_steps)}")
    return worker_sums(table, table["duration"].to_numpy(np.float64), predict_iterations(costs, table))


def _checked(points: pd.DataFrame) -> pd.DataFrame:
    missing = [c for c in _MEASURED if c not in points]
    if missing:
        raise ConfigError(f"measured iterations lack {', '.join(missing)}: they have {', '.join(map(str, points))}")
    if points.empty:
        raise ConfigError("there are no measured iterations to make a table of")
    rows = points[[*_MEASURED, *(["draft_depth"] if "draft_depth" in points else [])]].astype(np.float64)
    least = {"batch": 1, "tokens_to_verify": 1, "context_tokens": 0, "seconds": LEAST_S, "draft_depth": 0}
    for column in rows:
        bad = rows.index[~(np.isfinite(rows[column]) & (rows[column] >= least[str(column)]))]
        if len(bad):
            value, bound = rows[column][bad[0]], least[str(column)]
            raise ConfigError(f"measured iterations, row {bad[0]}: {column} is {value:g}, it is at least {bound:g}")
    if rows.groupby("batch")["context_tokens"].nunique().max() < 2:
        raise ConfigError("measured iterations have one context_tokens per batch: measure each at two or more")
    return rows


def _fit_points(rows: pd.DataFrame, roofline: Roofline | None) -> TableCosts:
    batch, verify, context, seconds = (rows[c].to_numpy(np.float64) for c in _MEASURED)
    tokens = batch * verify
    forward_at, batch_at = np.unique(tokens), np.unique(batch)
    columns = forward_columns(tokens, forward_at) | context_columns(batch, context, batch_at)
    columns |= fixed_columns(batch, batch_at)
    terms: dict[str, float | None] = {}
    depth = rows["draft_depth"].to_numpy(np.float64) if "draft_depth" in rows else np.zeros(len(rows))
    if depth.any():
        columns |= {"sd_base_s": (depth > 0).astype(np.float64)}
        columns |= {"draft_level_s": depth, "draft_level_per_request_s": depth * batch}
    found = non_negative(columns, seconds)
    notes: tuple[str, ...] = ()
    if depth.any():
        terms |= {name: found[name] or 0.0 for name in _DRAFTING} | {"sd_idle_s": 0.0}
        notes = ("what a loaded drafter costs in plain decoding was not measured: sd_idle_s is written 0",)
        unknown = [name for name in _DRAFTING if found[name] is None]
        if unknown:
            notes = (
                *notes,
                f"{', '.join(unknown)} could not be told from other terms, in which they are; written 0",
            )
    knots = {
        "forward": forward_knots(found, forward_at),
        "attention": attention_knots(found, batch_at),
        "roofline": roofline,
        "calibrated": _covered(batch, tokens, context),
        "notes": notes,
    }
    return TableCosts.model_validate(knots | terms)


def _predict_points(costs: TableCosts, rows: pd.DataFrame) -> Floats:
    found = np.empty(len(rows))
    for i, (batch, verify, context, _, *depth) in enumerate(rows.itertuples(index=False)):
        drafts = int(depth[0]) if depth else 0
        strategy = Strategy("any", drafts, 2, 2) if drafts else NO_SPECULATION
        found[i] = costs.iteration(strategy, tokens_to_verify=verify).seconds(int(batch), context)
    return found


def _smoothing_note(rows: pd.DataFrame, error: pd.Series) -> str:
    falls = pairs = 0
    for _, same in rows.sort_values("tokens_to_verify").groupby(["batch", "context_tokens"]):
        steps = np.diff(same["seconds"])
        falls, pairs = falls + int((steps < 0).sum()), pairs + len(steps)
    return (
        f"{falls} of {pairs} neighbouring times fall where tokens grow, smoothed to grow; the table is within "
        f"{error.abs().max():.1%} of every point, {error.abs().mean():.1%} on average"
    )


def _drafting(table: pd.DataFrame, batch: Floats, draft: Floats, block: Ints) -> dict[str, float | None]:
    depth = _next_depth(table)
    drafting = (depth > 0) & (draft > 0)
    none: dict[str, float | None] = dict.fromkeys(_DRAFTING, 0.0)
    if not drafting.any():
        return none
    depth, batch = depth[drafting], batch[drafting]
    columns = {"draft_level_s": depth, "draft_level_per_request_s": depth * batch, "sd_base_s": np.ones_like(depth)}
    found = fit(columns, draft[drafting], band(batch), block[drafting]).coefficients
    return none | {name: value or 0.0 for name, value in found.items()}


def _next_depth(table: pd.DataFrame) -> Floats:
    if "next_draft_depth" not in table:
        return np.zeros(len(table))
    return table["next_draft_depth"].fillna(0).to_numpy(np.float64)


def _knots(values: Floats) -> Floats:
    """The ends, and the powers of four that are not near one."""
    low, high = max(1.0, float(values.min())), float(values.max())
    powers = 4.0 ** np.arange(0, 10)
    inside = powers[(powers > 1.4 * low) & (1.4 * powers < high)]
    return np.unique(np.concatenate([[low], inside, [high]]))


def _covered(batch: Floats, tokens: Floats, context: Floats) -> CalibratedRange:
    spans = [(float(x.min()), float(x.max())) for x in (batch, tokens, context)]
    return CalibratedRange(batch=spans[0], verified_tokens=spans[1], context_tokens=spans[2])
