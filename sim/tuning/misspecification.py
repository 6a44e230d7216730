"""Costs and acceptance that are off by a known share: what a robust policy has to put up with."""

from __future__ import annotations

import numpy as np
from pydantic import SerializeAsAny

from tltlab.acceptance.base import Acceptance, AcceptanceModel, WrappedAcceptance
from tltlab.arrays import Floats
from tltlab.costs.base import CostModel
from tltlab.costs.scaled import ScaledIteration
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy


class OffCosts(CostModel):
    """`costs` whose plain iterations take `plain` times, and speculative ones `speculative` times as long."""

    costs: SerializeAsAny[CostModel]
    plain: float
    speculative: float

    @classmethod
    def of(cls, costs: CostModel, *, plain: float, speculative: float) -> OffCosts:
        """With the limits, the noise and the notes of `costs`."""
        return cls(**costs.limits(), costs=costs, plain=plain, speculative=speculative)

    @property
    def tensor_parallel(self) -> int:
        return self.costs.tensor_parallel

    def iteration(
        self, strategy: Strategy, *, tokens_to_verify: float | None = None, drafter_loaded: bool = False
    ) -> ScaledIteration:
        cost = self.costs.iteration(strategy, tokens_to_verify=tokens_to_verify, drafter_loaded=drafter_loaded)
        level = self.speculative if strategy.speculates else self.plain
        return ScaledIteration(level=level, of=cost, tokens_to_verify=cost.tokens_to_verify)

    def prefill_s(self, tokens: float) -> float:
        return self.costs.prefill_s(tokens)


class OffAcceptance(WrappedAcceptance):
    """`base` whose mean of accepted tokens is `factor` times as large, as far as the depth allows.

    Less: a share of the drafts is rejected outright. More: a share is accepted whole.
    """

    factor: float

    def distribution(self, strategy: Strategy) -> Floats:
        chances = self.base.distribution(strategy)
        mean, most = float(chances @ np.arange(len(chances))), len(chances) - 1
        if self.factor <= 1.0:
            share, at = 1.0 - self.factor, 0
        else:
            share, at = min(1.0, (self.factor - 1.0) * mean / (most - mean)) if mean < most else 0.0, most
        shifted: Floats = (1.0 - share) * chances
        shifted[at] += share
        return shifted


def corners(error: float) -> dict[str, tuple[float, float, float]]:
    """Factors of (plain iterations, speculative iterations, accepted tokens) by name, the costs erring either way.

    Where both kinds of iterations err alike nothing changes relative to plain decoding, so those corners are left out.
    """
    ways = {"cheaper": 1.0 - error, "dearer": 1.0 + error}
    return {
        f"speculation {how} than thought, {word} accepted": (2.0 - factor, factor, accepted)
        for how, factor in ways.items()
        for word, accepted in (("less", 1.0 - error), ("more", 1.0 + error))
    }


def off(acceptance: Acceptance | None, factor: float) -> Acceptance | None:
    """The acceptance with `factor` times the accepted tokens; ConfigError for one that tells requests apart."""
    if acceptance is None:
        return None
    if not isinstance(acceptance, AcceptanceModel):
        raise ConfigError(
            "a cost error needs an acceptance model that treats requests alike, such as a fitted one (by-batch) or "
            "geometric:ALPHA"
        )
    return OffAcceptance(base=acceptance, factor=factor)
