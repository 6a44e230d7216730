"""Fits cost tables: to a grid of measured iterations, or to a recorded trace."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Self

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.costs.base import CostModel, IterationCost
from tltlab.costs.roofline import Hardware
from tltlab.costs.table import TableCosts
from tltlab.errors import ConfigError
from tltlab.strategy import NO_SPECULATION, Strategy

from .iterations import CostEstimator, Iterations
from .linear import DRAFTING, measured_drafting
from .residuals import NUM_BANDS, band
from .robust import (
    attention_knots,
    context_columns,
    fit,
    fixed_columns,
    forward_bends,
    forward_columns,
    forward_knots,
    non_negative,
)


class TableEstimator(CostEstimator):
    """Fits a table, which predicts row by row."""

    costs_: TableCosts

    def predict(self, rows: Iterations) -> Floats:
        return predict_iterations(self.costs_, rows)


class RecordedTableEstimator(TableEstimator):
    """A table of a recorded trace: knots at powers of four of batch and of tokens.

    Robust to outliers as linear costs are, with the same split of an iteration into verification and drafting.
    """

    def fit(self, rows: Iterations) -> Self:
        forward_at, batch_at = _knots(rows.verified), _knots(rows.batch)
        # One slope for all batches: on recorded traces a slope for each predicts other RL steps worse.
        columns = forward_columns(rows.verified, forward_at) | {"per_context_s": rows.context}
        columns |= fixed_columns(rows.batch, batch_at)
        columns |= {"sd_base_s": rows.spec.astype(np.float64), "prefill_per_token_s": rows.prefill}
        # An iteration that prefills is of no other regime, speculative or not.
        groups = rows.regime * NUM_BANDS + band(rows.batch)
        coefficients = fit(columns, rows.seconds - rows.draft_s, groups, rows.block).coefficients
        terms: dict[str, float | None] = {"prefill_per_token_s": coefficients["prefill_per_token_s"]}
        notes = []
        if coefficients["prefill_per_token_s"] is None:
            notes.append("no iteration prefilled: prefill_per_token_s is null")
        if rows.spec.any():
            terms |= _drafting_terms(rows)
            terms["sd_base_s"] = (coefficients["sd_base_s"] or 0.0) + (terms["sd_base_s"] or 0.0)
            if not ((rows.next_depth > 0) & (rows.draft_s > 0)).any():
                notes.append("drafting time was not recorded apart: it is inside sd_base_s and forward, levels are 0")
            idle = rows.draft_s[~rows.spec & (rows.draft_s > 0) & (rows.next_depth == 0)]
            terms["sd_idle_s"] = float(idle.mean()) if len(idle) else 0.0
            if not len(idle):
                notes.append(
                    "what a loaded drafter costs in plain decoding was not recorded apart: sd_idle_s is written 0"
                )
        else:
            notes.append("nothing was speculated: the drafting terms are null")
        knots = {
            "forward": forward_knots(coefficients, forward_at),
            "attention": attention_knots(coefficients, batch_at, coefficients["per_context_s"] or 0.0),
            "calibrated": rows.covered,
            "notes": tuple(notes),
        }
        self.costs_ = TableCosts.model_validate(knots | terms)
        self.predictions_ = self.predict(rows)
        return self


class MeasuredTableEstimator(TableEstimator):
    """A table through measured iterations; a roofline gives it its shape between the knots.

    One non-negative least-squares fit of relative errors to those that prefilled nothing, in which times can only grow
    with tokens, with batch and with context: noise that falls is smoothed. Drafting is a base and a time per level, so
    depths between those that were measured are interpolated. Prefill is the median over the rows that have it of the
    seconds that the rest of the iteration leaves. Raises ConfigError for a single context per batch, which shows
    nothing of attention.
    """

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = hardware

    def fit(self, rows: Iterations) -> Self:
        costs = self._decoding(rows.where(rows.prefill == 0))
        prefilled = rows.where(rows.prefill > 0)
        if len(prefilled):
            rest_s = predict_iterations(costs, replace(prefilled, prefill=np.zeros(len(prefilled))))
            each_s = max(float(np.median((prefilled.seconds - rest_s) / prefilled.prefill)), 0.0)
            update: dict[str, Any] = {"prefill_per_token_s": each_s}
        else:
            update = {"notes": (*costs.notes, "no iteration prefilled: prefill_per_token_s is null")}
        self.costs_ = costs.model_copy(update=update)
        self.predictions_ = self.predict(rows)
        return self

    def _decoding(self, rows: Iterations) -> TableCosts:
        if not len(rows):
            raise ConfigError("there are no measured iterations to make a table of")
        contexts = pd.Series(rows.context).groupby(rows.batch).nunique()
        if contexts.max() < 2:
            raise ConfigError("measured iterations have one context_tokens per batch: measure each at two or more")
        forward_at, batch_at = np.unique(rows.verified), np.unique(rows.batch)
        columns = forward_columns(rows.verified, forward_at) | context_columns(rows.batch, rows.context, batch_at)
        columns |= fixed_columns(rows.batch, batch_at)
        notes: list[str] = []
        drafts = bool(rows.spec.any())
        if drafts:
            columns |= {"sd_base_s": rows.spec.astype(np.float64)}
            columns |= {"draft_level_s": rows.next_depth, "draft_level_per_request_s": rows.next_depth * rows.batch}
        # Every batch and depth has different tokens: a curve through all of them would leave no time for drafting.
        # Among the curves that fit the measurements, the straightest is taken.
        bends = forward_bends(rows.verified, rows.seconds, forward_at) if drafts else []
        coefficients = non_negative(columns, rows.seconds, small=bends)
        terms = measured_drafting(coefficients, notes) if drafts else {}
        knots: dict[str, Any] = {
            "forward": forward_knots(coefficients, forward_at),
            "attention": attention_knots(coefficients, batch_at),
            "roofline": self.hardware,
            "calibrated": rows.covered,
            "notes": tuple(notes),
        }
        return TableCosts.model_validate(knots | terms)


def predict_iterations(costs: CostModel, rows: Iterations) -> Floats:
    """Seconds of each row under any cost model: what it verified, drafted and prefilled.

    Drafting counts in the iteration that verifies it: sums over a rollout are right, single rows are off by that.
    """
    with_drafter = rows.loaded & np.isin(rows.rl_step, rows.rl_step[rows.spec])
    columns = (rows.batch, rows.tokens_to_verify, rows.context, rows.depth, rows.prefill, with_drafter)

    @cache
    def cost(depth: int, verify: float, loaded: bool) -> IterationCost:
        # The width is arbitrary: the verified tokens are passed apart and replace the strategy's own number.
        strategy = Strategy("learned", depth, 2, 2) if depth > 0 else NO_SPECULATION
        return costs.iteration(strategy, tokens_to_verify=verify, drafter_loaded=loaded and depth == 0)

    each_row = zip(*(column.tolist() for column in columns), strict=True)
    return np.array(
        [
            cost(depth, verify, loaded).seconds(int(batch), context) + (costs.prefill_s(prefill) if prefill else 0.0)
            for batch, verify, context, depth, prefill, loaded in each_row
        ],
        np.float64,
    )


def _drafting_terms(rows: Iterations) -> dict[str, float | None]:
    zeros: dict[str, float | None] = dict.fromkeys(DRAFTING, 0.0)
    drafting = (rows.next_depth > 0) & (rows.draft_s > 0)
    if not drafting.any():
        return zeros
    depth, batch = rows.next_depth[drafting], rows.batch[drafting]
    columns = {"draft_level_s": depth, "draft_level_per_request_s": depth * batch, "sd_base_s": np.ones_like(depth)}
    coefficients = fit(columns, rows.draft_s[drafting], band(batch), rows.block[drafting]).coefficients
    return zeros | {name: value or 0.0 for name, value in coefficients.items()}


def _knots(values: Floats) -> Floats:
    """The ends, and the powers of four that are not near one."""
    low, high = max(1.0, float(values.min())), float(values.max())
    powers = 4.0 ** np.arange(0, 10)
    inside = powers[(powers > 1.4 * low) & (1.4 * powers < high)]
    return np.unique(np.concatenate([[low], inside, [high]]))
