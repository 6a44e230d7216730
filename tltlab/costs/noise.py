"""How iteration times scatter around a cost model: a measured distribution of the ratio, and how long an excess lasts.

The body is close to log-normal, the tail heavier (a busy machine, a page fault), and neighbours resemble each other: a
slow iteration is likely followed by another. The noise keeps the scatter within a rollout. A whole rollout that ran
slow means that the machine's speed drifted, for every policy and on all workers; drift is divided out, as otherwise
workers that drift apart would lengthen every predicted rollout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tltlab.arrays import Array, Floats, Ints
from tltlab.config import FiniteModel, FrozenModel, Share

SPANS = (4, 16, 64)
"""Lengths in iterations of the blocks that share an excess; with 1 they cover lags up to a fast rollout's length."""
NUM_RATIOS = 100
_LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ENOUGH = 200
_LEAST_SCATTER = 1e-3


class Block(FrozenModel):
    """`share` of the variance (of normal scores) belongs to excesses that last `iterations`."""

    iterations: PositiveInt
    share: Share


class IterationNoise(FiniteModel):
    """A distribution of measured / modelled iteration time with mean 1.

    `ratios` are the means of equally likely parts of it, ascending: the quantiles on an even grid of probabilities,
    with each part's own mean so that the whole keeps its mean in spite of the tail. `blocks` sets how long excesses
    last: normal scores are sums over blocks of b iterations, whose autocorrelation at lag h is
    sum_b share_b * max(0, 1 - h/b). Without blocks iterations are independent.

    >>> noise = IterationNoise(ratios=(0.8, 1.2))
    >>> noise.at(np.array([0.3, 0.9])).tolist(), round(noise.spread, 3)
    ([0.8, 1.2], 0.2)
    """

    ratios: tuple[PositiveFloat, ...] = Field(min_length=1)
    blocks: tuple[Block, ...] = ()

    @model_validator(mode="after")
    def _check_ratios(self) -> IterationNoise:
        if list(self.ratios) != sorted(self.ratios):
            raise ValueError("ratios must ascend: they are quantiles")
        if abs(mean := float(np.mean(self.ratios)) - 1.0) > 1e-6:
            raise ValueError(f"ratios must have mean 1, got {1.0 + mean:.6g}: the cost model holds the level")
        if sum(block.share for block in self.blocks) > 1.0 + 1e-9:
            raise ValueError("the shares of blocks add up to more than 1")
        return self

    @property
    def spread(self) -> float:
        """Standard deviation of the ratio."""
        return float(np.std(self.ratios))

    @property
    def components(self) -> tuple[tuple[int, float], ...]:
        """(iterations, share) of all blocks; what they leave of the variance is independent, blocks of 1."""
        independent = max(0.0, 1.0 - sum(block.share for block in self.blocks))
        parts = [(1, independent), *((block.iterations, block.share) for block in self.blocks)]
        return tuple((length, share) for length, share in parts if share > 0)

    def at(self, probabilities: Floats) -> Floats:
        """The ratios at these probabilities, in [0, 1]."""
        ratios = np.asarray(self.ratios)
        part = np.minimum((probabilities * len(ratios)).astype(np.int64), len(ratios) - 1)
        values: Floats = ratios[part]
        return values


def fit_noise(
    measured: npt.ArrayLike, predicted: npt.ArrayLike, series: npt.ArrayLike | None = None
) -> IterationNoise | None:
    """The noise of iterations, in order, that took `measured` seconds where a model predicts `predicted`.

    `series` labels iterations that followed one another (a rollout on a worker); each series is taken relative to its
    own level. None where fewer than 200 iterations are usable, or the model is within 0.1 % of all of them.
    """
    seconds, model = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    rollout: Array = np.zeros(len(seconds)) if series is None else np.asarray(series)
    valid = (seconds > 0) & (model > 0)
    if valid.sum() < _ENOUGH:
        return None
    rollout = np.unique(rollout[valid], return_inverse=True)[1]
    seconds, model = seconds[valid], model[valid]
    level = np.bincount(rollout, seconds) / np.bincount(rollout, model)
    ratio = seconds / (model * level[rollout])
    if ratio.std() < _LEAST_SCATTER:
        return None
    parts = np.array([part.mean() for part in np.array_split(np.sort(ratio), NUM_RATIOS)])
    # Means of equal values differ by a rounding error, up or down.
    parts = np.maximum.accumulate(parts)
    return IterationNoise(ratios=tuple((parts / parts.mean()).tolist()), blocks=_blocks(ratio, rollout))


def _blocks(ratio: Floats, rollout: Ints) -> tuple[Block, ...]:
    # Costs are read by commands that should start quickly, and scipy does not load quickly.
    from scipy.optimize import nnls
    from scipy.special import ndtri
    from scipy.stats import rankdata

    scores = ndtri((rankdata(ratio) - 0.5) / len(ratio))
    order = np.argsort(rollout, kind="stable")
    scores, rollout = scores[order], rollout[order]
    lags = [lag for lag in _LAGS if (rollout[lag:] == rollout[:-lag]).sum() >= _ENOUGH]
    if not lags:
        return ()
    autocorrelation = [float((scores[lag:] * scores[:-lag])[rollout[lag:] == rollout[:-lag]].mean()) for lag in lags]
    kernel = np.maximum(0.0, 1.0 - np.asarray(lags)[:, None] / np.asarray(SPANS)[None, :])
    shares = nnls(kernel, np.asarray(autocorrelation))[0]
    shares /= max(1.0, float(shares.sum()))
    return tuple(
        Block(iterations=span, share=float(share)) for span, share in zip(SPANS, shares, strict=True) if share > 1e-3
    )
