"""How a drafter's acceptance falls with its age and rises with its training, and that on top of any other model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_validator
from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

from .acceptance_measured import BatchAcceptance, FittedAcceptance
from .acceptance_model import (
    AcceptanceModel,
    ConstantAcceptance,
    FloatArray,
    GeometricAcceptance,
    Key,
    RequestAcceptance,
    Share,
    StoredModel,
    from_survival,
    scaled,
)
from .acceptance_requests import CurveAcceptance, SiblingAcceptance
from .acceptance_tree import TreeAcceptance
from .errors import ConfigError, TraceError
from .state import DrafterState
from .strategy import Strategy

Positive = Annotated[float, Field(gt=0)]
Base = Annotated[
    ConstantAcceptance
    | GeometricAcceptance
    | FittedAcceptance
    | BatchAcceptance
    | TreeAcceptance
    | CurveAcceptance
    | SiblingAcceptance,
    Field(discriminator="kind"),
]


class Freshness(BaseModel):
    """A drafter's level: the chance of a drafted token over that of a fully trained, fresh drafter's, 0 to 1.

        fresh(updates)      = 1 - (1 - untrained) * exp(-updates / updates_to_train)
        level(age, updates) = floor + (fresh(updates) - floor) * exp(-age / age_steps)

    `age` counts RL steps since the last update, `updates` the updates so far. What is never updated falls to `floor`.

    The defaults are an assumption, not a fit. TLT accepts 6.53 tokens with an adaptive drafter and 4.59 with the one it
    began with (arXiv 2511.16665, table 6, bonus included): `untrained` is the factor on every token's chance that leads
    from the one to the other on the curve fitted to its figure 13, at 8 levels, 4 branches, 48 tokens. A stale drafter
    is taken to fall back to that. Figure 15 shows top-3 accuracy dropping at each target update and back within a few
    training iterations, hence the few updates; over how many RL steps acceptance falls without any, nobody reports.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    untrained: Share = 0.885
    updates_to_train: Positive = 3.0
    floor: Share = 0.885
    age_steps: Positive = 10.0

    @model_validator(mode="after")
    def _ages_downwards(self) -> Freshness:
        if self.floor > self.untrained:
            raise ValueError(f"floor = {self.floor} is above untrained = {self.untrained}: age would improve a drafter")
        return self

    def level(self, age: float, updates: float) -> float:
        """The drafter's level, 1 for a fresh and fully trained one.

        >>> Freshness(untrained=0.5, floor=0.5, age_steps=10).level(age=0, updates=0)
        0.5
        """
        fresh = 1.0 - (1.0 - self.untrained) * float(np.exp(-updates / self.updates_to_train))
        return self.floor + (fresh - self.floor) * float(np.exp(-age / self.age_steps))


class ScaledAcceptance(AcceptanceModel):
    """A model in which each token of one drafter has its chance multiplied by `ratio`, at most 1."""

    base: SerializeAsAny[AcceptanceModel]
    drafter: str
    ratio: Annotated[float, Field(ge=0)]

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.base.drafters

    def at(self, batch: int) -> AcceptanceModel:
        held = self.base.at(batch)
        if held is self.base:
            return self
        # One object per band: callers remember models by identity.
        if id(held) not in self._at:
            self._at[id(held)] = ScaledAcceptance(base=held, drafter=self.drafter, ratio=self.ratio)
        return self._at[id(held)]

    @cached_property
    def _at(self) -> dict[int, ScaledAcceptance]:
        return {}

    def survival(self, strategy: Strategy) -> FloatArray:
        kept = self.base.survival(strategy)
        return scaled(kept, self.ratio) if strategy.drafter == self.drafter else kept

    def distribution(self, strategy: Strategy) -> FloatArray:
        return from_survival(self.survival(strategy))

    def num_drafted(self, strategy: Strategy) -> float:
        return self.base.num_drafted(strategy)


class ScaledRequests(RequestAcceptance):
    """The same for a model that tells requests apart."""

    base: SerializeAsAny[RequestAcceptance]
    drafter: str
    ratio: Annotated[float, Field(ge=0)]

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.base.drafters

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> FloatArray:
        return self.base.levels(drafter, keys, seed)

    def survival(
        self, strategy: Strategy, levels: FloatArray, generated_tokens: FloatArray, num_siblings: FloatArray
    ) -> FloatArray:
        kept = self.base.survival(strategy, levels, generated_tokens, num_siblings)
        return scaled(kept, self.ratio) if strategy.drafter == self.drafter else kept

    def num_drafted(self, strategy: Strategy) -> float:
        return self.base.num_drafted(strategy)


class Measured(BaseModel):
    """The drafter's state in which the base model was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    age: Annotated[float, Field(ge=0)] = 0.0
    updates: Annotated[float, Field(ge=0)]


class FreshAcceptance(StoredModel):
    """Any model as it holds for a drafter of some age and training: ask `at_freshness`.

    Only strategies of `drafter` are touched. `measured` is the state that the base describes, None the fresh and fully
    trained one: chances are scaled by level(state) / level(measured).
    """

    kind: Literal["fresh"] = "fresh"
    base: Base
    drafter: str = "learned"
    freshness: Freshness = Freshness()
    measured: Measured | None = None
    notes: tuple[str, ...] = ()

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.base.drafters

    def ratio(self, state: DrafterState) -> float:
        """What the chance of every drafted token is multiplied by."""
        level = self.freshness.level(state.age, state.updates)
        if self.measured is None:
            return level
        reference = self.freshness.level(self.measured.age, self.measured.updates)
        if reference <= 0.0:
            raise ConfigError(
                f"freshness: the level of the measured drafter (age {self.measured.age:g}, "
                f"{self.measured.updates:g} updates) is 0: nothing can be scaled from it"
            )
        return level / reference

    def at_freshness(self, state: DrafterState) -> AcceptanceModel | RequestAcceptance:
        """The model for a drafter in this state."""
        ratio = self.ratio(state)
        if isinstance(self.base, RequestAcceptance):
            return ScaledRequests(base=self.base, drafter=self.drafter, ratio=ratio)
        return ScaledAcceptance(base=self.base, drafter=self.drafter, ratio=ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessFit:
    """`chance` is that of a drafted token of the fresh and trained drafter, `worst` the largest absolute residual."""

    freshness: Freshness
    chance: float
    worst: float
    notes: tuple[str, ...]


_FOREVER = 1e9


def fit_freshness(acceptance: pd.DataFrame, drafter: str) -> FreshnessFit:
    """Fit age and training to acceptance.parquet, where it has a drafter at several ages or numbers of updates.

    What does not vary is not identified: then it has no effect, and a note says so. Raises ConfigError where neither
    varies, TraceError for an accepted length outside [0, max_depth].
    """
    rows = acceptance[acceptance["drafter"] == drafter]
    cells = _chances(rows)
    aging, training = cells["age"].nunique() > 1, cells["updates"].nunique() > 1
    if not (aging or training):
        raise ConfigError(
            f"acceptance.parquet has {drafter or 'the drafter'!r} at one age and number of updates only: freshness "
            f"needs several; annotate the trace with older drafters, or state an assumption"
        )
    age, updates = cells["age"].to_numpy(np.float64), cells["updates"].to_numpy(np.float64)
    chance, weight = cells["chance"].to_numpy(np.float64), np.sqrt(cells["tried"].to_numpy(np.float64))

    def model(p: FloatArray) -> tuple[float, Freshness]:
        top, low, part = 1.0 / (1.0 + np.exp(-np.clip(p[:3], -30, 30)))
        untrained = float(low) if training else 1.0
        floor = untrained * float(part) if aging else untrained
        spans = np.exp(np.clip(p[3:], -7, 14))
        return float(top), Freshness(
            untrained=untrained,
            updates_to_train=float(spans[0]) if training else 1.0,
            floor=floor,
            age_steps=float(spans[1]) if aging else _FOREVER,
        )

    def predicted(p: FloatArray) -> FloatArray:
        top, freshness = model(p)
        return np.array([top * freshness.level(a, u) for a, u in zip(age, updates, strict=True)])

    most = min(max(float(chance.max()), 1e-6), 1 - 1e-6)
    start = np.array([np.log(most / (1 - most)), 1.0, 1.0, np.log(1 + updates.max() / 4), np.log(1 + age.max() / 4)])
    found = least_squares(lambda p: weight * (predicted(p) - chance), start, x_scale="jac", max_nfev=2000).x
    top, freshness = model(found)
    notes = [] if aging else [f"{drafter}: one age only, so acceptance is taken not to fall with age"]
    notes += [] if training else [f"{drafter}: one number of updates only, so the gain from training is unknown"]
    worst = float(np.abs(predicted(found) - chance).max())
    return FreshnessFit(freshness=freshness, chance=top, worst=worst, notes=tuple(notes))


def _chances(rows: pd.DataFrame) -> pd.DataFrame:
    """Per age and updates: drafted tokens that were tried, and the share of them that was kept."""
    tried, kept = [], []
    for most, listed in zip(rows["max_depth"].tolist(), rows["accept_if_drafted"].tolist(), strict=True):
        accepted = np.asarray(listed, np.int64)
        if len(wrong := accepted[(accepted < 0) | (accepted > most)]):
            raise TraceError(f"acceptance.parquet: accept_if_drafted {wrong[0]} is outside [0, max_depth = {most}]")
        tried.append(int(np.minimum(accepted + 1, most).sum()))
        kept.append(int(accepted.sum()))
    updates = rows["drafter_updates"] if "drafter_updates" in rows else pd.Series(np.nan, index=rows.index)
    known = updates.astype("float64").fillna(0.0) if updates.notna().all() else pd.Series(0.0, index=rows.index)
    table = pd.DataFrame({"age": rows["drafter_age"], "updates": known, "tried": tried, "kept": kept})
    cells = table.groupby(["age", "updates"], as_index=False).sum()
    cells = cells[cells["tried"] > 0]
    return cells.assign(chance=cells["kept"] / cells["tried"])
