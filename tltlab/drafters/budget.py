"""How an iteration's drafts are shared out among the requests: the contract, the even split, and one by acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.state import RequestState, StepState
from tltlab.strategy import Strategy

from .specs import Drafters


class DraftBudget(ABC):
    """Allots draft tokens to running requests under a chosen strategy.

    Like a selector it holds no clock and draws nothing; after the same calls the same state gives the same answer.
    Budgets apply to chains: `draft_depth` is the most for one request, batch * (tokens_to_verify - 1) what the strategy
    verifies in all. One method is enough for a budget of your own. With `drafts_whole` the drafter makes all drafts to
    that depth, and the budget cuts them before the target verifies.
    """

    drafts_whole: ClassVar[bool] = False

    def drafts_with(self, drafters: Drafters) -> None:  # noqa: B027
        """Receive the drafters of the run, once before the first `allot`."""

    @abstractmethod
    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        """Tokens to draft for each request in order, `state.batch` numbers from 0 to `strategy.draft_depth`."""

    def finished(self, request: RequestState, *, drafted: int, accepted: int) -> None:  # noqa: B027
        """Learn from a request that has ended with these `drafted` and `accepted` tokens over its whole response."""

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, as JSON types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` gave."""


class UniformBudget(DraftBudget):
    """Every request gets `tokens_to_verify` - 1 draft tokens of the strategy.

    >>> UniformBudget().allot(StepState(rl_step=0, batch=3), Strategy("ngram", 8, 1, 5))
    [4, 4, 4]
    """

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        return even(state, strategy)


class AcceptanceBudget(DraftBudget):
    """Drafts go where they are most likely to be kept.

    The total is what the strategy verifies, batch * (tokens_to_verify - 1), at most `max_draft_tokens`. A request whose
    recent drafts kept a tokens on average keeps a token with chance alpha = a / (a + 1), the geometric distribution of
    that mean; the i-th drafted token is kept with alpha^i. The total goes to the largest of these, after `min_tokens`
    for everyone (who is never drafted for is never measured again); equal ones go to shallower tokens first, then in
    order. A request without recent drafts counts as the mean of the others, or as `prior` where there are none. With a
    whole chain (tokens_to_verify = draft_depth + 1) everyone can have the full depth and nothing is left to share out:
    trim it.

    >>> requests = [RequestState(key=(0, "p", i, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99,
    ...                          recent_acceptance=a) for i, a in enumerate((3.0, 0.1))]
    >>> AcceptanceBudget().allot(StepState(rl_step=0, batch=2, requests=requests), Strategy("ngram", 8, 1, 5))
    [7, 1]
    """

    def __init__(self, min_tokens: int = 1, max_draft_tokens: int | None = None, prior: float = 1.0) -> None:
        if min_tokens < 0 or (max_draft_tokens is not None and max_draft_tokens < 0) or not 0.0 <= prior < np.inf:
            raise ConfigError(
                f"acceptance: min_tokens, max_draft_tokens and prior must be at least 0, "
                f"got {min_tokens}, {max_draft_tokens} and {prior}"
            )
        self.min_tokens = min_tokens
        self.max_draft_tokens = max_draft_tokens
        self.prior = prior

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates:
            return [0] * state.batch
        refuse_trees(strategy)
        total = sum(even(state, strategy))
        if self.max_draft_tokens is not None:
            total = min(total, self.max_draft_tokens)
        return [
            int(n)
            for n in share_out(accept_probabilities(state, self.prior), strategy.draft_depth, total, self.min_tokens)
        ]


def accept_probabilities(state: StepState, prior: float) -> Floats:
    """Return each request's chance a / (a + 1) to keep a token, as `AcceptanceBudget` explains it."""
    recent = [request.recent_acceptance for request in state.requests]
    if len(recent) != state.batch:
        recent = [None] * state.batch
    measured = [a for a in recent if a is not None]
    usual = float(np.mean(measured)) if measured else prior
    accepted = np.array([usual if a is None else max(a, 0.0) for a in recent], np.float64)
    chances: Floats = accepted / (accepted + 1.0)
    return chances


def shares_of(budget: DraftBudget, state: StepState, strategy: Strategy) -> list[int]:
    """Tokens to draft for each request of `state`, as a budget allots them. ConfigError for shares that do not fit."""
    shares = list(map(int, budget.allot(state, strategy)))
    if len(shares) != state.batch or (shares and not 0 <= min(shares) <= max(shares) <= strategy.draft_depth):
        raise ConfigError(
            f"the budget gave {shares} for {state.batch} requests: it must give each 0 to {strategy.draft_depth} "
            f"tokens under {strategy}"
        )
    return shares


def share_out(chances: Floats, depth: int, total: int, min_tokens: int = 0) -> Ints:
    """Tokens for each request that maximise the expected number kept, sum over requests of sum_i chance^i.

    Never more than `depth` each or `total` in all; `min_tokens` for everyone comes first, in order, while it lasts.
    """
    batch = len(chances)
    least = min(min_tokens, depth)
    allotment = np.clip(total - np.arange(batch) * least, 0, least)
    remaining = total - int(allotment.sum())
    if remaining <= 0 or least == depth:
        return allotment.astype(np.int64)
    token = np.arange(least + 1, depth + 1)
    worth = chances[:, None] ** token
    # By worth, then by depth, then in order: a request's deeper token never comes before its shallower one.
    order = np.lexsort((np.tile(np.arange(batch), len(token)), np.repeat(token, batch), -worth.T.ravel()))[:remaining]
    return allotment.astype(np.int64) + np.bincount(order % batch, minlength=batch)


def even(state: StepState, strategy: Strategy) -> list[int]:
    """Return `tokens_to_verify` - 1 draft tokens for every request."""
    return [strategy.tokens_to_verify - 1] * state.batch


def refuse_trees(strategy: Strategy) -> None:
    """ConfigError for a tree: only chains can be cut anywhere."""
    if strategy.top_k > 1:
        raise ConfigError(f"budget: drafts of trees cannot be shared out, and {strategy} is one")
