"""Costs of one engine at another's level: every time of another cost model times one factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tltlab.strategy import Strategy

from .base import CostModel, IterationCost, LinearCosts
from .roofline import RooflineCosts
from .table import TableCosts

Shape = Annotated[LinearCosts | RooflineCosts | TableCosts, Field(discriminator="kind")]


class ScaledCosts(CostModel):
    """What `of` says of iterations and prefill times `level`, as a training log identifies it of an engine.

    >>> ScaledCosts(level=1.5, of=LinearCosts(prefill_per_token_s=2e-3)).prefill_s(10)
    0.03
    """

    kind: Literal["scaled"] = "scaled"
    level: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    of: Shape

    @classmethod
    def at(cls, level: float, of: LinearCosts | RooflineCosts | TableCosts, outside_s: float = 0.0) -> ScaledCosts:
        """The same limits and range as `of`; its noise and evidence are those of its own level and left away."""
        limits = of.limits("noise", "evidence", "notes")
        return cls(**limits | {"level": level, "of": of, "outside_s": outside_s, "switch_s": of.switch_s * level})

    @property
    def tensor_parallel(self) -> int:
        return self.of.tensor_parallel

    def iteration(
        self, strategy: Strategy, *, tokens_to_verify: float | None = None, drafter_loaded: bool = False
    ) -> ScaledIteration:
        cost = self.of.iteration(strategy, tokens_to_verify=tokens_to_verify, drafter_loaded=drafter_loaded)
        return ScaledIteration(level=self.level, of=cost, tokens_to_verify=cost.tokens_to_verify)

    def prefill_s(self, tokens: float) -> float:
        return self.level * self.of.prefill_s(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledIteration(IterationCost):
    """Another iteration's seconds times `level`."""

    level: float
    of: IterationCost
    tokens_to_verify: float

    def without_context_s(self, batch: int) -> float:
        return self.level * self.of.without_context_s(batch)

    def context_slope_s(self, batch: int) -> float:
        return self.level * self.of.context_slope_s(batch)

    def draft_s(self, batch: int) -> float:
        return self.level * self.of.draft_s(batch)

    def beside_s(self, batch: int, prompt_tokens: float, apart_s: float) -> float:
        return self.level * self.of.beside_s(batch, prompt_tokens, apart_s / self.level)
