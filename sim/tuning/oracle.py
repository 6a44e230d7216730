"""The per-iteration oracle: at every iteration the strategy with the least expected seconds per token.

It knows the true costs and acceptance, batch and context, but not the random numbers to come. Regret is measured
against the oracle where the clairvoyant bound is too loose. The greedy oracle ignores the effect of an iteration on
later ones; for one worker whose strategies gain alike at every batch, that loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tltlab.acceptance.base import Acceptance
from tltlab.costs.base import IterationCost
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.specs import CustomSpec, FixedSpec
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import accept_length, totals
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy

BUCKET_TOKENS = 512
"""Width of the bins of a request's context, tokens."""


class ExpectedIteration:
    """Seconds and tokens that an iteration of a strategy is expected to take and to bring, at a batch and a context.

    Acceptance by context is taken at the batch's mean context. Where acceptance differs between requests otherwise or
    is replayed, tokens are the mean of a simulation under that strategy alone; a learned drafter is taken as fresh as
    it is at first.
    """

    def __init__(self, scenario: Scenario, strategies: Sequence[Strategy]) -> None:
        self.strategies = tuple(dict.fromkeys((NO_SPECULATION, *strategies)))
        model = None if scenario.acceptance is None else scenario.acceptance.in_state({})
        self._model = None if model is None else model.within(scenario.longest_context_tokens)
        self._regimes = Regimes(self.strategies, scenario.costs, self._model, scenario.registry)
        self._means: dict[Strategy, float] = {}
        self._at_context: dict[int, Acceptance] = {}
        self.is_by_context = False
        """True where tokens depend on the context."""
        if self._model is None or self._model.at_context(0.0).varies_by != "nothing":
            self._means = {s: _mean_tokens(scenario, s) for s in self.strategies if s.speculates}
        else:
            self.is_by_context = self._model.varies_by != "nothing"

    def tokens(self, strategy: Strategy, batch: int, context_tokens: float) -> float:
        """Tokens of one request in one iteration, the bonus token included; `context_tokens` sums over the batch."""
        if (mean := self._means.get(strategy)) is not None:
            return mean
        if not self.is_by_context or not strategy.speculates:
            return self._regimes.at(strategy, batch).tokens
        assert self._model is not None
        at = round(context_tokens / batch / BUCKET_TOKENS)
        if at not in self._at_context:
            self._at_context[at] = self._model.at_context(float(at * BUCKET_TOKENS))
        return self._at_context[at].at(batch).tokens_per_iteration(strategy)

    def cost(self, strategy: Strategy, batch: int) -> IterationCost:
        """Cost of an iteration."""
        return self._regimes.at(strategy, batch).cost

    def seconds_per_token(self, strategy: Strategy, batch: int, context_tokens: float) -> float:
        """Seconds of an iteration for each token that a request gains in it; `context_tokens` sums over the batch."""
        tokens = self.tokens(strategy, batch, context_tokens)
        return self.cost(strategy, batch).seconds(batch, context_tokens) / tokens


class Oracle(Selector):
    """Chooses by `ExpectedIteration`, from all its strategies."""

    def __init__(self, expected: ExpectedIteration) -> None:
        self.strategies = expected.strategies
        self._expected = expected
        self._lines: dict[tuple[int, int], list[tuple[float, float, Strategy]]] = {}

    def choose(self, state: StepState) -> Strategy:
        batch, context = state.batch, state.context_tokens
        near = round(context / batch / BUCKET_TOKENS) if self._expected.is_by_context else 0
        if (batch, near) not in self._lines:
            lines = [self._line(s, batch, near * BUCKET_TOKENS * batch) for s in self.strategies]
            self._lines[batch, near] = _lower_envelope(lines)
        return min(self._lines[batch, near], key=lambda line: line[0] + line[1] * context)[2]

    def _line(self, strategy: Strategy, batch: int, context_tokens: float) -> tuple[float, float, Strategy]:
        cost, tokens = self._expected.cost(strategy, batch), self._expected.tokens(strategy, batch, context_tokens)
        return cost.without_context_s(batch) / tokens, cost.context_slope_s(batch) / tokens, strategy


def oracle_policy(scenario: Scenario, strategies: Sequence[Strategy]) -> Policy:
    """The oracle as a policy of the simulator; it has no file, since no run knows the truth.

    >>> scenario.rollouts(oracle_policy(scenario, strategies))  # doctest: +SKIP
    """
    if scenario.acceptance is None and any(s.speculates for s in strategies):
        raise ConfigError("the oracle needs an acceptance model to know what speculation brings")
    expected = ExpectedIteration(scenario, strategies)
    return Policy(selector=CustomSpec.holding(lambda: Oracle(expected)))


def _lower_envelope(lines: list[tuple[float, float, Strategy]]) -> list[tuple[float, float, Strategy]]:
    """Lines that no other is below at every context."""
    return [
        line
        for i, line in enumerate(lines)
        if not any(
            rival[0] <= line[0] and rival[1] <= line[1] and (rival[:2] != line[:2] or j < i)
            for j, rival in enumerate(lines)
        )
    ]


def _mean_tokens(scenario: Scenario, strategy: Strategy) -> float:
    found = totals(scenario.rollouts(Policy(selector=FixedSpec(strategy=strategy))))
    return max(1.0, accept_length(found) or 1.0)
