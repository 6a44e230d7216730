"""Cost and yield of one strategy in a simulation, computed once per strategy and acceptance."""

import math
from collections.abc import Sequence
from dataclasses import field

import numpy as np

from tltlab.acceptance.base import UNKNOWN, Acceptance, RequestArrays
from tltlab.arrays import Floats
from tltlab.costs.base import CostModel, IterationCost
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.strategy import NO_SPECULATION, Strategy, drafters_of

from .requests import Requests

MANY = 64
"""Responses that give the mean of acceptance that is replayed."""


@frozen
class Regime:
    """One strategy with its cost, expected `tokens` and drafts per request and iteration.

    `most` is the largest number of accepted tokens, `cdf[j]` = P(accepted <= j) for j < most. Where acceptance is
    replayed or differs between requests, `cdf` is None and `tokens` nan.
    """

    strategy: Strategy
    cost: IterationCost
    tokens: float
    num_drafted: float
    most: int
    cdf: Floats | None
    _terms: dict[int, tuple[float, float]] = field(default_factory=dict)

    def terms(self, batch: int) -> tuple[float, float]:
        """Seconds of an iteration at this batch without the context's share, and seconds per token of context."""
        terms = self._terms.get(batch)
        if terms is None:
            terms = self._terms[batch] = self.cost.without_context_s(batch), self.cost.context_slope_s(batch)
        return terms


class Regimes:
    """The regimes of a policy's strategies, by strategy and batch size.

    Raises ConfigError for a missing cost term, an unknown acceptance, and what no drafter of `drafters` drafts.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        costs: CostModel,
        acceptance: Acceptance | None,
        drafters: Drafters = STANDARD,
    ):
        drafters.check(strategies)
        self.strategies = tuple(strategies)
        self._loaded = bool(drafters_of(strategies))
        self.loads_late = costs.switch_s > 0 and self._loaded
        """True if a rollout that begins with plain decoding has no drafter loaded until it drafts."""
        self.costs = costs
        self._drafters = drafters
        self._acceptance = acceptance
        self._by_model: dict[tuple[Strategy, int, bool], Regime] = {}
        self._by_batch: dict[tuple[Strategy, int, bool], Regime] = {}
        for strategy in strategies:
            self.at(strategy, 1)

    def at(self, strategy: Strategy, batch: int, *, loaded: bool = True) -> Regime:
        """The regime of a strategy at a batch size; plain decoding before a drafter is loaded pays nothing for it."""
        regime = self._by_batch.get((strategy, batch, loaded))
        if regime is None:
            model = self._acceptance
            if model is not None and strategy.speculates:
                model = model.at(batch)
            key = (strategy, id(model), loaded)
            if key not in self._by_model:
                self._by_model[key] = self._regime(strategy, model, self._loaded and loaded)
            regime = self._by_batch[strategy, batch, loaded] = self._by_model[key]
        return regime

    def undrafted(self, batch: int, *, loaded: bool = True) -> Regime:
        """The regime of an engine's first iteration, plain whatever the policy; one that it could not have chosen pays
        for no loaded drafter."""
        return self.at(NO_SPECULATION, batch, loaded=loaded and NO_SPECULATION in self.strategies)

    def _regime(self, strategy: Strategy, acceptance: Acceptance | None, loaded: bool) -> Regime:
        tokens, drafted, cdf = 1.0, 0.0, None
        if strategy.speculates:
            if acceptance is None:
                raise ConfigError(f"the policy speculates ({strategy}) and {UNKNOWN.format(strategy.drafter)}")
            acceptance.check(strategy)
            tokens, drafted = acceptance.tokens_per_iteration(strategy), acceptance.num_drafted(strategy)
            cdf = acceptance.cdf(strategy)
        cost = self.costs.iteration(
            strategy, tokens_to_verify=1.0 + drafted, drafter_loaded=loaded, drafters=self._drafters
        )
        return Regime(strategy=strategy, cost=cost, tokens=tokens, num_drafted=drafted, most=strategy.reach, cdf=cdf)

    def tokens_at(self, strategy: Strategy, batch: int, requests: Requests) -> float:
        """About what a request gains in an iteration: where acceptance changes, halfway through its response."""
        regime = self.at(strategy, batch)
        if not math.isnan(regime.tokens):
            return regime.tokens
        assert self._acceptance is not None
        if self._acceptance.varies_by == "position":
            pairs = zip(requests.keys[:MANY], requests.response_tokens[:MANY], strict=True)
            rows = [self._acceptance.positions(strategy.drafter, key, tokens) for key, tokens in pairs if tokens]
            return 1.0 + float(np.minimum(np.concatenate(rows), regime.most).mean())
        zero, half = np.zeros(1), requests.lengths.mean(keepdims=True) / 2
        halfway = RequestArrays(half, zero, float(requests.prompts.mean()))
        return 1.0 + float(self._acceptance.at(batch).survival(strategy, halfway).sum())

    def up_to(self, batch: int) -> list[Regime]:
        """All regimes that batches 1 to `batch` can meet, plain decoding as cheap as it ever is."""
        regimes = [self.at(s, n, loaded=not self.loads_late) for s in self.strategies for n in range(1, batch + 1)]
        return list({id(regime): regime for regime in regimes}.values())
