"""The length-aware draft budget of DAS (arXiv 2511.13841): long requests are drafted deep, short ones not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.state import RequestState, StepState
from tltlab.strategy import Strategy

from .budget import DraftBudget, even, refuse_trees
from .length_classes import LengthClasses

_GOLDEN = 0.6180339887498949
_PRIOR_TOKENS = 256.0
_MEMORY_RESPONSES = 256
_MOST_OF_REACH = 0.99
_TOLERANCE = 1e-3


def optimal_budget(
    lengths: npt.ArrayLike,
    reach: npt.ArrayLike,
    efficiency: npt.ArrayLike,
    base_s: float,
    token_s: float,
    *,
    most_per_pass: float = math.inf,
    most_in_all: float = math.inf,
    tolerance: float = 1e-9,
) -> tuple[float, Floats]:
    """The number of forward passes N to finish in, and the tokens p_i to draft for each request until then.

    A request of l_i tokens with p_i drafted tokens has A_i = k_i l_i (1 - exp(-alpha_i p_i / l_i)) accepted (`reach`
    k_i, `efficiency` alpha_i, k_i alpha_i <= 1: a drafted token yields at most one), and it takes l_i - A_i passes.
    Minimised is base_s * N + token_s * sum p_i. Longer requests are pushed down to a common N, the others get nothing:

        p_i = -(l_i / alpha_i) ln(1 - (1 - N / l_i) / k_i),    N > max_i (1 - k_i) l_i,
        base_s = token_s * sum over l_i > N of 1 / (alpha_i (k_i - 1 + N / l_i)).

    The paper prints k (1 - N / l) in the logarithm and k / (alpha (1 - k + k N / l)) in the sum (Eqs. 7 to 9), which
    is this with 1/k for k. The sum falls as N grows, so bisection finds N, to `tolerance` of the longest length.
    `most_per_pass` bounds p_i / N, `most_in_all` their
    sum. The first three arguments have the shape (requests,) or are the same for all. Raises ConfigError.

    >>> passes, drafts = optimal_budget([100, 1000], 0.8, 0.9, base_s=9.5e-3, token_s=5e-5)
    >>> round(passes), drafts.round().tolist()
    (206, [0.0, 5465.0])
    """
    length, k, alpha = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (lengths, reach, efficiency)))
    if length.ndim != 1 or not length.size or not (length > 0).all() or not np.isfinite(length).all():
        raise ConfigError("draft budget: lengths must be a row of positive numbers")
    if not ((k > 0) & (k <= 1) & (alpha > 0) & (alpha * k <= 1 + 1e-9)).all():
        raise ConfigError("draft budget: reach must be in (0, 1], efficiency above 0 and at most 1 / reach")
    if not (0 < base_s < math.inf and 0 < token_s < math.inf):
        raise ConfigError(f"draft budget: base_s and token_s must be above 0, got {base_s} and {token_s}")

    # Longest requests first: requests that N does not reach are at the end. A loop, since it is short and ends early.
    order = np.argsort(-length)
    rows = list(zip(length[order].tolist(), k[order].tolist(), alpha[order].tolist(), strict=True))

    def too_few(passes: float) -> bool:
        """Return True if N is not feasible, or if one more pass would save more than it costs."""
        drafts = saved = 0.0
        for tokens, most_kept, alpha_i in rows:
            if tokens <= passes:
                break
            slack = most_kept - 1.0 + passes / tokens
            if slack <= 0.0:
                return True
            needed = -tokens / alpha_i * math.log(slack / most_kept)
            drafts += needed
            saved += 1.0 / (alpha_i * slack)
            if needed > most_per_pass * passes or token_s * saved > base_s:
                return True
        return drafts > most_in_all * passes

    few, enough = float(((1.0 - k) * length).max()), float(length.max())
    step = tolerance * enough
    while enough - few > step:
        middle = 0.5 * (few + enough)
        if not few < middle < enough:
            break
        if too_few(middle):
            few = middle
        else:
            enough = middle
    inside = np.minimum(1.0 - (1.0 - enough / length) / k, 1.0)
    return enough, np.abs(length / alpha * np.log(inside))


class LengthAwareBudget(DraftBudget):
    """Budget by request: shares of the optimal budget (`optimal_budget`) for the lengths expected by class.

    Per pass a request is drafted p_i / N tokens, rounded so that sums over the batch and means over time are kept: with
    u in [0, 1), it gets floor(c_i + u) - floor(c_{i-1} + u), c the sums of the shares up to it. u runs evenly through
    its range as tokens are generated. A share is never more than the strategy's draft depth, nor their sum more than it
    verifies in all; while no lengths are known, shares are those of the strategy.

    `base_s`: seconds of a pass without drafts; `token_s`: seconds per drafted token. Only their ratio matters.
    `reach` is k, the share of a response that drafts can provide at best. `efficiency` is where alpha starts; finished
    requests that were drafted for teach it, their last few hundred pooled. The plan is made anew when the batch has
    changed, and after `replan_every` calls. `quantiles` and `window` are those of `LengthClasses`.
    """

    def __init__(
        self,
        base_s: float = 9.5e-3,
        token_s: float = 5e-5,
        reach: float = 0.9,
        efficiency: float = 0.7,
        quantiles: tuple[float, ...] = (1 / 3, 2 / 3),
        window: int = 4096,
        replan_every: int = 64,
    ) -> None:
        optimal_budget([1.0], reach, efficiency, base_s, token_s)
        if replan_every < 1:
            raise ConfigError(f"draft budget: replan_every must be at least 1 call, got {replan_every}")
        self.base_s = base_s
        self.token_s = token_s
        self.reach = reach
        self.replan_every = replan_every
        self.classes_ = LengthClasses(quantiles, window)
        # Tokens drafted, accepted and generated: so many of the last that the settings stand for one short response.
        accepted_share = reach * (1.0 - math.exp(-efficiency))
        self.pooled_ = [_PRIOR_TOKENS, accepted_share * _PRIOR_TOKENS, _PRIOR_TOKENS]
        self.keys_: list[tuple[int, str, int, int]] = []
        self.calls_left_ = 0
        self.plans_: dict[tuple[int, int], list[float]] = {}

    @property
    def efficiency(self) -> float:
        """Alpha as learned so far: A = k l (1 - exp(-alpha p / l)), solved for it."""
        drafted, accepted, generated = self.pooled_
        share = min(accepted / (self.reach * generated), _MOST_OF_REACH)
        return min(-math.log1p(-share) * generated / drafted, 1.0 / self.reach)

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates:
            return [0] * state.batch
        refuse_trees(strategy)
        requests = list(state.requests)
        keys = [request.key for request in requests]
        if len(keys) != state.batch:
            return even(state, strategy)
        if not self.calls_left_ or keys != self.keys_:
            self.keys_, self.calls_left_, self.plans_ = keys, self.replan_every, {}
        self.calls_left_ -= 1
        depth, verified = strategy.draft_depth, strategy.tokens_to_verify
        if (depth, verified) not in self.plans_:
            self.plans_[depth, verified] = self._plan(requests, depth, verified - 1)
        offset = sum([request.generated_tokens for request in requests]) * _GOLDEN % 1.0
        ends = [int(end + offset) for end in self.plans_[depth, verified]]
        return [share if (share := end - before) < depth else depth for before, end in pairwise([0, *ends])]

    def _plan(self, requests: Sequence[RequestState], depth: int, most: int) -> list[float]:
        """Sums of the tokens per pass, up to and with each request."""
        batch = len(requests)
        generated = np.array([request.generated_tokens for request in requests], np.float64)
        expectation = self.classes_.expect([request.prompt_id for request in requests], generated)
        if expectation is None:
            shares = np.full(batch, float(most))
        else:
            room = np.array([request.max_response_tokens for request in requests]) - generated
            passes, drafts = optimal_budget(
                np.clip(expectation[1], 1.0, np.maximum(room, 1.0)),
                self.reach,
                self.efficiency,
                self.base_s,
                self.token_s,
                most_per_pass=depth,
                most_in_all=batch * most,
                tolerance=_TOLERANCE,
            )
            shares = drafts / passes
        # One part in a million less: rounding errors must not push a sum past a whole number.
        ends: list[float] = (np.cumsum(shares) * (1.0 - 1e-6)).tolist()
        return ends

    def finished(self, request: RequestState, *, drafted: int, accepted: int) -> None:
        if request.generated_tokens < 1:
            return
        self.classes_.finished(request.prompt_id, request.generated_tokens)
        if drafted > 0:
            new = (drafted, accepted, request.generated_tokens)
            forget = 1.0 - 1.0 / _MEMORY_RESPONSES
            self.pooled_ = [forget * old + more for old, more in zip(self.pooled_, new, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "classes": self.classes_.state_dict(),
            "pooled": list(self.pooled_),
            "keys": [list(key) for key in self.keys_],
            "calls_left": self.calls_left_,
            "plans": [[*shape, ends] for shape, ends in self.plans_.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.classes_.load_state_dict(state["classes"])
        self.pooled_ = list(state["pooled"])
        self.keys_ = [(key[0], key[1], key[2], key[3]) for key in state["keys"]]
        self.calls_left_ = state["calls_left"]
        self.plans_ = {(depth, verified): list(ends) for depth, verified, ends in state["plans"]}
