"""Acceptance measured per drafter and depth, the same for all batch sizes or in bands of them; and its fit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from tltlab.arrays import Floats, Ints
from tltlab.config import FrozenModel, Share
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

from .base import Distribution, chain_alpha, from_survival, geometric, held, known_drafter, only_chains

if TYPE_CHECKING:
    import pandas as pd

BANDS = (4, 16, 48)
"""Upper ends of the batch bands; a last one is open."""
ENOUGH = 64
"""Least request-iterations of a cell; a cell with fewer uses the nearest band with enough."""
_ACCEPTED = "accepted_per_request"
FARTHEST = 4
"""Copies are extrapolated to drafts so many times as deep as the deepest measured ones."""
_LONGEST_RUN = 0.999
"""Highest probability that a run continues, also where no end was observed."""


def copied_runs(accepted: Sequence[float], depth: int) -> Floats:
    """P(accepted = j), j = 0..depth, of a drafter that copies text, from the distribution at another depth.

    Such a drafter is right for a run of tokens and then wrong. A draft of depth D takes at most D + 1 tokens of a run,
    and the next draft continues inside the run. Shallow drafts therefore meet long runs more often, and a truncated
    deep draft differs from a shallow one. Let S(i) be the measured P(accepted >= i), F(r) the chance that a run which
    begins is right for at least r tokens, and let runs of D - 1 tokens and more continue with the chance g. A share
    S(D) g of the drafts begins inside a run, so S(i) = (1 - S(D) g) F(i) + S(D) g^(i + 1), which makes g = S(D) / S(D -
    1) and gives F. At another depth d, over the drafts of a run,

        P(accepted >= i) = sum_k F(k (d + 1) + i) / sum_k F(k (d + 1)).

    >>> copied_runs([0.6, 0.0, 0.0, 0.0, 0.4], 1).round(2).tolist()  # nothing, or a part of something long
    [0.37, 0.63]
    """
    most = len(accepted) - 1
    survival = np.cumsum(np.asarray(accepted, np.float64)[::-1])[::-1]
    survival = survival / survival[0]
    goes_on = min(_LONGEST_RUN, float(survival[-1] / survival[-2])) if survival[-2] > 0 else 0.0
    inside = float(survival[-1]) * goes_on
    run = np.clip((survival - inside * goes_on ** np.arange(most + 1)) / max(1.0 - inside, 1e-9), 0.0, 1.0)
    # Chances of a run never rise along it, whatever the noise of what was measured.
    run = np.maximum.accumulate(run[::-1])[::-1]
    run[0] = 1.0
    # Beyond the measured depth the run is geometric, and so is what is left of both sums.
    before = math.ceil(most / (depth + 1))
    at = (depth + 1) * np.arange(before + 1)[:, None] + np.arange(depth + 1)[None, :]
    chance = np.where(at <= most, run[np.minimum(at, most)], run[-1] * goes_on ** np.maximum(at - most, 0))
    chance[-1] /= 1.0 - goes_on ** (depth + 1)
    return from_survival((chance.sum(axis=0) / chance[:, 0].sum())[1:])


class FittedDepth(FrozenModel):
    """Measurement of one drafter at one depth: P(accepted = j) for j = 0..depth, and mean tokens drafted."""

    accepted: tuple[Share, ...]
    drafted: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    num_samples: int | None = None

    @classmethod
    def counted(cls, accepted: Ints, depth: int, drafted: float | None = None) -> Self:
        """The measurement by samples of accepted tokens; `drafted` by default all of the depth."""
        p = np.bincount(np.minimum(accepted, depth), minlength=depth + 1) / len(accepted)
        mean = float(depth) if drafted is None else drafted
        return cls(accepted=tuple(p.tolist()), drafted=mean, num_samples=len(accepted))

    @field_validator("accepted")
    @classmethod
    def _sums_to_one(cls, p: tuple[float, ...]) -> tuple[float, ...]:
        if abs(sum(p) - 1.0) > 1e-6:
            raise ValueError(f"probabilities sum to {sum(p):.6g}, not to 1")
        return p


class BatchBand(FrozenModel):
    """Measurements for batches up to `max_batch`, None for all larger ones."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    max_batch: PositiveInt | None
    drafters_by_depth: Annotated[dict[str, dict[int, FittedDepth]], Field(alias="drafters")]

    @field_validator("drafters_by_depth")
    @classmethod
    def _lengths(cls, drafters: dict[str, dict[int, FittedDepth]]) -> dict[str, dict[int, FittedDepth]]:
        for name, depths in drafters.items():
            for depth, fitted in depths.items():
                if depth < 1 or len(fitted.accepted) != depth + 1:
                    raise ValueError(
                        f"{name}: depth {depth} needs {depth + 1} probabilities, got {len(fitted.accepted)}"
                    )
                if fitted.drafted > depth + 1e-9:
                    raise ValueError(f"{name}: depth {depth} cannot draft {fitted.drafted} tokens")
        return drafters


class MeasuredAcceptance(Distribution):
    """Distributions measured per drafter and depth, in bands of the batch size, as `tltlab calibrate` writes them.

    A drafter that retrieves from the group accepts little while the batch is large and responses are young, and more
    in the tail: one distribution for both would be wrong at both ends.

    A depth that was not measured follows from the next larger measured one: its first d tokens for a learned drafter,
    `copied_runs` of it for one that copies text. On the n-gram drafts of arXiv 2601.11580 that errs by .1 % of
    the tokens per draft at most, where cutting short errs by 11 %. Beyond the largest measured depth, up to `FARTHEST`
    times as deep, a learned drafter keeps each token with the chance of the last measured one, given those before it;
    copies are extrapolated from depth 2 or more (error .5 % there, 12 % from depth 1). `outside` marks these depths,
    and copies at all that were not measured.
    Tokens drafted scale with the depth. `copies` records for each drafter whether it copies text; names of `STANDARD`
    may be left out.

    >>> depth = FittedDepth(accepted=(0.5, 0.2, 0.3), drafted=1.0)
    >>> MeasuredAcceptance.at_any_batch({"ngram": {2: depth}}).curve(Strategy.chain("ngram", 2)).tolist()
    [0.5, 0.3]
    """

    copies: dict[str, bool] = Field(default={})
    kind: Literal["by-batch"] = "by-batch"
    bands: tuple[BatchBand, ...]

    @classmethod
    def at_any_batch(
        cls, drafters_by_depth: Mapping[str, Mapping[int, FittedDepth]], copies: Mapping[str, bool] | None = None
    ) -> MeasuredAcceptance:
        """The model that is the same at every batch size."""
        return cls.model_validate(
            {"bands": [{"max_batch": None, "drafters": drafters_by_depth}], "copies": copies or {}}
        )

    @field_validator("bands")
    @classmethod
    def _ascend(cls, bands: tuple[BatchBand, ...]) -> tuple[BatchBand, ...]:
        ends = [math.inf if band.max_batch is None else band.max_batch for band in bands]
        if not ends or ends[-1] != math.inf or any(a >= b for a, b in pairwise(ends)):
            raise ValueError("max_batch must ascend, and be null in the last band only")
        return bands

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        if unknown := [name for name in self.drafters if name not in self.copies and name not in STANDARD]:
            raise ValueError(
                f"copies: set whether drafter {unknown[0]!r} copies text (true) or has a network (false), as in "
                f'"copies": {{"{unknown[0]}": false}}'
            )
        return self

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted({name for band in self.bands for name in band.drafters_by_depth}))

    def copied(self, drafter: str) -> bool:
        """Return whether a drafter copies text."""
        return self.copies[drafter] if drafter in self.copies else not STANDARD[drafter].has_network

    @cached_property
    def _each_band(self) -> tuple[MeasuredAcceptance, ...]:
        if len(self.bands) == 1:
            return (self,)
        return tuple(self.at_any_batch(band.drafters_by_depth, self.copies) for band in self.bands)

    def by_batch(self, drafter: str) -> tuple[MeasuredAcceptance, ...]:
        return self._each_band

    def at(self, batch: int) -> MeasuredAcceptance:
        ends = [band.max_batch for band in self.bands if band.max_batch is not None]
        return self._each_band[bisect_left(ends, batch)]

    def outside(self, strategy: Strategy) -> list[str]:
        measured = [band.drafters_by_depth.get(strategy.drafter, {}) for band in self.bands]
        reach, copied = strategy.reach, self.copied(strategy.drafter)
        assumed = any(depths and (reach not in depths if copied else reach > max(depths)) for depths in measured)
        return ["draft_depth"] if assumed else []

    def distribution(self, strategy: Strategy) -> Floats:
        depth, fitted = self._measured(strategy)
        most = strategy.reach
        if depth != most and self.copied(strategy.drafter):
            return copied_runs(fitted.accepted, most)
        if depth < most:
            return from_survival(held(np.cumsum(fitted.accepted[:0:-1])[::-1], most))
        p = np.asarray(fitted.accepted)
        cut: Floats = np.append(p[:most], p[most:].sum())
        normalised: Floats = cut / cut.sum()
        return normalised

    def num_drafted(self, strategy: Strategy) -> float:
        depth, fitted = self._measured(strategy)
        return fitted.drafted * strategy.reach / depth

    def _measured(self, strategy: Strategy) -> tuple[int, FittedDepth]:
        if len(self.bands) > 1:
            raise TypeError("acceptance differs by batch size: ask at(batch)")
        only_chains(strategy, "fitted acceptance")
        drafters = self.bands[0].drafters_by_depth
        known_drafter(strategy, [name for name, depths in drafters.items() if depths], "the acceptance model")
        depths, most = drafters[strategy.drafter], strategy.reach
        enough = [d for d in sorted(depths) if d >= most]
        deepest = max(depths)
        if not enough and deepest >= 1 + self.copied(strategy.drafter) and most <= FARTHEST * deepest:
            enough = [deepest]
        if not enough:
            raise ConfigError(
                f"the acceptance model was fitted up to depth {deepest} of drafter {strategy.drafter!r}; "
                f"{strategy} is deeper: record that depth, or name a model such as geometric:0.7"
            )
        return enough[0], depths[enough[0]]


def fit_acceptance(
    iterations: pd.DataFrame, drafters: Drafters = STANDARD
) -> tuple[MeasuredAcceptance | None, list[str]]:
    """The distribution of accepted tokens and the mean tokens drafted, and notes; None where nothing was speculated.

    One sample is one request in one iteration. The first d tokens of a longer chain are the chain of depth d, so depth
    d also learns from min(accepted, d) of deeper drafts; not where a drafter copies text and depth d has ENOUGH of its
    own (`copied_runs`). Where `accepted_per_request` is unknown only the mean is, and the distribution is the one of a
    chain whose tokens are kept with equal probability. Only whole chains are fitted: trees and trimmed chains are
    counted in a note. Raises ConfigError for a drafter that is not among `drafters`.
    """
    spec = iterations[iterations["draft_depth"] > 0]
    is_whole = (spec["top_k"] == 1) & (spec["tokens_to_verify"] == spec["draft_depth"] + 1)
    whole = spec.loc[is_whole, ["drafter", "draft_depth", "batch", "num_drafted", "num_accepted", _ACCEPTED]]
    notes = []
    if len(whole) < len(spec):
        notes.append(f"acceptance: {len(spec) - len(whole)} iterations with trees or trimmed chains left out")
    number = np.searchsorted(BANDS, whole["batch"])
    copies = drafters.copying(map(str, whole["drafter"].unique()))
    bands: list[dict[str, dict[int, FittedDepth]]] = [{} for _ in range(len(BANDS) + 1)]
    for drafter, depth in whole[["drafter", "draft_depth"]].drop_duplicates().sort_values("draft_depth").to_numpy():
        deep_enough = (whole["drafter"] == drafter) & (whole["draft_depth"] >= depth)
        cells = [_fit(whole[deep_enough & (number == b)], int(depth), copies[str(drafter)]) for b in range(len(bands))]
        for b, fitted in enumerate(_fill(cells)):
            if fitted is not None:
                bands[b].setdefault(str(drafter), {})[int(depth)] = fitted
    if not bands[0]:
        return None, notes
    return MeasuredAcceptance(
        copies=copies,
        bands=tuple(
            BatchBand(max_batch=end, drafters_by_depth=drafters)
            for end, drafters in zip((*BANDS, None), bands, strict=True)
        ),
    ), notes


def _fill(cells: list[FittedDepth | None]) -> list[FittedDepth | None]:
    """Each band's fit, or that of the nearest band with enough samples, or of the one with most."""
    samples = [cell.num_samples or 0 if cell else 0 for cell in cells]
    enough = [b for b, n in enumerate(samples) if n >= ENOUGH] or [int(np.argmax(samples))]
    return [cells[min(enough, key=lambda e: (abs(e - b), e))] for b in range(len(cells))]


def _fit(rows: pd.DataFrame, depth: int, copied: bool) -> FittedDepth | None:
    """Iterations of one drafter in one band, at least `depth` deep, as the chain of that depth; None without any."""
    same_depth = rows[rows["draft_depth"] == depth]
    sample = rows if same_depth.empty else same_depth
    if copied and same_depth["batch"].sum() >= ENOUGH:
        rows = same_depth
    if (requests := int(sample["batch"].sum())) == 0:
        return None
    drafted = float((sample["num_drafted"] * depth / sample["draft_depth"]).sum()) / requests
    drafted = min(drafted, depth)
    if rows[_ACCEPTED].notna().all():
        accepted = np.concatenate(rows[_ACCEPTED].tolist()).astype(np.int64)
        return FittedDepth.counted(accepted, depth, drafted)
    mean = float(np.minimum(sample["num_accepted"], sample["batch"] * depth).sum()) / requests
    alpha = chain_alpha(min(mean, depth), depth)
    return FittedDepth(accepted=tuple(geometric(alpha, depth).tolist()), drafted=drafted, num_samples=requests)
