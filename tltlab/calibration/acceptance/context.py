"""Fits the length at which a drafter was trained to drafts at several contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tltlab.acceptance.base import from_survival
from tltlab.acceptance.context import USELESS_AT, ContextAcceptance, trained_text
from tltlab.acceptance.measured import Band, FittedDepth, MeasuredAcceptance
from tltlab.arrays import Floats, Ints
from tltlab.traces.schema import KEY

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


def _replaced(band: Band, drafter: str, chances: tuple[float, ...]) -> Band:
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
