"""What any acceptance model answers, and those that treat all requests alike or tell them apart.

Everywhere `accepted` counts without the bonus token and `tokens` with it. `survival[i - 1]` is P(accepted >= i),
i = 1..`Strategy.reach`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from tltlab.arrays import Bytes, Floats
from tltlab.config import FiniteModel, StoredModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

Key = tuple[int, str, int, int]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Variation = Literal["nothing", "request", "position"]


class Acceptance(Protocol):
    """How many drafted tokens the target accepts: what a model of any kind answers.

    `drafters` names the drafters it knows, () where it holds for any. `trained_drafter` is the one whose age and
    training change the acceptance by a model, None where they do not. `varies_by` says what tells two drafts of one
    strategy at one batch size apart: nothing, the request, or the recorded position.
    """

    @property
    def drafters(self) -> tuple[str, ...]: ...

    @property
    def trained_drafter(self) -> str | None: ...

    @property
    def varies_by(self) -> Variation: ...

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        """Whether it speaks of a drafter; constant and geometric models are said to speak of any.

        `drafters` say what the drafter is: a model of trees that names none is for networks, one of siblings for text.
        """

    def outside(self, strategy: Strategy) -> list[str]:
        """What about a strategy lies outside of what the model was measured on."""

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Settled:
        """The model for drafters in these states; one that is not named counts as never updated, and of age 0."""

    def at_best(self, drafters: Iterable[str]) -> Settled:
        """The most that these drafters accept in any state: for bounds."""


class Settled(Acceptance, Protocol):
    """Acceptance by drafters in a known state: a model that can be asked.

    Without speculation nothing is drafted, one token comes out, and no model is asked. All raise ConfigError for a
    strategy that the model does not cover.
    """

    def at(self, batch: int) -> Settled:
        """The model that holds at a batch size: itself, unless it tells batch sizes apart."""

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError where some batch size has no acceptance for the strategy."""

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        """Expected tokens of one request in one iteration, the bonus token included; NaN where requests differ."""

    def num_drafted(self, strategy: Strategy) -> float:
        """Expected tokens really drafted per request and iteration: a drafter may return fewer than asked."""

    def cdf(self, strategy: Strategy) -> Floats | None:
        """P(accepted <= j) for j = 0..reach - 1; None where requests differ."""

    def by_request(self) -> ByRequest:
        """The model request by request; ConfigError where acceptance is replayed."""

    def positions(self, drafter: str, key: Key, num_tokens: int) -> Bytes:
        """Where acceptance is replayed: acceptable tokens at positions 0..num_tokens - 1 of one request."""


class ByRequest(Protocol):
    """Chances of every request; the arrays have one entry per request."""

    @property
    def steady(self) -> bool:
        """Whether the chances of a request are the same throughout its response."""

    def at(self, batch: int) -> ByRequest: ...

    def num_drafted(self, strategy: Strategy) -> float: ...

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        """One level per request, known or drawn from (seed, key) alone: order and company do not matter."""

    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        """P(accepted >= i) for i = 1..reach, shape (requests, reach).

        `num_siblings` counts finished samples of the same group.
        """

    def most_tokens(self, strategy: Strategy, levels: Floats, num_tokens: Floats, num_siblings: Floats) -> Floats:
        """Expected tokens per iteration that a response of `num_tokens` never exceeds, whatever finishes when."""


class SettledModel(FiniteModel, StoredModel, ABC):
    """The answers that most models share. What they `write` is for `load_acceptance`."""

    varies_by: ClassVar[Variation]

    @property
    def drafters(self) -> tuple[str, ...]:
        return ()

    @property
    def trained_drafter(self) -> str | None:
        return None

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        return not self.drafters or drafter in self.drafters

    def outside(self, strategy: Strategy) -> list[str]:
        return []

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Self:
        return self

    def at_best(self, drafters: Iterable[str]) -> Self:
        return self

    def by_request(self) -> Self:
        return self

    @property
    def steady(self) -> bool:
        return self.varies_by == "nothing"

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        return np.zeros(len(keys))

    def positions(self, drafter: str, key: Key, num_tokens: int) -> Bytes:
        raise TypeError("a model has no recorded positions: ask for chances")

    def num_drafted(self, strategy: Strategy) -> float:
        return float(strategy.tokens_to_verify - 1)

    @abstractmethod
    def best_survival(
        self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats
    ) -> Floats:
        """P(accepted >= i), shape (requests, reach), at whichever batch size has the most."""


class AcceptanceModel(SettledModel):
    """Acceptance as a distribution that is the same for every request and position."""

    varies_by = "nothing"

    @abstractmethod
    def distribution(self, strategy: Strategy) -> Floats:
        """P(accepted = j) for j = 0..reach. Raises ConfigError for a strategy that the model does not cover."""

    def at(self, batch: int) -> AcceptanceModel:
        return self

    @property
    def by_batch(self) -> tuple[AcceptanceModel, ...]:
        """The models that hold at different batch sizes, each once."""
        return (self,)

    def check(self, strategy: Strategy) -> None:
        for model in self.by_batch:
            model.distribution(strategy)

    def curve(self, strategy: Strategy) -> Floats:
        """P(accepted >= i) for i = 1..reach."""
        tail = np.cumsum(self.distribution(strategy)[::-1])[::-1][1:]
        return np.clip(tail, 0.0, 1.0)

    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        curve = self.curve(strategy)
        return np.broadcast_to(curve, (len(levels), len(curve)))

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        p = self.distribution(strategy)
        return 1.0 + float(p @ np.arange(len(p)))

    def best_survival(
        self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats
    ) -> Floats:
        best: Floats = np.max([model.curve(strategy) for model in self.by_batch], axis=0)
        return np.broadcast_to(best, (len(levels), len(best)))

    def most_tokens(self, strategy: Strategy, levels: Floats, num_tokens: Floats, num_siblings: Floats) -> Floats:
        return np.full(len(levels), max(model.tokens_per_iteration(strategy) for model in self.by_batch))

    def cdf(self, strategy: Strategy) -> Floats | None:
        below: Floats = np.cumsum(self.distribution(strategy))[:-1]
        return below

    def scaled(self, drafter: str, ratio: float) -> ScaledAcceptance:
        """The model in which each token of one drafter has its chance multiplied by `ratio`, at most 1."""
        return ScaledAcceptance(base=self, drafter=drafter, ratio=ratio)


class RequestAcceptance(SettledModel):
    """Acceptance that differs by request: by its own level, its progress, or its finished siblings."""

    varies_by = "request"

    @abstractmethod
    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        """As in `ByRequest`. Raises ConfigError for a strategy that the model does not cover."""

    def at(self, batch: int) -> RequestAcceptance:
        return self

    @property
    def by_batch(self) -> tuple[RequestAcceptance, ...]:
        """The models that hold at different batch sizes, each once."""
        return (self,)

    def best_survival(
        self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats
    ) -> Floats:
        each = [model.survival(strategy, levels, generated_tokens, num_siblings) for model in self.by_batch]
        best: Floats = np.max(each, axis=0)
        return best

    def check(self, strategy: Strategy) -> None:
        nobody = np.zeros(0)
        for model in self.by_batch:
            model.survival(strategy, nobody, nobody, nobody)

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        return math.nan

    def cdf(self, strategy: Strategy) -> Floats | None:
        return None

    def most_tokens(self, strategy: Strategy, levels: Floats, num_tokens: Floats, num_siblings: Floats) -> Floats:
        """Holds for models that are monotone in progress and in siblings."""
        none = np.zeros_like(levels)
        corners = [
            model.survival(strategy, levels, at, beside).sum(axis=1)
            for model in self.by_batch
            for at in (none, num_tokens)
            for beside in (none, num_siblings)
        ]
        most: Floats = 1.0 + np.max(corners, axis=0)
        return most

    def scaled(self, drafter: str, ratio: float) -> ScaledRequests:
        """The model in which each token of one drafter has its chance multiplied by `ratio`, at most 1."""
        return ScaledRequests(base=self, drafter=drafter, ratio=ratio)


class Wrapped(SettledModel):
    """A model that changes what another one says, its `base`, at every batch size alike."""

    if TYPE_CHECKING:
        base: AcceptanceModel | RequestAcceptance

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.base.drafters

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        return self.base.knows(drafter, drafters)

    def outside(self, strategy: Strategy) -> list[str]:
        return self.base.outside(strategy)

    def num_drafted(self, strategy: Strategy) -> float:
        return self.base.num_drafted(strategy)

    def at(self, batch: int) -> Self:
        return self._around(self.base.at(batch))

    @property
    def by_batch(self) -> tuple[Self, ...]:
        return tuple(self._around(model) for model in self.base.by_batch)

    def _around(self, model: Any) -> Self:
        if model is self.base:
            return self
        # One object per batch size: callers remember models by identity.
        if id(model) not in self._wrapped:
            self._wrapped[id(model)] = type(self)(**dict(self) | {"base": model})
        return self._wrapped[id(model)]

    @cached_property
    def _wrapped(self) -> dict[int, Self]:
        return {}


class WrappedAcceptance(Wrapped, AcceptanceModel):
    """A model around one that treats all requests alike, as it does itself."""

    base: SerializeAsAny[AcceptanceModel]


class ScaledAcceptance(WrappedAcceptance):
    """A model in which each token of one drafter has its chance multiplied by `ratio`, at most 1."""

    drafter: str
    ratio: Annotated[float, Field(ge=0)]

    def curve(self, strategy: Strategy) -> Floats:
        curve = self.base.curve(strategy)
        return scaled(curve, self.ratio) if strategy.drafter == self.drafter else curve

    def distribution(self, strategy: Strategy) -> Floats:
        return from_survival(self.curve(strategy))


class ScaledRequests(Wrapped, RequestAcceptance):
    """The same for a model that tells requests apart."""

    base: SerializeAsAny[RequestAcceptance]
    drafter: str
    ratio: Annotated[float, Field(ge=0)]

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        return self.base.levels(drafter, keys, seed)

    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        survival = self.base.survival(strategy, levels, generated_tokens, num_siblings)
        return scaled(survival, self.ratio) if strategy.drafter == self.drafter else survival

    @property
    def steady(self) -> bool:
        return self.base.steady


class ConstantAcceptance(AcceptanceModel):
    """Every speculative iteration yields `tokens` per request, but never more than the draft's reach plus the bonus.

    Sampled, a fractional value is a draw between the two whole numbers beside it.
    """

    kind: Literal["constant"] = "constant"
    tokens: Annotated[float, Field(ge=1)]

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        return min(self.tokens, strategy.reach + 1.0)

    def distribution(self, strategy: Strategy) -> Floats:
        accepted = self.tokens_per_iteration(strategy) - 1.0
        low = math.floor(accepted)
        p = np.zeros(strategy.reach + 1)
        p[low] = 1.0 - (accepted - low)
        if accepted > low:
            p[low + 1] = accepted - low
        return p


class GeometricAcceptance(AcceptanceModel):
    """Chain drafts, each token kept with probability `alpha` while all before it were kept.

    A draft of depth d yields (1 - alpha^(d+1)) / (1 - alpha) tokens on average (Leviathan et al. 2023, equation 1).
    """

    kind: Literal["geometric"] = "geometric"
    alpha: Share

    def distribution(self, strategy: Strategy) -> Floats:
        only_chains(strategy, "geometric acceptance")
        return from_survival(np.power(self.alpha, np.arange(1, strategy.reach + 1, dtype=np.float64)))


class ChainAcceptance(AcceptanceModel):
    """Chain drafts, kept up to token i with the chance `kept[i - 1]`; nothing is known of deeper ones.

    >>> ChainAcceptance(kept=(0.8, 0.6)).tokens_per_iteration(Strategy.chain("ngram", 2))
    2.4
    """

    kind: Literal["chances"] = "chances"
    kept: Annotated[tuple[Share, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if any(b > a for a, b in pairwise(self.kept)):
            raise ValueError(f"kept: no chance may be larger than the one before, got {'/'.join(map(str, self.kept))}")
        return self

    def distribution(self, strategy: Strategy) -> Floats:
        only_chains(strategy, "acceptance token by token")
        if strategy.reach > len(self.kept):
            raise ConfigError(
                f"{len(self.kept)} chances are given, one for each token of a draft, and {strategy} is deeper"
            )
        return from_survival(np.array(self.kept[: strategy.reach]))


def from_survival(survival: Floats) -> Floats:
    """P(accepted = j), j = 0..reach, from P(accepted >= i), i = 1..reach."""
    bounds = np.concatenate([[1.0], survival, [0.0]])
    p: Floats = bounds[:-1] - bounds[1:]
    return p


def scaled(survival: Floats, ratio: float) -> Floats:
    """The survival when each drafted token's chance, given those before it, is `ratio` times as large, at most 1.

    The last axis runs over the draft's tokens.
    """
    rescaled: Floats = np.cumprod(np.minimum(1.0, chances(survival) * ratio), axis=-1)
    return rescaled


def chances(survival: Floats) -> Floats:
    """P(accepted >= i given >= i - 1) along the last axis; 0 where that never happens."""
    before = np.concatenate([np.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1)
    conditional: Floats = np.divide(survival, before, out=np.zeros_like(before), where=before > 0)
    return conditional


def only_chains(strategy: Strategy, subject: str) -> None:
    """ConfigError for a tree."""
    if strategy.top_k > 1:
        raise ConfigError(f"{subject} describes chain drafts; {strategy} is a tree (top_k = {strategy.top_k})")


def known_drafter(strategy: Strategy, drafters: Collection[str], subject: str) -> None:
    """ConfigError unless the strategy's drafter is among the names `drafters`."""
    if strategy.drafter not in drafters:
        raise ConfigError(
            f"{subject} knows no drafter {strategy.drafter!r}, only {', '.join(sorted(drafters)) or 'none'}: "
            "name a model such as geometric:0.7, which takes any"
        )
