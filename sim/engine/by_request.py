"""Gains of each request: drawn at random, replayed per position, or at per-request chances (curves, siblings, budgets).

Chances depend on how far a response has come and on how many of its group have finished, so they change all the time.
A macro-step holds them fixed at what they are expected to be in its middle: it ends with the first finish, and after
`refresh` iterations at the latest. Fluid, each request gains the expected tokens; sampled, they are drawn from these
chances with common random numbers (random_numbers.py). With `refresh` = 1 both are exact.

An iteration verifies 1 + drafted tokens of each request. A cost model takes the same number for every request: it gets
their mean, which leaves the tokens of the batch as they are. Drafting is paid as deep as the deepest request's draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tltlab.acceptance.base import REFRESH_ITERATIONS, Acceptance, RequestArrays
from tltlab.arrays import Array, Bytes, Floats, Ints
from tltlab.costs.base import CostModel
from tltlab.drafters.budget import DraftBudget, refuse_trees, shares_of
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.state import StepState
from tltlab.strategy import Strategy

from .batch import Batch, Gains, SpeculativeIterations, columns_ahead, steady_iterations, until_done
from .random_numbers import num_reached, uniforms
from .regime import Regime
from .requests import Requests


class Groups:
    """State shared by all workers of a rollout: finished samples of each group."""

    def __init__(self, requests: Requests):
        self._group = requests.groups
        self._finished = np.zeros(int(self._group.max(initial=-1)) + 1, np.int64)

    def finish(self, requests: Sequence[int]) -> None:
        """Mark requests as done; each once."""
        np.add.at(self._finished, self._group[np.asarray(requests, np.int64)], 1)

    def siblings(self, running: Ints) -> Floats:
        """Finished samples of the group of each request, which runs itself."""
        return self._finished[self._group[running]].astype(np.float64)


class Chances(Gains):
    """Gains at per-request acceptance, for drafts that are shared out by a budget if there is one.

    Requests that finish count for their siblings and the budget from then on (`finish`). Without a budget the given
    regime's cost holds; with one, the costs of `rates` price the drafts that it allots.
    """

    is_apart = False

    def __init__(self, requests: Requests, rates: Rates, groups: Groups, budget: DraftBudget | None):
        self._requests = requests
        self._rates = rates
        self._model = rates.model
        self._groups = groups
        self._prompts = requests.prompts.astype(np.float64)
        self._budget = budget
        self._regimes: dict[tuple[Strategy, int, float], Regime] = {}
        self._seeds = requests.seeds(rates.seed) if rates.sampled else None
        self.shares_out = budget is not None

    def finish(self, batch: Batch, requests: Sequence[int]) -> None:
        self._groups.finish(requests)
        if self._budget is not None:
            for request in requests:
                _, drafted, accepted = batch.drafts(request)
                done = replace(batch.request_state(request), generated_tokens=self._requests.response_tokens[request])
                self._budget.finished(done, drafted=round(drafted), accepted=round(accepted))

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> SpeculativeIterations:
        drafted: Ints | None = None
        each: Array | float = regime.num_drafted
        if self._budget is not None:
            regime, drafted, share = self._allotted(batch, regime)
            each = drafted * share
        limit = min(limit, self._rates.refresh)
        if self._seeds is not None:
            gains = self._drawn(batch, regime.strategy, drafted, limit, room_tokens)
            return SpeculativeIterations(regime, gains, gains.shape[1], each)
        gain, n = self._expected(batch, regime.strategy, drafted, limit, room_tokens)
        return SpeculativeIterations(regime, gain[:, None], n, each)

    def _expected(
        self, batch: Batch, strategy: Strategy, drafted: Ints | None, limit: float, room_tokens: float
    ) -> tuple[Floats, int]:
        """Tokens of each resident in an iteration, and the iterations in which they hold."""

        def rates(ahead: Floats) -> tuple[Floats, int]:
            gain = 1.0 + self._survival(batch, strategy, drafted, ahead).sum(axis=1)
            return gain, steady_iterations(batch.remaining, gain, limit, room_tokens)

        gain, n = rates(np.zeros(len(batch)))
        if n > 1 and self._model.varies_by == "request":
            gain, n = rates(gain * ((n - 1) / 2))
        return gain, n

    def _drawn(self, batch: Batch, strategy: Strategy, drafted: Ints | None, limit: float, room_tokens: float) -> Ints:
        assert self._seeds is not None
        residents, remaining = batch.residents, batch.remaining
        survival = self._survival(batch, strategy, drafted, np.zeros(len(batch)))
        gain = 1.0 + survival.sum(axis=1)
        count = columns_ahead(remaining, gain, limit)
        if count > 1:
            survival = self._survival(batch, strategy, drafted, gain * ((count - 1) / 2))
        drawn = uniforms(self._seeds[residents], batch.num_drafts[residents], count)
        return until_done(1 + num_reached(drawn, 1.0 - survival), remaining, room_tokens)

    def _survival(self, batch: Batch, strategy: Strategy, drafted: Ints | None, ahead: Floats) -> Floats:
        """P(accepted >= i) of each resident, `ahead` tokens further on; 0 beyond what it is drafted."""
        residents = batch.residents
        full = strategy if drafted is None else Strategy.chain(strategy.drafter, strategy.draft_depth)
        siblings = self._groups.siblings(residents)
        requests = RequestArrays(batch.made[residents] + ahead, siblings, self._prompts[residents])
        survival = self._model.at(len(batch)).survival(full, requests)
        if drafted is None:
            return survival
        return np.asarray(np.where(np.arange(survival.shape[1])[None, :] < drafted[:, None], survival, 0.0))

    def _allotted(self, batch: Batch, regime: Regime) -> tuple[Regime, Ints, float]:
        """The regime with the cost of the budget's tokens for each resident, these, and how many of one are drafted."""
        strategy = regime.strategy
        refuse_trees(strategy)
        assert self._budget is not None
        requests = [batch.request_state(r) for r in batch.running]
        state = batch.state or StepState(
            rl_step=self._requests.rl_step, batch=len(batch), context_tokens=batch.context_tokens
        )
        state = replace(state, strategy=strategy, requests=requests)
        drafted = np.array(shares_of(self._budget, state, strategy), np.int64)
        full = Strategy.chain(strategy.drafter, strategy.draft_depth)
        share = self._model.at(len(batch)).num_drafted(full) / strategy.draft_depth
        deepest, mean = int(drafted.max()), float(drafted.mean()) * share
        key = (strategy, deepest, mean)
        if key not in self._regimes:
            cost = self._rates.costs.iteration(
                full if self._budget.drafts_whole else Strategy.chain(strategy.drafter, deepest),
                tokens_to_verify=1.0 + mean,
                drafter_loaded=True,
                drafters=self._rates.drafters,
            )
            self._regimes[key] = Regime(
                strategy=strategy, cost=cost, tokens=regime.tokens, num_drafted=mean, most=deepest, cdf=None
            )
        return self._regimes[key], drafted, share


@dataclass(slots=True, kw_only=True)
class Rates:
    """Makes the batches of a simulation. Batches of one rollout (of the same `Requests`) share their groups.

    `budgets` are those of the workers in order, none where the strategy alone sets what is drafted: a rollout's first
    batch gets the first one.
    """

    model: Acceptance
    costs: CostModel
    seed: int = 0
    sampled: bool = False
    budgets: Sequence[DraftBudget] = ()
    refresh: int = REFRESH_ITERATIONS
    drafters: Drafters = STANDARD
    _requests: Requests | None = field(default=None, init=False)
    _num_batches: int = field(default=0, init=False)
    _groups: Groups | None = field(default=None, init=False)

    def __call__(self, requests: Requests) -> Batch:
        if self._groups is None or self._requests is not requests:
            self._requests, self._groups, self._num_batches = requests, Groups(requests), 0
        budget = self.budgets[self._num_batches] if self.budgets else None
        self._num_batches += 1
        return Batch(requests, Chances(requests, self, self._groups, budget))


class Drawn(Gains):
    """Accepted tokens drawn per request and speculative iteration, with common random numbers (random_numbers.py)."""

    def __init__(self, requests: Requests, seed: int):
        self._seeds = requests.seeds(seed)

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> SpeculativeIterations:
        residents, remaining = batch.residents, batch.remaining
        count = columns_ahead(remaining, regime.tokens, limit)
        drawn = uniforms(self._seeds[residents], batch.num_drafts[residents], count)
        assert regime.cdf is not None
        gains = until_done(1 + num_reached(drawn, regime.cdf), remaining, room_tokens)
        return SpeculativeIterations(regime, gains, gains.shape[1], regime.num_drafted)


class Replayed(Gains):
    """Accepted tokens as recorded for the position at which the draft starts: deterministic in every mode."""

    def __init__(self, requests: Requests, acceptance: Acceptance):
        self._requests = requests
        self._acceptance = acceptance
        self._starts = np.concatenate([[0], np.cumsum(requests.lengths)])[:-1]
        self._flat: dict[str, Bytes] = {}

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> SpeculativeIterations:
        residents, remaining, flat = batch.residents, batch.remaining, self._positions(regime.strategy.drafter)
        start, last = self._starts[residents], self._requests.lengths[residents]
        position = batch.made[residents].astype(np.int64)
        columns = []
        for _ in range(columns_ahead(remaining, 1.0, limit)):
            gain = 1 + np.minimum(flat[start + position], regime.most).astype(np.int64)
            columns.append(gain)
            position = position + gain
            if (position >= last).any():
                break
        gains = until_done(np.stack(columns, axis=1), remaining, room_tokens)
        return SpeculativeIterations(regime, gains, gains.shape[1], regime.num_drafted)

    def _positions(self, drafter: str) -> Bytes:
        if drafter not in self._flat:
            pairs = zip(self._requests.keys, self._requests.response_tokens, strict=True)
            rows = [self._acceptance.positions(drafter, key, length) for key, length in pairs if length]
            self._flat[drafter] = np.concatenate(rows)
        return self._flat[drafter]
