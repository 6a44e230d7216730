"""How a drafter's acceptance falls with its age and rises with its training, and that on top of any other model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from tltlab.arrays import Floats
from tltlab.config import FiniteModel
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .base import Acceptance, AcceptanceModel, Positive, RequestArrays, Scaled, Share, Wrapped
from .context import ContextAcceptance
from .curves import Alike, SiblingAcceptance

Base = Alike | SiblingAcceptance | ContextAcceptance


class Freshness(FiniteModel):
    """A drafter's level: the chance of a drafted token over that of a fully trained, fresh drafter's, 0 to 1.

        fresh(updates)      = 1 - (1 - untrained) * exp(-updates / updates_to_train)
        level(age, updates) = floor + (fresh(updates) - floor) * exp(-age / age_steps)

    `age` counts RL steps since the last update, `updates` the updates so far. A drafter that is never updated falls to
    `floor`.

    The defaults are an assumption, not a fit. TLT accepts 6.53 tokens with an adaptive drafter and 4.59 with the one it
    began with (arXiv 2511.16665, table 6, bonus included): `untrained` is the factor on every token's chance that leads
    from the one to the other on the curve fitted to its figure 13, at 8 levels, 4 branches, 48 tokens. A stale drafter
    is taken to fall back to that. Figure 15 shows top-3 accuracy dropping at each target update and back within a few
    training iterations, hence the few updates. No source reports over how many RL steps acceptance falls without
    updates.
    """

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
        return float(self.levels(np.array(age), np.array(updates)))

    def levels(self, age: Floats, updates: Floats) -> Floats:
        """The levels of many states."""
        fresh = 1.0 - (1.0 - self.untrained) * np.exp(-updates / self.updates_to_train)
        return np.asarray(self.floor + (fresh - self.floor) * np.exp(-age / self.age_steps), np.float64)


class MeasuredState(FiniteModel):
    """The drafter's state in which the base model was measured."""

    age: Annotated[float, Field(ge=0)] = 0.0
    updates: Annotated[float, Field(ge=0)]


class FreshAcceptance(Wrapped, AcceptanceModel):
    """Any model as it holds for a drafter of some age and training: ask `at_freshness`.

    Only strategies of `drafter` are touched. `measured` is the state that the base describes, None the fresh and fully
    trained one: chances are scaled by level(state) / level(measured).
    """

    kind: Literal["fresh"] = "fresh"
    base: Annotated[Base, Field(discriminator="kind")]
    drafter: str = "learned"
    freshness: Freshness = Freshness()
    measured: MeasuredState | None = None
    notes: tuple[str, ...] = ()

    # For drafters in a known state the base sets `varies_by`; before that, no two drafts need be alike.
    varies_by = "request"

    @property
    def trained_drafter(self) -> str:
        return self.drafter

    def with_parts(self, parts: Sequence[Acceptance]) -> FreshAcceptance:
        return FreshAcceptance.model_validate({**dict(self), "base": parts[0]})

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Scaled:
        return self.at_freshness(drafters.get(self.drafter, DrafterState()))

    def at_best(self, drafters: Iterable[str]) -> Scaled:
        return self.in_state(dict.fromkeys(drafters, DrafterState(age=0, updates=sys.maxsize)))

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        raise TypeError("acceptance depends on the drafter's age and training: ask in_state(drafters)")

    def ratio(self, state: DrafterState) -> float:
        """Factor on the chance of every drafted token."""
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

    def at_freshness(self, state: DrafterState) -> Scaled:
        """The model for a drafter in this state."""
        return Scaled(self.base, (self.drafter,), self.ratio(state))
