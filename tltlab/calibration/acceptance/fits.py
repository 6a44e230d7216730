"""Fits an acceptance model of any kind to a trace, and tests it on RL steps left out.

Two fits, one to every other RL step and one to the rest, predict each other's steps: mean tokens per draft, the bonus
included. Beside them stands a constant, the mean of the other half per drafter and reach: a model that does no better
tells nothing that this mean does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import pandas as pd

from tltlab.acceptance.by_request import SiblingAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.measured import Band, BatchAcceptance, FittedDepth
from tltlab.arrays import Floats, Ints
from tltlab.calibration.cross_validation import Estimator, Fold, cross_validated
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import MODEL_FREE, Strategy
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.trace import Trace

from .by_request import fit_siblings
from .freshness import drafter_states, fit_freshness, measured_state
from .measured import fit_acceptance

KINDS = ("by-batch", "siblings", "fresh")
MEANS = ("measured_tokens", "predicted_tokens", "constant_tokens")
Model = BatchAcceptance | SiblingAcceptance | FreshAcceptance
_ASSUMPTION = 'state an assumption: a file {"kind": "fresh", "base": MODEL, "drafter": NAME, "freshness": {...}}'


@dataclass(frozen=True, kw_only=True)
class AcceptanceFit:
    """A model, None where nothing was drafted, and what it is worth on RL steps left out.

    `held_out` has a row per RL step and drafter, of kind "fresh" also per `age` and `updates`: `rl_step`, `drafter`,
    `num_drafts`, and the mean tokens per draft `measured_tokens`, `predicted_tokens` and `constant_tokens`. Empty with
    one RL step only. `notes` says where the data came from and what was left out.
    """

    kind: str
    model: Model | None
    notes: tuple[str, ...]
    held_out: pd.DataFrame = field(default_factory=pd.DataFrame)

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

    "by-batch" takes iterations, which alone know the batch, and acceptance.parquet where there are none; "siblings"
    needs iterations, "fresh" acceptance.parquet. Raises ConfigError for an unknown kind
    and where the trace lacks what a kind needs; "by-batch" without speculation has model None.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of acceptance {kind!r}: there are {', '.join(KINDS)}")
    ways = {"by-batch": _by_batch, "siblings": _siblings, "fresh": _fresh}
    return ways[kind](trace)


def _by_batch(trace: Trace) -> AcceptanceFit:
    table = trace.iterations
    if table is None or not (table["draft_depth"] > 0).any():
        if not _has_acceptance(trace):
            note = "nothing was speculated, so there is no acceptance to fit"
            return AcceptanceFit(kind="by-batch", model=None, notes=(note,))
        drafts = _walked_drafts(trace)
        notes = ["acceptance: walked along acceptance.parquet, which knows no batch: one band for all of them"]
        return _fit("by-batch", Pooled(), _with_counts(drafts), notes)
    model, notes = fit_acceptance(table)
    if model is None:
        return AcceptanceFit(kind="by-batch", model=None, notes=tuple(notes))
    depth = table["draft_depth"]
    rows = table[(depth > 0) & (table["top_k"] == 1) & (table["tokens_to_verify"] == depth + 1) & (table["batch"] > 0)]
    rows = rows.assign(reach=rows["draft_depth"], num=rows["batch"], tokens=rows["batch"] + rows["num_accepted"])
    held_out = _held_out(ByBatch(), rows, notes)
    return AcceptanceFit(kind="by-batch", model=model, notes=tuple(notes), held_out=held_out)


def _siblings(trace: Trace) -> AcceptanceFit:
    drafts, notes = _recorded_drafts(trace)
    names = sorted(drafts["drafter"].unique())
    candidates = [name for name in names if name in MODEL_FREE] or names
    if len(candidates) > 1:
        raise ConfigError(f"acceptance by siblings describes one drafter, the trace has {', '.join(candidates)}")
    rows = _with_counts(drafts[drafts["drafter"] == candidates[0]])
    return _fit("siblings", BesideSiblings(candidates[0]), rows, notes)


def _fresh(trace: Trace) -> AcceptanceFit:
    table = trace.acceptance
    place = trace.path or "the trace"
    if table is None or table.empty:
        raise ConfigError(
            f"{place} has no acceptance.parquet, so nothing tells how acceptance ages: annotate the trace, "
            f"or {_ASSUMPTION}"
        )
    states = drafter_states(table)
    drafters = [
        str(name) for name, rows in states.groupby("drafter") if len(rows[["age", "updates"]].drop_duplicates()) > 1
    ]
    if not drafters:
        raise ConfigError(
            f"{place}: every drafter in acceptance.parquet has one age and one number of updates, so nothing tells how "
            f"acceptance ages: annotate the trace with older drafters, or {_ASSUMPTION}"
        )
    if len(drafters) > 1:
        raise ConfigError(
            f"freshness is fitted to one drafter, acceptance.parquet has {', '.join(drafters)} at several ages"
        )
    annotated = states[states["drafter"] == drafters[0]].reset_index(drop=True)
    notes = list(fit_freshness(annotated, drafters[0]).notes)
    depth = int(annotated["max_depth"].min())

    parts = [
        _with_counts(walked_drafts(rows, depth)).assign(age=rows["age"].iloc[0], updates=rows["updates"].iloc[0])
        for _, rows in annotated.groupby(["age", "updates"])
    ]
    estimator = AtAge(annotated, drafters[0], depth, notes)
    return _fit("fresh", estimator, pd.concat(parts, ignore_index=True), notes, ("age", "updates"))


def _fit(
    kind: str, estimator: DraftEstimator, rows: pd.DataFrame, notes: list[str], further: Sequence[str] = ()
) -> AcceptanceFit:
    if rows.empty:
        raise ConfigError(f"there are no drafts to fit {kind} acceptance to{''.join(f'; {note}' for note in notes)}")
    model = estimator.fit(rows).model_
    held_out = _held_out(estimator, rows, notes, further)
    return AcceptanceFit(kind=kind, model=model, notes=tuple(notes), held_out=held_out)


def _held_out(
    estimator: DraftEstimator, rows: pd.DataFrame, notes: list[str], further: Sequence[str] = ()
) -> pd.DataFrame:
    """Every other RL step and the rest predict each other: a row per RL step, drafter and what `further` tells apart.

    The constant beside the prediction is the mean of the other half per drafter and reach, or of all of it where it
    lacks these. What one half cannot tell is left out and noted; a single RL step leaves nothing.
    """
    by = ["rl_step", "drafter", *further]
    columns = [*by, "num_drafts", *MEANS]
    errors = []
    for fold, predicted in cross_validated(estimator, _halves(rows)):
        if isinstance(predicted, ConfigError):
            notes.append(f"acceptance of RL steps {fold.name} is not predicted by that of the others: {predicted}")
            continue
        test = fold.test
        cells = fold.train.groupby(["drafter", "reach"])[["tokens", "num"]].sum()
        mean = float(cells["tokens"].sum() / cells["num"].sum())
        constants = (cells["tokens"] / cells["num"]).reindex(pd.MultiIndex.from_frame(test[["drafter", "reach"]]))
        tokens = (test["tokens"], predicted * test["num"], constants.fillna(mean).to_numpy() * test["num"])
        each_cell = test[[*by, "num"]].assign(**dict(zip(MEANS, tokens, strict=True)))
        sums = each_cell.rename(columns={"num": "num_drafts"}).groupby(by, as_index=False).sum()
        sums[list(MEANS)] = sums[list(MEANS)].div(sums["num_drafts"], axis=0)
        errors.append(sums)
    if not errors:
        return pd.DataFrame(columns=columns)
    return pd.concat(errors, ignore_index=True)[columns].sort_values(by, ignore_index=True)


def _halves(rows: pd.DataFrame) -> Iterator[Fold[pd.DataFrame]]:
    """Every other RL step to fit to and the rest to predict, then the other way round; nothing for a single one."""
    steps = np.sort(rows["rl_step"].unique())
    even = rows["rl_step"].isin(steps[::2])
    for train in (even, ~even) if len(steps) > 1 else ():
        test = rows[~train].reset_index(drop=True)
        name = ", ".join(str(step) for step in sorted(test["rl_step"].unique()))
        yield Fold(name=name, train=rows[train].reset_index(drop=True), test=test)


class DraftEstimator(Estimator[pd.DataFrame], Protocol):
    """Learns `model_` from drafts and foresees the mean tokens per draft of each row of them.

    A row is `num` drafts of one `drafter` and `reach` in an RL step, with `tokens` in all; kinds need further columns.
    """

    model_: Model


class ByBatch(DraftEstimator):
    """For rows that know their `batch`."""

    def fit(self, rows: pd.DataFrame) -> Self:
        model, _ = fit_acceptance(rows)
        assert model is not None
        self.model_: BatchAcceptance = model
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        cells = rows[["batch", "drafter", "reach"]].astype({"drafter": str})
        tokens = {
            key: self.model_.at(int(key[0])).tokens_per_iteration(Strategy.chain(key[1], int(key[2])))
            for key in cells.drop_duplicates().itertuples(index=False, name=None)
        }
        return np.array([tokens[key] for key in cells.itertuples(index=False, name=None)], np.float64)


class Pooled(ByBatch):
    """One distribution per drafter and reach, whatever the batch."""

    def fit(self, rows: pd.DataFrame) -> Self:
        self.model_ = _pool(rows)
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        return super().predict(rows.assign(batch=1))


class BesideSiblings(DraftEstimator):
    """For rows that know how many siblings had finished."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter

    def fit(self, rows: pd.DataFrame) -> Self:
        self.model_: SiblingAcceptance = fit_siblings(rows, self.drafter)
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        tokens = np.empty(len(rows))
        for at, strategy in _groups(rows):
            position, siblings = (rows[name].to_numpy(np.float64)[at] for name in ("generated_tokens", "num_siblings"))
            tokens[at] = 1.0 + self.model_.survival(strategy, np.zeros(len(at)), position, siblings).sum(axis=1)
        return tokens


class AtAge(DraftEstimator):
    """For rows that know the drafter's `age` and `updates`; `annotated` are the rows of acceptance.parquet behind them.

    The base is what the youngest drafter of each fit has accepted, one for all batches.
    """

    def __init__(self, annotated: pd.DataFrame, drafter: str, depth: int, notes: Sequence[str]) -> None:
        self.annotated, self.drafter, self.depth, self.notes = annotated, drafter, depth, notes

    def fit(self, rows: pd.DataFrame) -> Self:
        steps = self.annotated[self.annotated["rl_step"].isin(rows["rl_step"].unique())]
        freshness = fit_freshness(steps, self.drafter).freshness
        youngest = steps[steps["age"] == steps["age"].min()]
        length = youngest["accept_if_drafted"].map(len)
        self.model_: FreshAcceptance = FreshAcceptance(
            base=_pool(walked_drafts(youngest, self.depth)),
            drafter=self.drafter,
            freshness=freshness,
            measured=measured_state(freshness, youngest["age"], youngest["updates"], length),
            notes=tuple(self.notes),
        )
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        tokens, zeros = np.empty(len(rows)), np.zeros(1)
        for at, strategy in _groups(rows):
            states = rows.iloc[at][["age", "updates"]]
            for age, updates in states.drop_duplicates().itertuples(index=False):
                state = at[((states["age"] == age) & (states["updates"] == updates)).to_numpy()]
                model = self.model_.at_freshness(DrafterState(age=int(age), updates=int(updates))).by_request().at(1)
                tokens[state] = 1.0 + float(model.survival(strategy, zeros, zeros, zeros)[0].sum())
        return tokens


def _has_acceptance(trace: Trace) -> bool:
    return trace.acceptance is not None and not trace.acceptance.empty


def _walked_drafts(trace: Trace) -> pd.DataFrame:
    """The drafts of each drafter at the depth to which all of its rows go."""
    assert trace.acceptance is not None
    parts = [walked_drafts(rows, int(rows["max_depth"].min())) for _, rows in trace.acceptance.groupby("drafter")]
    return pd.concat(parts, ignore_index=True)


def _recorded_drafts(trace: Trace) -> tuple[pd.DataFrame, list[str]]:
    drafts, notes = recorded_drafts(trace)
    if drafts.empty:
        why = "".join(f"; {note}" for note in notes)
        raise ConfigError(f"{trace.path or 'the trace'} has no drafts to fit to{why}: record a run that speculates")
    return drafts, notes


def _with_counts(drafts: pd.DataFrame) -> pd.DataFrame:
    return drafts.assign(num=1, tokens=1 + drafts["accepted"])


def _pool(drafts: pd.DataFrame) -> BatchAcceptance:
    """One distribution per drafter and reach, whatever the batch."""
    fits: dict[str, dict[int, FittedDepth]] = {}
    for _, rows in drafts.groupby(["drafter", "reach"]):
        drafter, depth = str(rows["drafter"].iloc[0]), int(rows["reach"].iloc[0])
        p = np.bincount(rows["accepted"].to_numpy(np.int64), minlength=depth + 1) / len(rows)
        fitted = FittedDepth(accepted=tuple(p.tolist()), drafted=float(depth), num_samples=len(rows))
        fits.setdefault(drafter, {})[depth] = fitted
    return BatchAcceptance(bands=(Band(max_batch=None, drafters_by_depth=fits),))


def _groups(rows: pd.DataFrame) -> Iterator[tuple[Ints, Strategy]]:
    """Positions of the rows of each drafter and reach, and the chain that these are of."""
    drafters, reaches = rows["drafter"].to_numpy(str), rows["reach"].to_numpy(np.int64)
    for drafter, reach in sorted(set(zip(drafters.tolist(), reaches.tolist(), strict=True))):
        yield np.flatnonzero((drafters == drafter) & (reaches == reach)), Strategy.chain(drafter, reach)
