"""Fits an acceptance model of any kind to a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from tltlab.acceptance.by_request import SiblingAcceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.measured import Band, FittedDepth, MeasuredAcceptance
from tltlab.arrays import Floats
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.trace import Trace

from .context import by_context
from .freshness import drafter_states, fit_freshness, measured_state
from .measured import fit_acceptance

KINDS = ("by-batch", "siblings", "fresh")
Model = MeasuredAcceptance | ContextAcceptance | SiblingAcceptance | FreshAcceptance
_ASSUMPTION = 'state an assumption: a file {"kind": "fresh", "base": MODEL, "drafter": NAME, "freshness": {...}}'


@dataclass(frozen=True, kw_only=True)
class AcceptanceFit:
    """A model, None where nothing was drafted; `notes` names the source of the data and what was left out."""

    kind: str
    model: Model | None
    notes: tuple[str, ...]


def fit_kind(trace: Trace, kind: str = "by-batch") -> AcceptanceFit:
    """Fit a model of `kind` to the trace's iterations, or to its acceptance.parquet.

    "by-batch" takes iterations, which alone know the batch, and acceptance.parquet where there are none; "siblings"
    needs iterations, "fresh" acceptance.parquet. Raises ConfigError for an unknown kind and where the trace lacks what
    a kind needs; "by-batch" without speculation has model None, and a trained length where drafts identify one.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of acceptance {kind!r}: there are {', '.join(KINDS)}")
    ways = {"by-batch": _by_batch, "siblings": _siblings, "fresh": _fresh}
    return ways[kind](trace)


def _by_batch(trace: Trace) -> AcceptanceFit:
    table = trace.iterations
    if table is None or not (table["draft_depth"] > 0).any():
        if trace.acceptance is None or trace.acceptance.empty:
            note = "nothing was speculated, so there is no acceptance to fit"
            return AcceptanceFit(kind="by-batch", model=None, notes=(note,))
        note = "acceptance: walked along acceptance.parquet, which knows no batch: one band for all of them"
        drafts = _walked_drafts(trace)
        pooled, context_notes = by_context(_pool(drafts, trace.drafters), drafts, trace.workload)
        return AcceptanceFit(kind="by-batch", model=pooled, notes=(note, *context_notes))
    measured, notes = fit_acceptance(table, trace.drafters)
    model: Model | None = measured
    if measured is not None and not all(map(measured.copied, measured.drafters)):
        drafts, left_out = recorded_drafts(trace)
        model, context_notes = by_context(measured, drafts, trace.workload)
        notes += context_notes
        notes += [f"acceptance by context is not known: {note}" for note in left_out if drafts.empty]
    return AcceptanceFit(kind="by-batch", model=model, notes=tuple(notes))


def _siblings(trace: Trace) -> AcceptanceFit:
    drafts, notes = recorded_drafts(trace)
    if drafts.empty:
        why = "".join(f"; {note}" for note in notes)
        raise ConfigError(f"{trace.path or 'the trace'} has no drafts to fit to{why}: record a run that speculates")
    names = sorted(drafts["drafter"].unique())
    candidates = [name for name in names if not trace.drafters[name].has_network] or names
    if len(candidates) > 1:
        raise ConfigError(f"acceptance by siblings describes one drafter, the trace has {', '.join(candidates)}")
    return AcceptanceFit(kind="siblings", model=fit_siblings(drafts, candidates[0]), notes=tuple(notes))


def _fresh(trace: Trace) -> AcceptanceFit:
    table = trace.acceptance
    place = trace.path or "the trace"
    if table is None or table.empty:
        raise ConfigError(
            f"{place} has no acceptance.parquet, so the ageing of acceptance is not identified: annotate the trace, "
            f"or {_ASSUMPTION}"
        )
    states = drafter_states(table)
    drafters = [
        str(name) for name, rows in states.groupby("drafter") if len(rows[["age", "updates"]].drop_duplicates()) > 1
    ]
    if not drafters:
        raise ConfigError(
            f"{place}: every drafter in acceptance.parquet has one age and one number of updates, so the ageing of "
            f"acceptance is not identified: annotate the trace with older drafters, or {_ASSUMPTION}"
        )
    if len(drafters) > 1:
        raise ConfigError(
            f"freshness is fitted to one drafter, acceptance.parquet has {', '.join(drafters)} at several ages"
        )
    annotated = states[states["drafter"] == drafters[0]].reset_index(drop=True)
    freshness, notes = fit_freshness(annotated, drafters[0])
    # The base is what the youngest drafter has accepted, one for all batches.
    youngest = annotated[annotated["age"] == annotated["age"].min()]
    length = youngest["accept_if_drafted"].map(len)
    model = FreshAcceptance(
        base=_pool(walked_drafts(youngest, int(annotated["max_depth"].min())), trace.drafters),
        drafter=drafters[0],
        freshness=freshness,
        measured=measured_state(freshness, youngest["age"], youngest["updates"], length),
        notes=notes,
    )
    return AcceptanceFit(kind="fresh", model=model, notes=notes)


def _walked_drafts(trace: Trace) -> pd.DataFrame:
    """The drafts of each drafter at the depth to which all of its rows go."""
    assert trace.acceptance is not None
    parts = [walked_drafts(rows, int(rows["max_depth"].min())) for _, rows in trace.acceptance.groupby("drafter")]
    if (drafts := pd.concat(parts, ignore_index=True)).empty:
        place = trace.path or "the trace"
        raise ConfigError(f"{place} has no drafts to fit to: its acceptance.parquet has no position")
    return drafts


def _pool(drafts: pd.DataFrame, drafters: Drafters) -> MeasuredAcceptance:
    """One distribution per drafter and reach, whatever the batch."""
    fits: dict[str, dict[int, FittedDepth]] = {}
    for _, rows in drafts.groupby(["drafter", "reach"]):
        drafter, depth = str(rows["drafter"].iloc[0]), int(rows["reach"].iloc[0])
        p = np.bincount(rows["accepted"].to_numpy(np.int64), minlength=depth + 1) / len(rows)
        fitted = FittedDepth(accepted=tuple(p.tolist()), drafted=float(depth), num_samples=len(rows))
        fits.setdefault(drafter, {})[depth] = fitted
    return MeasuredAcceptance(bands=(Band(max_batch=None, drafters_by_depth=fits),), copies=drafters.copying(fits))


CELL_TOKENS = 16
"""Drafts that begin within so many tokens of each other are counted together."""
MIN_DRAFTS = 32


def fit_siblings(drafts: pd.DataFrame, drafter: str) -> SiblingAcceptance:
    """Fit the growth curve to recorded drafts, weighted least squares on counted chances.

    Raises ConfigError below MIN_DRAFTS drafts.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    rows = drafts[drafts["drafter"] == drafter]
    if len(rows) < MIN_DRAFTS:
        raise ConfigError(
            f"drafter {drafter!r} has {len(rows)} drafts with a known number of finished siblings, "
            f"at least {MIN_DRAFTS} are needed"
        )
    table = pd.DataFrame(
        {
            "siblings": rows["num_siblings"].to_numpy(np.float64),
            "stretch": rows["generated_tokens"].to_numpy() // CELL_TOKENS,
            "position": rows["generated_tokens"].to_numpy(np.float64),
            "tried": np.minimum(rows["accepted"].to_numpy() + 1.0, rows["reach"].to_numpy()),
            "kept": rows["accepted"].to_numpy(np.float64),
        }
    )
    by = table.groupby(["siblings", "stretch"], as_index=False)
    cells = by.agg(position=("position", "mean"), tried=("tried", "sum"), kept=("kept", "sum"))
    siblings, position = np.asarray(cells["siblings"]), np.asarray(cells["position"])
    tried = np.asarray(cells["tried"])
    rate = np.asarray(cells["kept"]) / tried

    def model(p: Floats) -> SiblingAcceptance:
        low, gap = 1.0 / (1.0 + np.exp(-np.clip(p[:2], -30, 30)))
        return SiblingAcceptance(
            drafter=drafter,
            alone=float(low),
            most=float(low + gap * (1.0 - low)),
            exponent=float(np.exp(np.clip(p[2], -3, 2))),
            own_tokens=float(np.exp(np.clip(p[3], 0, 10))),
        )

    def residuals(p: Floats) -> Floats:
        # One draft's tokens are kept or lost together more often than apart; weights need only the right proportions.
        return np.asarray(np.sqrt(tried) * (model(p).alpha(siblings, position) - rate), np.float64)

    return model(least_squares(residuals, [-1.0, 0.0, -0.7, 4.0], x_scale="jac", max_nfev=2000).x)
