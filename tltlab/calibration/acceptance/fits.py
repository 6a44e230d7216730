"""Fits an acceptance model of any kind to a trace, and tests it on RL steps left out.

Two fits, one to every other RL step and one to the rest, predict each other's steps: mean tokens per draft, the bonus
included. Beside them stands a constant, the mean of the other half per drafter and reach: a model that does no better
tells nothing that this mean does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from tltlab.acceptance.held_out import (
    Fitted,
    Way,
    held_out,
    tokens_at_age,
    tokens_at_batch,
    tokens_beside_siblings,
    tokens_of_strangers,
)
from tltlab.acceptance.load import (
    Band,
    BatchAcceptance,
    CurveAcceptance,
    FittedDepth,
    FreshAcceptance,
    SiblingAcceptance,
)
from tltlab.errors import ConfigError
from tltlab.strategy import MODEL_FREE
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.trace import Trace

from .by_request import fit_requests, fit_siblings
from .freshness import fit_freshness, measured_state
from .measured import fit_acceptance

_ASSUMPTION = 'state an assumption: a file {"kind": "fresh", "base": MODEL, "drafter": NAME, "freshness": {...}}'
KINDS = ("by-batch", "per-request", "siblings", "fresh")
Model = BatchAcceptance | CurveAcceptance | SiblingAcceptance | FreshAcceptance


@dataclass(frozen=True, kw_only=True)
class AcceptanceFit:
    """A model, None where nothing was drafted, and what it is worth on RL steps left out.

    `held_out` has a row per RL step and drafter, of kind "fresh" also per `age` and `updates`: `rl_step`, `drafter`,
    `num_drafts`, and the mean tokens per draft `measured_tokens`, `predicted_tokens` and `constant_tokens`. Empty with
    one RL step only. `notes` says where the data came from and what was left out.
    """

    kind: str
    model: Model | None
    held_out: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def held_out_error(self) -> float | None:
        """Mean absolute relative error of tokens per draft over the rows of `held_out`, None where not known."""
        return self._error("predicted_tokens")

    @property
    def constant_error(self) -> float | None:
        """The same of the constant."""
        return self._error("constant_tokens")

    def _error(self, column: str) -> float | None:
        if self.held_out.empty:
            return None
        return float((self.held_out[column] / self.held_out["measured_tokens"] - 1.0).abs().mean())


def fit_kind(trace: Trace, kind: str = "by-batch") -> AcceptanceFit:
    """Fit a model of `kind` to the trace's iterations, or to its acceptance.parquet.

    "by-batch" takes iterations, which alone know the batch, and acceptance.parquet where there are none; "per-request"
    the other way round; "siblings" needs iterations, "fresh" acceptance.parquet. Raises ConfigError for an unknown kind
    and where the trace lacks what a kind needs; "by-batch" without speculation has model None.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of acceptance {kind!r}: there are {', '.join(KINDS)}")
    if kind == "by-batch":
        return _by_batch(trace)
    if kind == "per-request":
        return _per_request(trace)
    return _siblings(trace) if kind == "siblings" else _fresh(trace)


def _by_batch(trace: Trace) -> AcceptanceFit:
    table = trace.iterations
    if table is None or not (table["draft_depth"] > 0).any():
        if not _has_acceptance(trace):
            return _result("by-batch", None, ["nothing was speculated, so there is no acceptance to fit"])
        drafts = _walked(trace)
        notes = ["acceptance: walked along acceptance.parquet, which knows no batch: one band for all of them"]
        return _fitted("by-batch", _POOLED, _counted(drafts), notes)
    model, notes = fit_acceptance(table)
    if model is None:
        return _result("by-batch", None, notes)
    chains = (
        (table["draft_depth"] > 0) & (table["top_k"] == 1) & (table["tokens_to_verify"] == table["draft_depth"] + 1)
    )
    rows = table[chains & (table["batch"] > 0)]
    rows = rows.assign(reach=rows["draft_depth"], num=rows["batch"], tokens=rows["batch"] + rows["num_accepted"])
    way = Way(fit=_fit_batches, tokens=tokens_at_batch)
    return _result("by-batch", model, notes, held_out(way, rows, notes))


def _per_request(trace: Trace) -> AcceptanceFit:
    drafts, notes = (_walked(trace), []) if _has_acceptance(trace) else _recorded(trace)
    way = Way(fit=fit_requests, tokens=tokens_of_strangers)
    return _fitted("per-request", way, _counted(drafts), notes)


def _siblings(trace: Trace) -> AcceptanceFit:
    drafts, notes = _recorded(trace)
    names = sorted(drafts["drafter"].unique())
    found = [name for name in names if name in MODEL_FREE] or names
    if len(found) > 1:
        raise ConfigError(f"acceptance by siblings describes one drafter, the trace has {', '.join(found)}")
    mine = _counted(drafts[drafts["drafter"] == found[0]])
    way = Way(fit=lambda rows: fit_siblings(rows, found[0]), tokens=tokens_beside_siblings)
    return _fitted("siblings", way, mine, notes)


def _fresh(trace: Trace) -> AcceptanceFit:
    table = trace.acceptance
    where = trace.path or "the trace"
    if table is None or table.empty:
        raise ConfigError(
            f"{where} has no acceptance.parquet, so nothing tells how acceptance ages: annotate the trace, "
            f"or {_ASSUMPTION}"
        )
    states = _states(table)
    several = [
        str(name) for name, rows in states.groupby("drafter") if len(rows[["age", "updates"]].drop_duplicates()) > 1
    ]
    if not several:
        raise ConfigError(
            f"{where}: every drafter in acceptance.parquet has one age and one number of updates, so nothing tells how "
            f"acceptance ages: annotate the trace with older drafters, or {_ASSUMPTION}"
        )
    if len(several) > 1:
        raise ConfigError(
            f"freshness is fitted to one drafter, acceptance.parquet has {', '.join(several)} at several ages"
        )
    mine = states[states["drafter"] == several[0]].reset_index(drop=True)
    notes = list(fit_freshness(mine, several[0]).notes)
    depth = int(mine["max_depth"].min())

    def fit(rows: pd.DataFrame) -> FreshAcceptance:
        steps = mine[mine["rl_step"].isin(rows["rl_step"].unique())]
        found = fit_freshness(steps, several[0])
        youngest = steps[steps["age"] == steps["age"].min()]
        base = _pool(walked_drafts(youngest, depth))
        length = youngest["accept_if_drafted"].map(len)
        return FreshAcceptance(
            base=base,
            drafter=several[0],
            freshness=found.freshness,
            measured=measured_state(found.freshness, youngest["age"], youngest["updates"], length),
            notes=tuple(notes),
        )

    parts = [
        _counted(walked_drafts(rows, depth)).assign(age=rows["age"].iloc[0], updates=rows["updates"].iloc[0])
        for _, rows in mine.groupby(["age", "updates"])
    ]
    way = Way(fit=fit, tokens=tokens_at_age, by=("rl_step", "drafter", "age", "updates"))
    return _fitted("fresh", way, pd.concat(parts, ignore_index=True), notes)


def _fitted(kind: str, way: Way[Fitted], rows: pd.DataFrame, notes: list[str]) -> AcceptanceFit:
    if rows.empty:
        raise ConfigError(f"there are no drafts to fit {kind} acceptance to{''.join(f'; {note}' for note in notes)}")
    return _result(kind, way.fit(rows), notes, held_out(way, rows, notes))


def _result(kind: str, model: Model | None, notes: list[str], errors: pd.DataFrame | None = None) -> AcceptanceFit:
    rows = pd.DataFrame() if errors is None else errors
    return AcceptanceFit(kind=kind, model=model, held_out=rows, notes=tuple(notes))


def _fit_batches(rows: pd.DataFrame) -> BatchAcceptance:
    model, _ = fit_acceptance(rows)
    assert model is not None
    return model


def _has_acceptance(trace: Trace) -> bool:
    return trace.acceptance is not None and not trace.acceptance.empty


def _walked(trace: Trace) -> pd.DataFrame:
    """The drafts of each drafter at the depth to which all of its rows go."""
    assert trace.acceptance is not None
    parts = [walked_drafts(rows, int(rows["max_depth"].min())) for _, rows in trace.acceptance.groupby("drafter")]
    return pd.concat(parts, ignore_index=True)


def _recorded(trace: Trace) -> tuple[pd.DataFrame, list[str]]:
    drafts, notes = recorded_drafts(trace)
    if drafts.empty:
        why = "".join(f"; {note}" for note in notes)
        raise ConfigError(f"{trace.path or 'the trace'} has no drafts to fit to{why}: record a run that speculates")
    return drafts, notes


def _counted(drafts: pd.DataFrame) -> pd.DataFrame:
    return drafts.assign(num=1, tokens=1 + drafts["accepted"])


def _pool(drafts: pd.DataFrame) -> BatchAcceptance:
    """One distribution per drafter and reach, whatever the batch."""
    found: dict[str, dict[int, FittedDepth]] = {}
    for _, rows in drafts.groupby(["drafter", "reach"]):
        drafter, depth = str(rows["drafter"].iloc[0]), int(rows["reach"].iloc[0])
        p = np.bincount(rows["accepted"].to_numpy(np.int64), minlength=depth + 1) / len(rows)
        fitted = FittedDepth(accepted=tuple(p.tolist()), drafted=float(depth), num_samples=len(rows))
        found.setdefault(drafter, {})[depth] = fitted
    return BatchAcceptance(bands=(Band(max_batch=None, drafters_by_depth=found),))


_POOLED: Way[BatchAcceptance] = Way(fit=_pool, tokens=lambda model, rows: tokens_at_batch(model, rows.assign(batch=1)))


def _states(acceptance: pd.DataFrame) -> pd.DataFrame:
    """acceptance.parquet with each row's `age` and `updates`; unknown updates of one drafter count as none."""
    given = acceptance["drafter_updates"] if "drafter_updates" in acceptance else pd.Series(np.nan, acceptance.index)
    updates = given.astype(np.float64)
    known = updates.notna().groupby(acceptance["drafter"]).transform("all")
    return acceptance.assign(age=acceptance["drafter_age"], updates=updates.where(known, 0.0))
