"""Acceptance that differs by request: a level of its own, or growth with the group's finished samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, TypeAdapter, field_validator, model_validator

from tltlab.arrays import Floats
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

from .base import (
    Acceptance,
    AcceptanceModel,
    ChainAcceptance,
    ConstantAcceptance,
    GeometricAcceptance,
    Key,
    LengthsAcceptance,
    Positive,
    RequestArrays,
    Share,
    Wrapped,
    chances,
    known_drafter,
    only_chains,
)
from .measured import MeasuredAcceptance
from .per_drafter import PerDrafter
from .trees import TreeAcceptance

_LEVELS, _WEIGHTS = np.polynomial.hermite_e.hermegauss(41)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
Alike = (
    ConstantAcceptance | GeometricAcceptance | ChainAcceptance | LengthsAcceptance | MeasuredAcceptance | TreeAcceptance
)
"""Models in files that treat all requests alike."""
_ALIKE: TypeAdapter[Alike] = TypeAdapter(Annotated[Alike, Field(discriminator="kind")])
DraftedShare = Annotated[float, Field(gt=0, le=1)]


def normals(seed: int, keys: Iterable[Key]) -> Floats:
    """A standard normal per request, a hash of (seed, key) and of nothing else."""
    quantile = NormalDist().inv_cdf
    digests = (hashlib.blake2b(repr(("level", seed, key)).encode(), digest_size=8).digest() for key in keys)
    return np.array([quantile(((int.from_bytes(d, "little") >> 11) + 0.5) * 2.0**-53) for d in digests], np.float64)


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
        alpha: Floats = self.most - (self.most - self.alone) * (1.0 + references) ** -self.exponent
        return alpha

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        only_chains(strategy, "sibling acceptance")
        if self.drafter is not None:
            known_drafter(strategy, self.drafters, "the acceptance model")
        alpha = self.alpha(requests.num_siblings, requests.generated_tokens)
        survival: Floats = alpha[:, None] ** np.arange(1, strategy.reach + 1)
        return survival

    def num_drafted(self, strategy: Strategy) -> float:
        return self.drafted_share * strategy.reach


class SpreadAcceptance(Wrapped, AcceptanceModel):
    """A model that treats requests alike, as it is where each has a level of its own: some are easier to draft for.

    The logit of a drafted token's conditional acceptance is that of `base` plus a shift plus the request's level. The
    level is normal with standard deviation `spread`, drawn once from (seed, key), with the same quantile for all
    drafters. The shift, one for each strategy and batch size, keeps the mean over drafts, which is what is measured:
    responses of one length take drafts in inverse proportion to their tokens per draft A, so that 1 / E[1 / A] is the
    base's. The work is then the same, and what changes is who ends last. Trees too: their chances are by level.

    >>> easy_and_hard = SpreadAcceptance(base=GeometricAcceptance(alpha=0.7), spread=0.8)
    """

    varies_by = "request"
    kind: Literal["spread"] = "spread"
    base: SerializeAsAny[AcceptanceModel]
    spread: Annotated[float, Field(ge=0, le=5)]
    notes: tuple[str, ...] = ()

    @field_validator("base", mode="before")
    @classmethod
    def _load_base(cls, base: object) -> object:
        model = _ALIKE.validate_python(base) if isinstance(base, dict) else base
        if getattr(model, "varies_by", "nothing") != "nothing":
            raise ValueError(f"base: acceptance of kind {getattr(model, 'kind', '')!r} varies by request already")
        return model

    def with_parts(self, parts: Sequence[Acceptance]) -> SpreadAcceptance:
        return SpreadAcceptance.model_validate({**dict(self), "base": parts[0]})

    @property
    def steady(self) -> bool:
        return True

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        # All turns of a response are as easy to draft for.
        return self.spread * normals(seed, [(*key[:3], 0) for key in keys])

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        return _survival(self._shifted(strategy), requests.levels)

    @cached_property
    def _logits(self) -> dict[Strategy, Floats]:
        return {}

    def _shifted(self, strategy: Strategy) -> Floats:
        """Logits of the chances at level 0, shape (reach,); infinite where a token is always or never kept."""
        if strategy not in self._logits:
            curve = self.base.curve(strategy)
            chance = chances(curve)
            with np.errstate(divide="ignore"):
                logits = np.log(chance) - np.log1p(-chance)
            mean, levels = 1.0 + float(curve.sum()), self.spread * _LEVELS
            low, high = -10.0, 10.0
            for _ in range(50):
                shift = (low + high) / 2
                tokens = 1.0 + _survival(logits + shift, levels).sum(axis=1)
                low, high = (shift, high) if 1.0 / float(_WEIGHTS @ (1.0 / tokens)) < mean else (low, shift)
            self._logits[strategy] = logits + shift
        return self._logits[strategy]


def _survival(logits: Floats, levels: Floats) -> Floats:
    """P(accepted >= i), shape (requests, reach)."""
    return np.asarray(np.cumprod(1.0 / (1.0 + np.exp(-(logits[None, :] + levels[:, None]))), axis=1), np.float64)


def spread_over_requests(model: Acceptance, spread: float) -> Acceptance:
    """The model with acceptance that differs by request; itself at `spread` 0.

    Raises ConfigError for a model that varies by request already.
    """
    if not spread:
        return model
    if isinstance(model, PerDrafter):
        return model.changed(lambda part: spread_over_requests(part, spread), f", spread {spread:g}")
    if isinstance(model, Wrapped) and not isinstance(model, SpreadAcceptance):
        # Freshness and context hold around it.
        return model.with_parts([spread_over_requests(part, spread) for part in model.parts])
    if isinstance(model, AcceptanceModel) and model.varies_by == "nothing":
        return SpreadAcceptance(base=model, spread=spread)
    raise ConfigError(
        f"acceptance of kind {getattr(model, 'kind', 'trace')!r} varies by request already: a spread is for "
        "models that treat all requests alike"
    )
