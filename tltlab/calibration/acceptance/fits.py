"""Fits an acceptance model of any kind to a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tltlab.acceptance.base import from_survival
from tltlab.acceptance.by_request import SiblingAcceptance
from tltlab.acceptance.context import USELESS_AT, ContextAcceptance, trained_text
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.measured import BatchBand, FittedDepth, MeasuredAcceptance
from tltlab.arrays import Floats, Ints
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .freshness import drafter_states, fit_freshness, measured_state
from .measured import fit_acceptance

LEAST_TOKENS = 256
"""Trained lengths below are not looked for: the first tokens of a response are others than later ones."""
_CELL_TOKENS = 128
"""Drafts of one response that begin within so many tokens of each other are counted together."""
_RATIO = 1.03
"""Ratio of neighbouring trained lengths that are tried."""
_MIN_RESPONSES = 8
_SURE = 16.0
"""Deviance by which the best length must be better than none; _SPAN: by which another one may be worse than it."""
_SPAN = 3.84
KINDS = ("by-batch", "siblings", "fresh")
Model = MeasuredAcceptance | ContextAcceptance | SiblingAcceptance | FreshAcceptance
_ASSUMPTION = 'state an assumption: a file {"kind": "fresh", "base": MODEL, "drafter": NAME, "freshness": {...}}'


@dataclass(frozen=True, kw_only=True)
class TrainedLength:
    """A fitted trained length with the ends of its 95 % interval, and the chance of each drafted token within it."""

    trained_tokens: int
    low: int
    high: int
    chances: tuple[float, ...]


def fit_trained_length(drafts: pd.DataFrame, prompt_tokens: Mapping[tuple[object, ...], int]) -> TrainedLength | None:
    """The trained length that makes one drafter's drafts most likely; None where the drafts do not identify one.

    `prompt_tokens` are by response. Each token of a draft has a chance of its own, so depths may be mixed. Some
    responses are easier to draft for: deviances are divided by the dispersion of what these keep (quasi-likelihood).
    """
    cells = _Cells.of(drafts, prompt_tokens)
    longest, shortest = float(cells.context.max(initial=0.0)), float(cells.context.min(initial=np.inf))
    first = max(float(LEAST_TOKENS), shortest / USELESS_AT)
    if cells.num_responses < _MIN_RESPONSES or longest <= first:
        return None
    lengths = np.geomspace(first, longest, max(2, int(np.log(longest / first) / np.log(_RATIO))))
    each = np.array([cells.log_likelihood(length) for length in lengths])
    best = int(each.argmax())
    deviance = 2.0 * (each[best] - each) / cells.dispersion(lengths[best])
    gain = 2.0 * (each[best] - cells.log_likelihood(np.inf)) / cells.dispersion(lengths[best])
    if gain < _SURE or len(np.unique(cells.response[cells.context > lengths[best]])) < _MIN_RESPONSES:
        return None
    equal = np.flatnonzero(deviance < _SPAN)
    low, high = lengths[max(0, equal.min() - 1)], lengths[min(len(lengths) - 1, equal.max() + 1)]
    trained = round(float(lengths[best]))
    return TrainedLength(
        trained_tokens=trained,
        low=round(float(low)),
        high=round(float(high)),
        chances=tuple(cells.chances(trained)),
    )


def by_context(
    model: MeasuredAcceptance, drafts: pd.DataFrame, workload: pd.DataFrame
) -> tuple[MeasuredAcceptance | ContextAcceptance, list[str]]:
    """The model with the trained length of its drafter with a network, where drafts identify one, and a note of it.

    Then the drafter's chances within that length hold at every batch size: small batches are those of long contexts.
    A trained length is a property of one drafter: with several that have a network nothing is fitted.
    """
    names = [name for name in model.drafters if not model.copied(name)]
    if len(names) != 1 or drafts.empty:
        return model, []
    rows = drafts[drafts["drafter"] == names[0]]
    # The last draft of a response is cut where it ends.
    rows = rows[rows.duplicated(list(KEY), keep="last")]
    prompts = dict(zip(workload[list(KEY)].itertuples(index=False, name=None), workload["prompt_tokens"], strict=True))
    if rows.empty or (found := fit_trained_length(rows, prompts)) is None:
        return model, []
    deepest = max(depth for band in model.bands for depth in band.drafters_by_depth.get(names[0], {}))
    if len(found.chances) < deepest:
        return model, []
    note = (
        f"acceptance of {names[0]} falls with context like that of a drafter trained at {found.trained_tokens} tokens "
        f"(95 %: {found.low} to {found.high}): written as @{trained_text(found.trained_tokens)}, at every batch size"
    )
    bands = tuple(_replaced(band, names[0], found.chances) for band in model.bands)
    base = model.model_copy(update={"bands": bands})
    base = MeasuredAcceptance.model_validate(base.model_dump())
    return ContextAcceptance(base=base, trained_tokens=found.trained_tokens, names=(names[0],)), [note]


def _replaced(band: BatchBand, drafter: str, chances: tuple[float, ...]) -> BatchBand:
    """The band with a drafter's distributions made of its chances."""
    fits = {}
    for depth, fit in band.drafters_by_depth.get(drafter, {}).items():
        p = from_survival(np.cumprod(np.array(chances[:depth], np.float64), dtype=np.float64))
        fits[depth] = FittedDepth(accepted=tuple(p.tolist()), drafted=fit.drafted, num_samples=fit.num_samples)
    return band.model_copy(
        update={"drafters_by_depth": {**band.drafters_by_depth, **({drafter: fits} if fits else {})}}
    )


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """Counts of drafts of one response at about one context: tokens `tried` and `kept`, shape (cells, places)."""

    response: Ints
    context: Floats
    tried: Floats
    kept: Floats

    @classmethod
    def of(cls, drafts: pd.DataFrame, prompt_tokens: Mapping[tuple[object, ...], int]) -> _Cells:
        keys = list(drafts[list(KEY)].itertuples(index=False, name=None))
        response, _ = pd.factorize(pd.Series(keys, dtype=object))
        context = drafts["generated_tokens"].to_numpy(np.float64) + np.array([prompt_tokens[key] for key in keys])
        accepted, reach = drafts["accepted"].to_numpy(np.int64), drafts["reach"].to_numpy(np.int64)
        place = np.arange(1, int(reach.max()) + 1)
        tried = (place <= reach[:, None]) & (place <= accepted[:, None] + 1)
        kept = place <= accepted[:, None]
        pairs = np.stack([response, (context / _CELL_TOKENS).astype(np.int64)], axis=1)
        cells, at = np.unique(pairs, axis=0, return_inverse=True)
        at, n = at.ravel(), len(cells)
        sums = [np.array([np.bincount(at, column, n) for column in table.T]).T for table in (tried, kept)]
        mean = np.bincount(at, context, n) / np.bincount(at, minlength=n)
        return cls(response=cells[:, 0], context=mean, tried=sums[0], kept=sums[1])

    @property
    def num_responses(self) -> int:
        return len(np.unique(self.response))

    def chances(self, trained_tokens: float) -> list[float]:
        """The chance of each place of a draft within a trained length, given those before it."""
        return [float(value) for value in self._chances(self._share(trained_tokens))]

    def log_likelihood(self, trained_tokens: float) -> float:
        """Log-likelihood of all drafts."""
        chance = self._expected(trained_tokens)
        return float((self.kept * np.log(chance) + (self.tried - self.kept) * np.log1p(-chance)).sum())

    def dispersion(self, trained_tokens: float) -> float:
        """Variance of what responses keep over that of independent drafts, at least 1."""
        chance = self._expected(trained_tokens)
        off = np.bincount(self.response, (self.kept - self.tried * chance).sum(axis=1))
        return max(1.0, float((off**2).sum() / (self.tried * chance * (1.0 - chance)).sum()))

    def _expected(self, trained_tokens: float) -> Floats:
        share = self._share(trained_tokens)
        return np.clip(share[:, None] * self._chances(share), 1e-4, 1.0 - 1e-4)

    def _share(self, trained_tokens: float) -> Floats:
        return np.clip((USELESS_AT - self.context / trained_tokens) / (USELESS_AT - 1.0), 0.0, 1.0)

    def _chances(self, share: Floats) -> Floats:
        tried = (self.tried * share[:, None]).sum(axis=0)
        kept = self.kept.sum(axis=0)
        chance: Floats = np.minimum(1.0, np.divide(kept, tried, out=np.zeros_like(kept), where=tried > 0))
        return chance


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
    return MeasuredAcceptance(bands=(BatchBand(max_batch=None, drafters_by_depth=fits),), copies=drafters.copying(fits))


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
