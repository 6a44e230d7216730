"""Acceptance that differs by request: it grows with the group's finished samples."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from tltlab.arrays import Floats
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.strategy import Strategy

from .base import (
    AcceptanceModel,
    ChainAcceptance,
    ConstantAcceptance,
    GeometricAcceptance,
    LengthsAcceptance,
    Positive,
    RequestArrays,
    Share,
    known_drafter,
    only_chains,
)
from .measured import MeasuredAcceptance
from .trees import TreeAcceptance

Alike = (
    ConstantAcceptance | GeometricAcceptance | ChainAcceptance | LengthsAcceptance | MeasuredAcceptance | TreeAcceptance
)
"""Models in files that treat all requests alike."""
DraftedShare = Annotated[float, Field(gt=0, le=1)]


class SiblingAcceptance(AcceptanceModel):
    """A model-free drafter that retrieves from its group: acceptance grows with the samples that have finished.

    A drafted token is kept, while all before it were, with probability

        alpha = most - (most - alone) * (1 + r)^-exponent,      r = finished siblings + generated / own_tokens:

    from `alone` with nothing to retrieve from towards `most`. `own_tokens` generated tokens of the response itself are
    worth one finished sibling, None: they are worth nothing. The text of siblings that still run does not count.
    """

    varies_by = "request"
    kind: Literal["siblings"] = "siblings"
    drafter: str | None = None
    alone: Share
    most: Share
    exponent: Positive
    own_tokens: Positive | None = None
    drafted_share: DraftedShare = 1.0
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _grows(self) -> SiblingAcceptance:
        if self.most < self.alone:
            raise ValueError(f"most = {self.most} is less than alone = {self.alone}: siblings can only help")
        return self

    @property
    def drafters(self) -> tuple[str, ...]:
        return () if self.drafter is None else (self.drafter,)

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        return drafter in self.drafters if self.drafters else not drafters[drafter].has_network

    def alpha(self, num_siblings: Floats, generated_tokens: Floats) -> Floats:
        """The chance to keep one more token."""
        references = num_siblings + (0.0 if self.own_tokens is None else generated_tokens / self.own_tokens)
        return self.most - (self.most - self.alone) * (1.0 + references) ** -self.exponent

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        only_chains(strategy, "sibling acceptance")
        if self.drafter is not None:
            known_drafter(strategy, self.drafters, "the acceptance model")
        alpha = self.alpha(requests.num_siblings, requests.generated_tokens)
        return alpha[:, None] ** np.arange(1, strategy.reach + 1)

    def num_drafted(self, strategy: Strategy) -> float:
        return self.drafted_share * strategy.reach
