"""Fits acceptance models to a trace: by batch, by siblings, and by age and training."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from tltlab.acceptance.curves import SiblingAcceptance, fit_siblings
from tltlab.acceptance.freshness import FreshAcceptance, drafter_states, fit_freshness, measured_state
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance, fit_acceptance
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.trace import Trace

KINDS = ("by-batch", "siblings", "fresh")
Model = MeasuredAcceptance | SiblingAcceptance | FreshAcceptance
_ASSUMPTION = 'state an assumption: a file {"kind": "fresh", "base": MODEL, "drafter": NAME, "freshness": {...}}'


class AcceptanceFit(NamedTuple):
    """A model, None where nothing was drafted; `notes` names the source of the data and what was left out."""

    model: Model | None
    notes: tuple[str, ...]


def fit_kind(trace: Trace, kind: str = "by-batch") -> AcceptanceFit:
    """Fit a model of `kind` to the trace's iterations, or to its acceptance.parquet.

    "by-batch" takes iterations, which alone know the batch, and acceptance.parquet where there are none; "siblings"
    needs iterations, "fresh" acceptance.parquet. Raises ConfigError for an unknown kind and where the trace lacks what
    a kind needs; "by-batch" without speculation has model None.
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
            return AcceptanceFit(None, (note,))
        note = "acceptance: walked along acceptance.parquet, which knows no batch: one band for all of them"
        # The drafts of each drafter at the depth to which all of its rows go.
        each = trace.acceptance.groupby("drafter")
        drafts = pd.concat([walked_drafts(rows, int(rows["max_depth"].min())) for _, rows in each], ignore_index=True)
        if drafts.empty:
            place = trace.path or "the trace"
            raise ConfigError(f"{place} has no drafts to fit to: its acceptance.parquet has no position")
        return AcceptanceFit(_pool(drafts, trace.drafters), (note,))
    measured, notes = fit_acceptance(table, trace.drafters)
    return AcceptanceFit(measured, tuple(notes))


def _siblings(trace: Trace) -> AcceptanceFit:
    drafts, notes = recorded_drafts(trace)
    if drafts.empty:
        why = "".join(f"; {note}" for note in notes)
        raise ConfigError(f"{trace.path or 'the trace'} has no drafts to fit to{why}: record a run that speculates")
    names = sorted(drafts["drafter"].unique())
    candidates = [name for name in names if not trace.drafters[name].has_network] or names
    if len(candidates) > 1:
        raise ConfigError(f"acceptance by siblings describes one drafter, the trace has {', '.join(candidates)}")
    rows = drafts[drafts["drafter"] == candidates[0]]
    model = fit_siblings(
        candidates[0],
        num_siblings=rows["num_siblings"].to_numpy(np.float64),
        generated_tokens=rows["generated_tokens"].to_numpy(np.int64),
        reach=rows["reach"].to_numpy(np.int64),
        accepted=rows["accepted"].to_numpy(np.int64),
    )
    return AcceptanceFit(model, tuple(notes))


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
    states_of = youngest["age"], youngest["updates"], youngest["accept_if_drafted"].map(len)
    model = FreshAcceptance(
        base=_pool(walked_drafts(youngest, int(annotated["max_depth"].min())), trace.drafters),
        drafter=drafters[0],
        freshness=freshness,
        measured=measured_state(freshness, *(column.to_numpy(np.float64) for column in states_of)),
        notes=notes,
    )
    return AcceptanceFit(model, notes)


def _pool(drafts: pd.DataFrame, drafters: Drafters) -> MeasuredAcceptance:
    """One distribution per drafter and reach, whatever the batch."""
    fits: dict[str, dict[int, FittedDepth]] = {}
    for _, rows in drafts.groupby(["drafter", "reach"]):
        drafter, depth = str(rows["drafter"].iloc[0]), int(rows["reach"].iloc[0])
        fitted = FittedDepth.counted(rows["accepted"].to_numpy(np.int64), depth)
        fits.setdefault(drafter, {})[depth] = fitted
    return MeasuredAcceptance.at_any_batch(fits, drafters.copying(fits))
