"""Costs made of other costs: all of their times, or what speculation adds to them, times a factor."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, WrapValidator

from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.strategy import NO_SPECULATION, Strategy

from .base import CostModel, IterationCost
from .linear import LinearCosts
from .roofline import RooflineCosts
from .table import TableCosts

_InFile = Annotated[LinearCosts | RooflineCosts | TableCosts, Field(discriminator="kind")]
Shape = Annotated[
    SerializeAsAny[_InFile], WrapValidator(lambda of, read: of if isinstance(of, CostModel) else read(of))
]
"""Any costs; from a file one of those that are not scaled themselves."""
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ScaledCosts(CostModel):
    """Costs `of` for iterations and prefill, multiplied by the `level` that a training log identifies of an engine.

    Speculative iterations take `speculative` times that. `overhead` multiplies all that speculation adds to a plain
    iteration at the same batch, drafting and verification alike. With `pass_share` drafting takes that share of the
    target's plain pass: once per drafted token, like the first layers of the target, or once in all for a `block`.
    `added_base_s` and `added_per_request_s` are added to each iteration, or taken from it.

    >>> base = LinearCosts(base_s=4e-3, per_request_s=0, per_token_s=1e-3, per_context_s=0, sd_base_s=0,
    ...                    sd_idle_s=0, draft_level_s=1e-3, draft_level_per_request_s=0)
    >>> [round(ScaledCosts(of=base, **how).iteration(Strategy.chain("learned", 4)).seconds(1, 0), 4)
    ...  for how in ({"level": 2}, {"overhead": 0.5}, {"pass_share": 0.1}, {"pass_share": 0.1, "block": True})]
    [0.026, 0.009, 0.011, 0.0095]
    """

    kind: Literal["scaled"] = "scaled"
    level: Factor = 1.0
    of: Shape
    speculative: Factor = 1.0
    overhead: Share = 1.0
    pass_share: Share | None = None
    block: bool = False
    added_base_s: float = 0.0
    added_per_request_s: float = 0.0

    @classmethod
    def wrapping(cls, costs: CostModel, **changes: Any) -> Self:
        """`costs` changed; `changes` are fields, and what they do not name of limits, noise and notes is theirs."""
        return cls(**costs.limits() | {"of": costs} | changes)

    @property
    def tensor_parallel(self) -> int:
        return self.of.tensor_parallel

    def iteration(
        self,
        strategy: Strategy,
        *,
        tokens_to_verify: float | None = None,
        drafter_loaded: bool = False,
        drafters: Drafters = STANDARD,
    ) -> ScaledIteration:
        cost = self.of.iteration(
            strategy, tokens_to_verify=tokens_to_verify, drafter_loaded=drafter_loaded, drafters=drafters
        )
        level, plain, passes = self.level, cost, None
        if strategy.speculates:
            level *= self.speculative
            if self.pass_share is not None:
                passes = self.pass_share * (1 if self.block else drafters.passes(strategy))
            if passes is not None or self.overhead != 1.0:
                plain = self.of.iteration(NO_SPECULATION, drafter_loaded=drafter_loaded)
        return ScaledIteration(
            level=level,
            cost=cost,
            plain=plain,
            overhead=self.overhead,
            draft_passes=passes,
            tokens_to_verify=cost.tokens_to_verify,
            added_base_s=self.added_base_s,
            added_per_request_s=self.added_per_request_s,
        )

    def prefill_s(self, tokens: float) -> float:
        return self.level * self.of.prefill_s(tokens)


@frozen
class ScaledIteration(IterationCost):
    """An iteration of `ScaledCosts`; `plain` is what `overhead` counts from, `draft_passes` are plain passes."""

    level: float
    cost: IterationCost
    plain: IterationCost
    overhead: float
    draft_passes: float | None
    tokens_to_verify: float
    added_base_s: float = 0.0
    added_per_request_s: float = 0.0

    def without_context_s(self, batch: int) -> float:
        plain_s = self.plain.without_context_s(batch)
        verified_s = self.cost.without_context_s(batch) - self.cost.draft_s(batch)
        added_s = self.added_base_s + self.added_per_request_s * batch
        return self.level * (plain_s + self.overhead * (verified_s - plain_s)) + self.draft_s(batch) + added_s

    def context_slope_s(self, batch: int) -> float:
        return self.level * self.cost.context_slope_s(batch)

    def draft_s(self, batch: int) -> float:
        if self.draft_passes is None:
            return self.level * self.overhead * self.cost.draft_s(batch)
        return self.level * self.overhead * self.draft_passes * self.plain.without_context_s(batch)

    def added_s(self, batch: int, prompt_tokens: float, apart_s: float) -> float:
        return self.level * self.cost.added_s(batch, prompt_tokens, apart_s / self.level)


def scheduled(costs: CostModel, *, synchronous: bool) -> CostModel:
    """Costs of the same engine where it waits for the host between iterations, or does not.

    ConfigError where `costs` do not know what waiting takes, and where it takes longer than an iteration.
    """
    if costs.synchronous == synchronous:
        return costs
    if costs.synchronous is None or costs.waiting is None:
        raise ConfigError(
            "these costs do not say what waiting for the host takes (synchronous, waiting): take those of an engine "
            "profile (vllm) or of a `tltlab profile` on a GPU, which times both ways of scheduling"
        )
    sign = 1.0 if synchronous else -1.0
    if costs.iteration(NO_SPECULATION).without_context_s(1) + sign * costs.waiting.seconds(1) <= 0:
        raise ConfigError(f"an iteration takes less than its waiting for the host, by {costs.waiting.source}")
    return ScaledCosts.wrapping(
        costs,
        synchronous=synchronous,
        added_base_s=sign * costs.waiting.base_s,
        added_per_request_s=sign * costs.waiting.per_request_s,
    )
