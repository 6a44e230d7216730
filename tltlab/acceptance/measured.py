"""Acceptance measured per drafter and depth, the same for all batch sizes or in bands of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, field_validator

from tltlab.arrays import Floats
from tltlab.config import FrozenModel
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

from .base import AcceptanceModel, known_drafter, only_chains, reach


class FittedDepth(FrozenModel):
    """What was measured for one drafter at one depth: P(accepted = j) for j = 0..depth, and mean tokens drafted."""

    accepted: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    drafted: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    num_samples: int | None = None

    @field_validator("accepted")
    @classmethod
    def _sums_to_one(cls, p: tuple[float, ...]) -> tuple[float, ...]:
        if abs(sum(p) - 1.0) > 1e-6:
            raise ValueError(f"probabilities sum to {sum(p):.6g}, not to 1")
        return p


class FittedAcceptance(AcceptanceModel):
    """Distributions measured per drafter and depth.

    A depth that was not measured is the next larger measured one cut short: the first d tokens of a longer chain are
    the chain of depth d, so min(accepted, d) has the right distribution; tokens drafted scale with the depth. Beyond
    the largest measured depth nothing is known, which is a ConfigError.

    >>> FittedAcceptance(drafters_by_depth={"ngram": {2: FittedDepth(accepted=(0.5, 0.2, 0.3), drafted=1.0)}})
    """

    kind: Literal["fitted"] = "fitted"
    drafters_by_depth: Annotated[dict[str, dict[int, FittedDepth]], Field(alias="drafters")]
    notes: tuple[str, ...] = ()
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

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

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted(self.drafters_by_depth))

    def distribution(self, strategy: Strategy) -> Floats:
        _, fitted = self._measured(strategy)
        most = reach(strategy)
        p = np.asarray(fitted.accepted)
        cut: Floats = np.append(p[:most], p[most:].sum())
        normalised: Floats = cut / cut.sum()
        return normalised

    def num_drafted(self, strategy: Strategy) -> float:
        depth, fitted = self._measured(strategy)
        return fitted.drafted * reach(strategy) / depth

    @cached_property
    def _measured_drafters(self) -> frozenset[str]:
        return frozenset(name for name, depths in self.drafters_by_depth.items() if depths)

    def _measured(self, strategy: Strategy) -> tuple[int, FittedDepth]:
        only_chains(strategy, "fitted acceptance")
        known_drafter(strategy, self._measured_drafters, "the acceptance model")
        depths = self.drafters_by_depth[strategy.drafter]
        enough = [d for d in sorted(depths) if d >= reach(strategy)]
        if not enough:
            raise ConfigError(
                f"the acceptance model was fitted up to depth {max(depths)} of drafter {strategy.drafter!r}; "
                f"{strategy} is deeper: record that depth, or name a model such as geometric:0.7"
            )
        return enough[0], depths[enough[0]]


class Band(FrozenModel):
    """What holds for batches up to `max_batch`, None for all larger ones."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    max_batch: Annotated[int, Field(gt=0)] | None
    drafters_by_depth: Annotated[dict[str, dict[int, FittedDepth]], Field(alias="drafters")]


class BatchAcceptance(AcceptanceModel):
    """Distributions measured per batch size too, as `tltlab calibrate` writes them: one `FittedAcceptance` per band.

    A drafter that retrieves from the group accepts little while the batch is large and responses are young, and more
    in the tail: one distribution for both would be wrong at both ends.
    """

    kind: Literal["by-batch"] = "by-batch"
    bands: tuple[Band, ...]

    @field_validator("bands")
    @classmethod
    def _ascend(cls, bands: tuple[Band, ...]) -> tuple[Band, ...]:
        ends = [math.inf if band.max_batch is None else band.max_batch for band in bands]
        if not ends or ends[-1] != math.inf or any(a >= b for a, b in pairwise(ends)):
            raise ValueError("max_batch must ascend, and be null in the last band only")
        return bands

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted({name for band in self.bands for name in band.drafters_by_depth}))

    @cached_property
    def by_batch(self) -> tuple[FittedAcceptance, ...]:
        return tuple(FittedAcceptance(drafters_by_depth=band.drafters_by_depth) for band in self.bands)

    def at(self, batch: int) -> FittedAcceptance:
        ends = [band.max_batch for band in self.bands if band.max_batch is not None]
        return self.by_batch[bisect_left(ends, batch)]

    def distribution(self, strategy: Strategy) -> Floats:
        raise TypeError("acceptance differs by batch size: ask at(batch)")
