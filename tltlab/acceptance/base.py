"""What an acceptance model is: one that treats all requests alike, and one that tells them apart.

Everywhere `accepted` counts without the bonus token and `tokens` with it. A strategy's reach is the number of drafted
tokens that can be accepted: its draft depth, or fewer where fewer tokens are verified. `survival[i - 1]` is
P(accepted >= i), i = 1..reach.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from tltlab.arrays import Floats
from tltlab.config import FiniteModel
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.strategy import Strategy

Key = tuple[int, str, int, int]
Share = Annotated[float, Field(ge=0, le=1)]


def reach(strategy: Strategy) -> int:
    """Most drafted tokens that an iteration under `strategy` can accept.

    >>> reach(Strategy.chain("ngram", 4)), reach(Strategy("ngram", 4, 1, 3)), reach(NO_SPECULATION)
    (4, 2, 0)
    """
    return min(strategy.draft_depth, strategy.tokens_to_verify - 1)


class StoredModel(FiniteModel):
    """A model that is a file."""

    def write(self, path: str | Path) -> Path:
        """Write the file that `load_acceptance` reads, in one move."""
        write_json(Path(path), self.model_dump(mode="json"))
        return Path(path)


class AcceptanceModel(StoredModel, ABC):
    """Acceptance as a distribution that is the same for every request and position.

    `drafters` names the drafters it knows, () where it holds for any. Without speculation nothing is drafted, one
    token comes out, and no model is asked.
    """

    @property
    def drafters(self) -> tuple[str, ...]:
        return ()

    def outside(self, strategy: Strategy) -> list[str]:
        """What about a strategy lies outside of what the model was measured on."""
        return []

    @abstractmethod
    def distribution(self, strategy: Strategy) -> Floats:
        """P(accepted = j) for j = 0..reach. Raises ConfigError for a strategy that the model does not cover."""

    def at(self, batch: int) -> AcceptanceModel:
        """The model that holds at a batch size: itself, unless it tells batch sizes apart."""
        return self

    def survival(self, strategy: Strategy) -> Floats:
        """P(accepted >= i) for i = 1..reach."""
        tail = np.cumsum(self.distribution(strategy)[::-1])[::-1][1:]
        kept: Floats = np.clip(tail, 0.0, 1.0)
        return kept

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        """Expected tokens of one request in one iteration, the bonus token included."""
        p = self.distribution(strategy)
        return 1.0 + float(p @ np.arange(len(p)))

    def num_drafted(self, strategy: Strategy) -> float:
        """Expected tokens really drafted per request and iteration: a drafter may return fewer than asked."""
        return float(strategy.tokens_to_verify - 1)


class RequestAcceptance(StoredModel, ABC):
    """Acceptance that differs by request: by its own level, its progress, or its finished siblings."""

    @property
    def drafters(self) -> tuple[str, ...]:
        return ()

    def at(self, batch: int) -> RequestAcceptance:
        """The model that holds at a batch size."""
        return self

    @abstractmethod
    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        """One level per request, known or drawn from (seed, key) alone: order and company do not matter."""

    @abstractmethod
    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        """P(accepted >= i) for i = 1..reach, shape (requests, reach).

        The three arrays have one entry per request; `num_siblings` counts finished samples of the same group. Raises
        ConfigError for a strategy that the model does not cover.
        """

    def num_drafted(self, strategy: Strategy) -> float:
        """Expected tokens really drafted per request and iteration."""
        return float(strategy.tokens_to_verify - 1)

    def most_tokens(self, strategy: Strategy, levels: Floats, num_tokens: Floats, num_siblings: Floats) -> Floats:
        """Expected tokens per iteration that a response of `num_tokens` never exceeds, whatever finishes when.

        `num_siblings` is how many there are. Holds for models that are monotone in progress and in siblings.
        """
        none = np.zeros_like(levels)
        corners = [
            self.survival(strategy, levels, at, beside).sum(axis=1)
            for at in (none, num_tokens)
            for beside in (none, num_siblings)
        ]
        most: Floats = 1.0 + np.max(corners, axis=0)
        return most


class Alike(RequestAcceptance):
    """A model without differences, for code that asks request by request."""

    model: SerializeAsAny[AcceptanceModel]

    @property
    def drafters(self) -> tuple[str, ...]:
        return self.model.drafters

    def at(self, batch: int) -> Alike:
        held = self.model.at(batch)
        if held is self.model:
            return self
        # One object per band: callers remember models by identity.
        if id(held) not in self._at:
            self._at[id(held)] = Alike(model=held)
        return self._at[id(held)]

    @cached_property
    def _at(self) -> dict[int, Alike]:
        return {}

    def levels(self, drafter: str, keys: Sequence[Key], seed: int) -> Floats:
        return np.zeros(len(keys))

    def survival(self, strategy: Strategy, levels: Floats, generated_tokens: Floats, num_siblings: Floats) -> Floats:
        kept = self.model.survival(strategy)
        return np.broadcast_to(kept, (len(levels), len(kept)))

    def num_drafted(self, strategy: Strategy) -> float:
        return self.model.num_drafted(strategy)


def per_request(model: AcceptanceModel | RequestAcceptance) -> RequestAcceptance:
    """The model request by request."""
    return model if isinstance(model, RequestAcceptance) else Alike(model=model)


class ConstantAcceptance(AcceptanceModel):
    """Every speculative iteration yields `tokens` per request, but never more than the draft's reach plus the bonus.

    Sampled, a fractional value is a draw between the two whole numbers beside it.
    """

    kind: Literal["constant"] = "constant"
    tokens: Annotated[float, Field(ge=1)]

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        return min(self.tokens, reach(strategy) + 1.0)

    def distribution(self, strategy: Strategy) -> Floats:
        accepted = self.tokens_per_iteration(strategy) - 1.0
        low = math.floor(accepted)
        p = np.zeros(reach(strategy) + 1)
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
        return from_survival(np.power(self.alpha, np.arange(1, reach(strategy) + 1, dtype=np.float64)))


def from_survival(survival: Floats) -> Floats:
    """P(accepted = j), j = 0..reach, from P(accepted >= i), i = 1..reach."""
    bounds = np.concatenate([[1.0], survival, [0.0]])
    p: Floats = bounds[:-1] - bounds[1:]
    return p


def scaled(survival: Floats, ratio: float) -> Floats:
    """The survival when each drafted token's chance, given those before it, is `ratio` times as large, at most 1.

    The last axis runs over the draft's tokens.
    """
    before = np.concatenate([np.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1)
    chance = np.divide(survival, before, out=np.zeros_like(before), where=before > 0)
    made: Floats = np.cumprod(np.minimum(1.0, chance * ratio), axis=-1)
    return made


def only_chains(strategy: Strategy, what: str) -> None:
    """ConfigError for a tree."""
    if strategy.top_k > 1:
        raise ConfigError(f"{what} describes chain drafts; {strategy} is a tree (top_k = {strategy.top_k})")


def known_drafter(strategy: Strategy, known: Any, what: str) -> None:
    """ConfigError unless the strategy's drafter is among the names `known`."""
    if strategy.drafter not in known:
        raise ConfigError(
            f"{what} knows no drafter {strategy.drafter!r}, only {', '.join(sorted(known)) or 'none'}: "
            "name a model such as geometric:0.7, which takes any"
        )
