"""The contract of acceptance models, and the models that a number or a few describe.

Everywhere `accepted` counts without the bonus token and `tokens` with it. `survival[i - 1]` is P(accepted >= i),
i = 1..`Strategy.reach`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from tltlab.arrays import Bytes, Floats
from tltlab.config import FiniteModel, Share, StoredModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.state import DrafterState, Key
from tltlab.strategy import Strategy

Variation = Literal["nothing", "request", "position"]

REFRESH_ITERATIONS = 32
"""Iterations for which chances are held that may change fast, such as with the samples of a group that finish."""
UNKNOWN = (
    "no acceptance is known: the trace has neither acceptance.parquet nor acceptance.json nor iterations that "
    "speculated. Record with TLTLAB_POLICY=explore, or replay its text with 'tltlab trace annotate'; or give "
    "--acceptance {}=geometric:ALPHA, a fitted file, or default for a usual one of each drafter"
)
"""End of a message, with the name of a drafter to put in."""


@dataclass(frozen=True, slots=True)
class RequestArrays:
    """Requests that a model answers for, one entry each: tokens generated, finished samples of its group.

    `prompt_tokens` is one number where all prompts are of one length.
    """

    generated_tokens: Floats
    num_siblings: Floats
    prompt_tokens: Floats | float = 0.0

    @property
    def context_tokens(self) -> Floats:
        """Tokens of prompt and response before the draft."""
        return self.generated_tokens + self.prompt_tokens

    @classmethod
    def zeros(cls, num_requests: int) -> RequestArrays:
        """Requests at their start, the first of their groups."""
        zeros = np.zeros(num_requests)
        return cls(zeros, zeros)

    def __len__(self) -> int:
        return len(self.generated_tokens)

    def alike(self, row: Floats) -> Floats:
        """One row for every request, shape (requests, reach)."""
        return np.broadcast_to(row, (len(self), len(row)))


class Acceptance(ABC):
    """Model of how many drafted tokens the target accepts. A subclass defines `survival`; the rest follows from it.

    `in_state` returns the model for drafters of some age and training, `at` the one for a batch size. Plain decoding
    drafts nothing and yields one token: no model is asked.
    """

    @property
    def varies_by(self) -> Variation:
        """Cause of different acceptance of two drafts of one strategy at one batch size."""
        return "nothing"

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that it describes, () where it holds for any."""
        return ()

    @property
    def trained_drafter(self) -> str | None:
        """The drafter whose age and training change its acceptance, None where they do not."""
        return None

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        """Return whether the model describes a drafter.

        `drafters` have its traits: a model of trees that names no drafter is for networks, one of siblings for text.
        """
        return not self.drafters or drafter in self.drafters

    def outside(self, strategy: Strategy) -> list[str]:
        """Names of the strategy's settings that lie outside of what was measured."""
        return []

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Acceptance:
        """The model for drafters in these states; one that is not named counts as never updated, and of age 0."""
        return self

    def at_best(self, drafters: Iterable[str]) -> Acceptance:
        """The most that these drafters accept in any state: for bounds."""
        return self

    def at(self, batch: int) -> Acceptance:
        """The model that holds at a batch size, the same object for the same batch."""
        return self

    def by_batch(self, drafter: str) -> tuple[Acceptance, ...]:
        """The models that hold for a drafter at different batch sizes, each once."""
        return (self,)

    def at_context(self, context_tokens: float) -> Acceptance:
        """The model of requests that all have so many tokens of prompt and response; for prices."""
        return self

    def within(self, context_tokens: float) -> Acceptance:
        """The model of requests that never have more tokens of prompt and response: a simpler one where that does."""
        return self

    @abstractmethod
    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        """P(accepted >= i) for i = 1..reach, shape (requests, reach); one row for all where requests are alike.

        Raises ConfigError for a strategy that the model does not cover.
        """

    @property
    def refresh_iterations(self) -> int:
        """Iterations for which a simulation may hold the chances of a request."""
        return REFRESH_ITERATIONS

    def positions(self, drafter: str, key: Key, num_tokens: int) -> Bytes:
        """Acceptable tokens at positions 0..num_tokens - 1 of one request, where acceptance is replayed."""
        raise TypeError("a model has no recorded positions: ask for chances")

    def num_drafted(self, strategy: Strategy) -> float:
        """Expected tokens really drafted per request and iteration: a drafter may return fewer than asked."""
        return float(strategy.tokens_to_verify - 1)

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError where some batch size has no acceptance for the strategy."""
        for model in self.by_batch(strategy.drafter):
            model.survival(strategy, RequestArrays.zeros(0))

    def curve(self, strategy: Strategy) -> Floats:
        """P(accepted >= i) for i = 1..reach of one request at its start."""
        row: Floats = self.survival(strategy, RequestArrays.zeros(1))[0]
        return row

    def distribution(self, strategy: Strategy) -> Floats:
        """P(accepted = j) for j = 0..reach, as `curve`."""
        return from_survival(self.curve(strategy))

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        """Expected tokens of one request in one iteration, the bonus token included; NaN where requests differ."""
        if self.varies_by != "nothing":
            return math.nan
        p = self.distribution(strategy)
        return 1.0 + float(p @ np.arange(len(p)))

    def cdf(self, strategy: Strategy) -> Floats | None:
        """P(accepted <= j) for j = 0..reach - 1; None where requests differ."""
        if self.varies_by != "nothing":
            return None
        return np.cumsum(self.distribution(strategy))[:-1]

    def most_tokens(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        """Expected tokens per iteration that no request exceeds on its way to the state in `requests`.

        Holds for models that are monotone in progress and in siblings.
        """
        models, none = self.by_batch(strategy.drafter), np.zeros(len(requests))
        if all(model.varies_by == "nothing" for model in models):
            return np.full(len(requests), max(model.tokens_per_iteration(strategy) for model in models))
        if any(model is not self for model in models):
            return np.asarray(np.max([model.most_tokens(strategy, requests) for model in models], axis=0), np.float64)
        corners = [
            self.survival(strategy, replace(requests, generated_tokens=generated, num_siblings=siblings)).sum(axis=1)
            for generated in (none, requests.generated_tokens)
            for siblings in (none, requests.num_siblings)
        ]
        most: Floats = 1.0 + np.max(corners, axis=0)
        return most


class AcceptanceModel(FiniteModel, StoredModel, Acceptance):
    """Base of models that a file or a user's own class describes; `load_acceptance` reads what it writes."""

    varies_by: ClassVar[Variation] = "nothing"


class Distribution(AcceptanceModel):
    """Acceptance given as P(accepted = j), the same for every request."""

    @abstractmethod
    def distribution(self, strategy: Strategy) -> Floats: ...

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        tail = np.cumsum(self.distribution(strategy)[::-1])[::-1][1:]
        return requests.alike(np.clip(tail, 0.0, 1.0))


class Wrapped(Acceptance):
    """Acceptance on top of another model, its `base`, in the same way at every batch size."""

    if TYPE_CHECKING:
        base: Acceptance

    @property
    def parts(self) -> tuple[Acceptance, ...]:
        """The models inside."""
        return (self.base,)

    def of(self, drafter: str) -> Acceptance:
        """The model inside that describes a drafter."""
        return self.base

    @abstractmethod
    def with_parts(self, parts: Sequence[Acceptance]) -> Self:
        """The same with other models inside."""

    @property
    def varies_by(self) -> Variation:
        return self.base.varies_by

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.base.drafters

    @property
    def trained_drafter(self) -> str | None:
        return next((part.trained_drafter for part in self.parts if part.trained_drafter is not None), None)

    def knows(self, drafter: str, drafters: Drafters = STANDARD) -> bool:
        return self.base.knows(drafter, drafters)

    def outside(self, strategy: Strategy) -> list[str]:
        return self.of(strategy.drafter).outside(strategy)

    def in_state(self, drafters: Mapping[str, DrafterState]) -> Acceptance:
        return self._with_parts([part.in_state(drafters) for part in self.parts])

    def at_best(self, drafters: Iterable[str]) -> Acceptance:
        names = list(drafters)
        return self._with_parts([part.at_best(names) for part in self.parts])

    def at(self, batch: int) -> Acceptance:
        if batch not in self._at_batch:
            self._at_batch[batch] = self._with_parts([part.at(batch) for part in self.parts], self._known)
        return self._at_batch[batch]

    def by_batch(self, drafter: str) -> tuple[Acceptance, ...]:
        return tuple(self._with_parts([model], self._known) for model in self.base.by_batch(drafter))

    def at_context(self, context_tokens: float) -> Acceptance:
        return self._with_parts([part.at_context(context_tokens) for part in self.parts])

    def within(self, context_tokens: float) -> Acceptance:
        return self._with_parts([part.within(context_tokens) for part in self.parts], self._known)

    @property
    def refresh_iterations(self) -> int:
        changing = (part.refresh_iterations for part in self.parts if part.varies_by == "request")
        return min(changing, default=REFRESH_ITERATIONS)

    def num_drafted(self, strategy: Strategy) -> float:
        return self.of(strategy.drafter).num_drafted(strategy)

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        return self.of(strategy.drafter).survival(strategy, requests)

    def _with_parts(self, parts: Sequence[Acceptance], known: list[Self] | None = None) -> Self:
        """Return the model around `parts`: itself, one of `known`, or a new one, which is added to `known`."""
        models: list[Self] = [self, *(known or ())]
        for model in models:
            if all(a is b for a, b in zip(model.parts, parts, strict=True)):
                return model
        made = self.with_parts(parts)
        if known is not None:
            known.append(made)
        return made

    @cached_property
    def _at_batch(self) -> dict[int, Self]:
        return {}

    @cached_property
    def _known(self) -> list[Self]:
        # Callers remember models by identity: one object for the same models inside.
        return []


@dataclass(frozen=True)
class Scaled(Wrapped):
    """A model whose tokens of the drafters `names`, () for all, have chances `ratio` times as large, at most 1."""

    base: Acceptance
    names: tuple[str, ...]
    ratio: float

    def with_parts(self, parts: Sequence[Acceptance]) -> Scaled:
        return replace(self, base=parts[0])

    def survival(self, strategy: Strategy, requests: RequestArrays) -> Floats:
        survival = self.base.survival(strategy, requests)
        return survival if self.names and strategy.drafter not in self.names else scaled(survival, self.ratio)


class ConstantAcceptance(Distribution):
    """Every speculative iteration yields `tokens` per request, but never more than the draft's reach plus the bonus.

    In sampled mode a fractional value is drawn from the two nearest whole numbers.
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


class GeometricAcceptance(Distribution):
    """Chain drafts, each token kept with probability `alpha` while all before it were kept.

    A draft of depth d yields (1 - alpha^(d+1)) / (1 - alpha) tokens on average (Leviathan et al. 2023, equation 1).
    """

    kind: Literal["geometric"] = "geometric"
    alpha: Share

    def distribution(self, strategy: Strategy) -> Floats:
        only_chains(strategy, "geometric acceptance")
        return geometric(self.alpha, strategy.reach)


class ChainAcceptance(Distribution):
    """Chain drafts, kept up to token i with the chance `kept[i - 1]`, deeper ones as `held` has it.

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
        return from_survival(held(np.array(self.kept), strategy.reach))

    def outside(self, strategy: Strategy) -> list[str]:
        return ["draft_depth"] if strategy.reach > len(self.kept) else []


class LengthsAcceptance(Distribution):
    """Chain drafts of depth d that yield `lengths[d - 1]` tokens on average, the bonus token included.

    Each depth is measured separately, so deeper drafts may yield less, as a block drafter's do. At one depth a
    token is kept, given those before it, with the one chance that makes the mean right. Beyond these depths each
    further token adds to the mean what `held` gives of the additions so far, a last one below 0 nothing.

    >>> model = LengthsAcceptance(lengths=(1.8, 2.4, 2.2))
    >>> [round(model.tokens_per_iteration(Strategy.chain("block", depth)), 6) for depth in (1, 2, 3)]
    [1.8, 2.4, 2.2]
    """

    kind: Literal["lengths"] = "lengths"
    lengths: Annotated[tuple[Annotated[float, Field(ge=1)], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for depth, length in enumerate(self.lengths, start=1):
            if length > depth + 1:
                raise ValueError(f"lengths: a draft of depth {depth} yields at most {depth + 1} tokens, got {length:g}")
        return self

    def distribution(self, strategy: Strategy) -> Floats:
        only_chains(strategy, "acceptance by accept length")
        depth, known = strategy.draft_depth, len(self.lengths)
        accepted = self.lengths[min(depth, known) - 1] - 1.0
        if depth > known:
            accepted += held(np.maximum(np.diff((1.0, *self.lengths)), 0.0), depth)[known:].sum()
        alpha = chain_alpha(accepted, depth)
        return geometric(alpha, strategy.reach)

    def outside(self, strategy: Strategy) -> list[str]:
        return ["draft_depth"] if strategy.draft_depth > len(self.lengths) else []


def held(kept: Floats, depth: int) -> Floats:
    """P(accepted >= i), i = 1..depth, from those of fewer tokens: each further one has the last one's own chance.

    That is its chance given that all before it were accepted.

    >>> held(np.array([0.8, 0.4]), 4).tolist()
    [0.8, 0.4, 0.2, 0.1]
    """
    before = kept[-2] if len(kept) > 1 else 1.0
    chance = min(kept[-1] / before, 1.0) if before > 0 else 0.0
    return np.append(kept, kept[-1] * chance ** np.arange(1, depth - len(kept) + 1))[:depth]


def chain_alpha(accepted: float, depth: int) -> float:
    """The chance of each token with which a chain of this depth keeps so many tokens on average.

    >>> chain_alpha(0.75, 2)
    0.5
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if sum(middle**i for i in range(1, depth + 1)) < accepted else (low, middle)
    return 0.5 * (low + high)


def geometric(alpha: float, depth: int) -> Floats:
    """P(accepted = j), j = 0..depth, where each token is kept with this chance once those before it were."""
    return from_survival(np.power(alpha, np.arange(1, depth + 1, dtype=np.float64)))


def from_survival(survival: Floats) -> Floats:
    """P(accepted = j), j = 0..reach, from P(accepted >= i), i = 1..reach."""
    bounds = np.concatenate([[1.0], survival, [0.0]])
    p: Floats = bounds[:-1] - bounds[1:]
    return p


def scaled(survival: Floats, ratio: Floats | float) -> Floats:
    """The survival when each drafted token's chance, given those before it, is `ratio` times as large, at most 1.

    The last axis runs over the draft's tokens. Several ratios have shape (rows, 1), one for each row.
    """
    return np.cumprod(np.minimum(1.0, chances(survival) * ratio), axis=-1)


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
