"""A worker's running requests where each has its own expected gain: per-request curves, siblings, budgets.

Chances depend on how far a response has come and on how many of its group have finished, so they change all the time.
A macro-step holds them fixed at what they are expected to be in its middle: it ends with the first finish, and after
`refresh` iterations at the latest, unless a response keeps its chances throughout. Fluid, each request gains the
expected tokens; sampled, they are drawn from these chances with common random numbers (random_numbers.py). With
`refresh` = 1 both are exact.

An iteration verifies 1 + drafted tokens of each request. A cost model takes the same number for every request: it gets
their mean, which leaves the tokens of the batch as they are. Drafting is paid as deep as the deepest request's draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tltlab.acceptance.base import ByRequest
from tltlab.arrays import Floats, Ints
from tltlab.costs.base import CostModel
from tltlab.drafters.budget import DraftBudget, refuse_trees
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.state import StepState
from tltlab.strategy import Strategy

from .batch import BLOCK_CELLS, TOLERANCE_TOKENS, ArrayBatch, MacroStep, iterations_that_fit, iterations_until_done
from .random_numbers import uniforms
from .regime import Regime
from .requests import Requests

REFRESH_ITERATIONS = 32
RECENT_ITERATIONS = 16.0
"""Recent acceptance forgets with this time constant."""


class Groups:
    """What all workers of a rollout share: how many samples of each group have finished, and what each gains."""

    def __init__(self, requests: Requests) -> None:
        self.gains: dict[tuple[Strategy, int], Floats] = {}
        """Expected tokens of every request in an iteration, where they stay the same: by strategy and model."""
        self._group = requests.groups
        self._finished = np.zeros(int(self._group.max(initial=-1)) + 1, np.int64)

    def finish(self, requests: Sequence[int]) -> None:
        """These are done; each once."""
        np.add.at(self._finished, self._group[np.asarray(requests, np.int64)], 1)

    def siblings(self, running: Ints) -> Floats:
        """Finished samples of the group of each request, which runs itself."""
        return self._finished[self._group[running]].astype(np.float64)


class RateBatch(ArrayBatch):
    """Residents that gain at chances of their own.

    `settle` tells the group that requests have finished; it belongs at the end of a macro-step in virtual time, and
    `advance` catches up on it. Without a budget the given regime's cost holds; with one, the costs of `rates` say what
    the drafts it allots take.
    """

    def __init__(self, requests: Requests, rates: Rates, groups: Groups, budget: DraftBudget | None) -> None:
        super().__init__(requests, np.float64)
        self._rates = rates
        self._model = rates.model
        self._groups = groups
        self._budget = budget
        self._recent = np.full(len(requests), np.nan)
        self._drafted = np.zeros(len(requests))
        self._accepted = np.zeros(len(requests))
        self._pending: list[int] = []
        self._regimes: dict[tuple[Strategy, int, float], Regime] = {}
        self._seeds = requests.seeds(rates.seed) if rates.sampled else None
        self._draws = np.zeros(len(requests), np.int64)

    def recent_acceptance(self, request: int) -> float | None:
        """Accepted tokens per draft lately, None before the first draft."""
        recent = float(self._recent[request])
        return None if math.isnan(recent) else recent

    def settle(self) -> None:
        """The last macro-step is over: its finished requests count for their siblings and budgets from now on."""
        if self._pending:
            self._groups.finish(self._pending)
            if self._budget is not None:
                for request in self._pending:
                    drafted, accepted = round(self._drafted[request]), round(self._accepted[request])
                    done = replace(self.request_state(request), generated_tokens=self.requests.response_tokens[request])
                    self._budget.finished(done, drafted=drafted, accepted=accepted)
            self._pending = []

    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        self.settle()
        if not regime.strategy.speculates:
            macro = self._advance_plain(regime, limit, room_tokens)
        else:
            drafted: Ints | None = None
            if self._budget is not None:
                regime, drafted = self._allotted(regime)
            if not (self._model.steady and drafted is None):
                limit = min(limit, self._rates.refresh)
            if self._rates.sampled:
                gains = self._drawn(regime, drafted, self._remaining(), limit, room_tokens)
                self._draws[self._running] += gains.shape[1]
                self._remember(gains.mean(axis=1) - 1.0, gains.shape[1], drafted, regime)
                macro = self._advance_by(regime, gains)
            else:
                gain, n = self._expected(regime, drafted, self._remaining(), limit, room_tokens)
                self._remember(gain - 1.0, n, drafted, regime)
                macro = self._advance_steadily(regime, n, gain)
        self._pending = list(macro.finished)
        return macro

    def _expected(
        self, regime: Regime, drafted: Ints | None, remaining: Floats, limit: float, room_tokens: float
    ) -> tuple[Floats, int]:
        """Tokens of each resident in an iteration, and the iterations in which they hold."""

        def rates(ahead: Floats) -> tuple[Floats, int]:
            gain = self._gain(regime.strategy, drafted, ahead)
            n = max(1, math.ceil(float(((remaining - TOLERANCE_TOKENS) / gain).min())))
            fit = iterations_that_fit(len(remaining), float(gain.sum()), room_tokens)
            return gain, int(min(n, limit, fit))

        gain, n = rates(np.zeros(len(remaining)))
        if n > 1 and not self._model.steady:
            gain, n = rates(gain * ((n - 1) / 2))
        return gain, n

    def _gain(self, strategy: Strategy, drafted: Ints | None, ahead: Floats) -> Floats:
        """Expected tokens of each resident in an iteration, `ahead` tokens further on."""
        if not self._model.steady or drafted is not None:
            gain: Floats = 1.0 + self._survival(strategy, drafted, ahead).sum(axis=1)
            return gain
        return self.steady_gains(strategy, len(self._running))[self._running]

    @property
    def is_steady(self) -> bool:
        return self._model.steady and not self._rates.sampled and self._budget is None

    def steady_gains(self, strategy: Strategy, batch: int) -> Floats:
        """Expected tokens of every request of the rollout in an iteration, where these stay the same."""
        if not strategy.speculates:
            return np.ones(len(self.requests))
        model, gains = self._model.at(batch), self._groups.gains
        if (strategy, id(model)) not in gains:
            everyone = np.zeros(len(self.requests))
            survival = model.survival(strategy, self._levels(strategy.drafter), everyone, everyone)
            gains[strategy, id(model)] = 1.0 + survival.sum(axis=1)
        return gains[strategy, id(model)]

    def _drawn(self, regime: Regime, drafted: Ints | None, remaining: Floats, limit: float, room_tokens: float) -> Ints:
        assert self._seeds is not None
        running, batch = self._running, len(remaining)
        survival = self._survival(regime.strategy, drafted, np.zeros(batch))
        # The first to finish is likely the one with the fewest iterations left: rarely worth drawing far beyond it.
        soonest = math.ceil(float((remaining / (1.0 + survival.sum(axis=1))).min()) * 1.2) + 4
        count = max(1, int(min(limit, soonest, remaining.min(), BLOCK_CELLS // batch)))
        if count > 1:
            survival = self._survival(regime.strategy, drafted, (1.0 + survival.sum(axis=1)) * ((count - 1) / 2))
        luck = uniforms(self._seeds[running], self._draws[running], count)
        gains = np.ones((batch, count), np.int64)
        for level in survival.T:
            gains += luck >= 1.0 - level[:, None]
        return gains[:, : iterations_until_done(gains, remaining - TOLERANCE_TOKENS, room_tokens)]

    def _survival(self, strategy: Strategy, drafted: Ints | None, ahead: Floats) -> Floats:
        """P(accepted >= i) of each resident, `ahead` tokens further on; 0 beyond what it is drafted."""
        running = self._running
        full = strategy if drafted is None else Strategy.chain(strategy.drafter, strategy.draft_depth)
        levels, siblings = self._levels(strategy.drafter)[running], self._groups.siblings(running)
        survival = self._model.at(len(running)).survival(full, levels, self._generated[running] + ahead, siblings)
        if drafted is None:
            return survival
        return np.asarray(np.where(np.arange(survival.shape[1])[None, :] < drafted[:, None], survival, 0.0))

    def _levels(self, drafter: str) -> Floats:
        """The level of every request of the rollout."""
        return self.requests.levels(self._model, drafter, self._rates.seed)

    def _allotted(self, regime: Regime) -> tuple[Regime, Ints]:
        """The budget's share of each resident, and the regime with its cost."""
        strategy, batch = regime.strategy, len(self._running)
        refuse_trees(strategy)
        assert self._budget is not None
        state = StepState(
            rl_step=self.requests.rl_step,
            batch=batch,
            context_tokens=self.context_tokens,
            strategy=strategy,
            requests=[self.request_state(r) for r in self.running],
        )
        drafted = np.array(self._budget.allot(state, strategy), np.int64)
        if len(drafted) != batch or ((drafted < 0) | (drafted > strategy.draft_depth)).any():
            raise ConfigError(
                f"the budget gave {drafted.tolist()} for {batch} requests: it must give each 0 to "
                f"{strategy.draft_depth} tokens under {strategy}"
            )
        full = Strategy.chain(strategy.drafter, strategy.draft_depth)
        share = self._model.at(batch).num_drafted(full) / strategy.draft_depth
        deepest, mean = int(drafted.max()), float(drafted.mean()) * share
        key = (strategy, deepest, mean)
        if key not in self._regimes:
            cost = self._rates.costs.iteration(
                Strategy.chain(strategy.drafter, deepest),
                tokens_to_verify=1.0 + mean,
                drafter_loaded=True,
                drafters=self._rates.drafters,
            )
            self._regimes[key] = Regime(
                strategy=strategy, cost=cost, tokens=regime.tokens, num_drafted=mean, most=deepest, cdf=None
            )
        return self._regimes[key], drafted

    def _remember(self, accepted: Floats, num_iterations: int, drafted: Ints | None, regime: Regime) -> None:
        share = regime.num_drafted / drafted.mean() if drafted is not None and drafted.any() else 1.0
        num_drafted = regime.num_drafted if drafted is None else drafted * share
        self._drafted[self._running] += num_iterations * num_drafted
        self._accepted[self._running] += num_iterations * accepted
        residents = self._running if drafted is None else self._running[drafted > 0]
        current = accepted if drafted is None else accepted[drafted > 0]
        previous = self._recent[residents]
        weight = 1.0 - math.exp(-num_iterations / RECENT_ITERATIONS)
        self._recent[residents] = np.where(np.isnan(previous), current, previous + weight * (current - previous))


@dataclass(slots=True, kw_only=True)
class Rates:
    """Makes the batches of a simulation. Those of one rollout, known by its `Requests`, share their groups.

    `budgets` are those of the workers in order, none where the strategy alone says what is drafted: a rollout's first
    batch gets the first one.
    """

    model: ByRequest
    costs: CostModel
    seed: int = 0
    sampled: bool = False
    budgets: Sequence[DraftBudget] = ()
    refresh: int = REFRESH_ITERATIONS
    drafters: Drafters = STANDARD
    _requests: Requests | None = field(default=None, init=False)
    _num_batches: int = field(default=0, init=False)
    _groups: Groups | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ConfigError(f"refresh must be at least 1 iteration, got {self.refresh}")

    def __call__(self, requests: Requests) -> RateBatch:
        if self._groups is None or self._requests is not requests:
            self._requests, self._groups, self._num_batches = requests, Groups(requests), 0
        budget = self.budgets[self._num_batches] if self.budgets else None
        self._num_batches += 1
        return RateBatch(requests, self, self._groups, budget)
