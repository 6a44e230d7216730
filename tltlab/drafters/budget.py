"""Budgets, which share out an iteration's drafts among requests: the contract, by acceptance, and by length."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.state import Key, RequestState, StepState
from tltlab.strategy import Strategy

from .specs import Drafters

_LEAST_RECORDS = 8
_REFITS_PER_WINDOW = 64
_GOLDEN = 0.6180339887498949
_PRIOR_TOKENS = 256.0
_MEMORY_RESPONSES = 256
_MOST_OF_REACH = 0.99
_TOLERANCE = 1e-3
_PRIOR_ACCEPTED = 1.0
"""Tokens kept of a draft where nothing is known."""
_PREFERENCE = 2.0
"""How much more a high-priority request's token is asked to bring than a low-priority one's."""
_QUANTILES, _WINDOW = (1 / 3, 2 / 3), 4096
_REACH, _EFFICIENCY = 0.9, 0.7
_REPLAN_EVERY = 64


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

    def state_dict(self) -> Json:
        """Everything learned, as JSON types."""
        return {}

    def load_state_dict(self, state: Json) -> None:  # noqa: B027
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
    order. A request without recent drafts counts as the mean of the others, or as 1 where there are none. With a
    whole chain (tokens_to_verify = draft_depth + 1) everyone can have the full depth and nothing is left to share out:
    trim it.

    >>> requests = [RequestState(key=(0, "p", i, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99,
    ...                          recent_acceptance=a) for i, a in enumerate((3.0, 0.1))]
    >>> AcceptanceBudget().allot(StepState(rl_step=0, batch=2, requests=requests), Strategy("ngram", 8, 1, 5))
    [7, 1]
    """

    def __init__(self, min_tokens: int = 1, max_draft_tokens: int | None = None):
        if min(min_tokens, max_draft_tokens or 0) < 0:
            raise ConfigError(
                f"acceptance: min_tokens and max_draft_tokens must be at least 0, got {min_tokens}, {max_draft_tokens}"
            )
        self.min_tokens = min_tokens
        self.max_draft_tokens = max_draft_tokens

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates:
            return [0] * state.batch
        refuse_trees(strategy)
        total = sum(even(state, strategy))
        if self.max_draft_tokens is not None:
            total = min(total, self.max_draft_tokens)
        return share_out(accept_probabilities(state), strategy.draft_depth, total, self.min_tokens)


def accept_probabilities(state: StepState) -> Floats:
    """Return each request's chance a / (a + 1) to keep a token, as `AcceptanceBudget` explains it."""
    recent = [request.recent_acceptance for request in state.requests]
    if len(recent) != state.batch:
        recent = [None] * state.batch
    measured = [a for a in recent if a is not None]
    usual = float(np.mean(measured)) if measured else _PRIOR_ACCEPTED
    accepted = np.array([usual if a is None else max(a, 0.0) for a in recent], np.float64)
    return accepted / (accepted + 1.0)


def shares_of(budget: DraftBudget, state: StepState, strategy: Strategy) -> list[int]:
    """Tokens to draft for each request of `state`, as a budget allots them. ConfigError for shares that do not fit."""
    shares = list(map(int, budget.allot(state, strategy)))
    if len(shares) != state.batch or (shares and not 0 <= min(shares) <= max(shares) <= strategy.draft_depth):
        raise ConfigError(
            f"the budget gave {shares} for {state.batch} requests: it must give each 0 to {strategy.draft_depth} "
            f"tokens under {strategy}"
        )
    return shares


def share_out(chances: Floats, depth: int, total: int, min_tokens: int = 0) -> list[int]:
    """Tokens for each request that maximise the expected number kept, sum over requests of sum_i chance^i.

    Never more than `depth` each or `total` in all; `min_tokens` for everyone comes first, in order, while it lasts.
    """
    batch = len(chances)
    least = min(min_tokens, depth)
    allotment = np.clip(total - np.arange(batch) * least, 0, least)
    remaining = total - int(allotment.sum())
    if remaining > 0 and least < depth:
        token = np.arange(least + 1, depth + 1)
        worth = chances[:, None] ** token
        # By worth, then by depth, then in order: a request's deeper token never comes before its shallower one.
        order = np.lexsort((np.tile(np.arange(batch), len(token)), np.repeat(token, batch), -worth.T.ravel()))
        allotment = allotment + np.bincount(order[:remaining] % batch, minlength=batch)
    return list(map(int, allotment))


def even(state: StepState, strategy: Strategy) -> list[int]:
    """Return `tokens_to_verify` - 1 draft tokens for every request."""
    return [strategy.tokens_to_verify - 1] * state.batch


def refuse_trees(strategy: Strategy) -> None:
    """ConfigError for a tree: only chains can be cut anywhere."""
    if strategy.top_k > 1:
        raise ConfigError(f"budget: drafts of trees cannot be shared out, and {strategy} is one")


def marginal_depths(
    num_high: int, num_low: int, profile: Sequence[float], total: int, *, most: int = 8
) -> tuple[int, int]:
    """Depths of the high- and the low-priority requests: Algorithm 1 of arXiv 2511.14617, `total` tokens in all.

    If the total is less than one token per high-priority request, no request drafts. Then these get one each and the
    rest is handed out level by level: to the high ones if benefit_h > 2 * benefit_l, the total covers them and
    they have fewer than `most`, else to the low ones if it covers them, else it stops.

    `profile[i]` is the chance that token i is kept, all before it too; profile[0] = 1. benefit_x is B_x * (profile[g] -
    profile[g + 1]) as printed, where the text has lost its subscripts.

    >>> profile = [1, 0.9, 0.8, 0.7, 0.3, 0.2, 0.1]
    >>> marginal_depths(12, 4, profile, 60), marginal_depths(5, 0, profile, 4)
    ((5, 0), (0, 0))
    """
    if num_high < 1 or total < num_high:
        return (0, min(most, total // num_low) if not num_high and num_low else 0)

    def benefit(count: int, depth: int) -> float:
        last = len(profile) - 1
        return count * (profile[min(depth, last)] - profile[min(depth + 1, last)])

    high, low, remaining = 1, 0, total - num_high
    while True:
        room_high, room_low = high < most and remaining >= num_high, low < most and 0 < num_low <= remaining
        if room_high and (not num_low or benefit(num_high, high) > _PREFERENCE * benefit(num_low, low)):
            high, remaining = high + 1, remaining - num_high
        elif room_low:
            low, remaining = low + 1, remaining - num_low
        elif room_high and low >= most:
            high, remaining = high + 1, remaining - num_high
        else:
            return high, low


class MbaBudget(DraftBudget):
    """Depths by `marginal_depths` for a total of gamma* tokens per request (arXiv 2511.14617, section on MBA).

    gamma* = argmin T_SD(B, gamma), 0 where no depth beats plain decoding. The seconds per token of a request are

        T_SD(B, gamma) = (1 - alpha) * T(B, gamma) / (1 - alpha^(gamma + 1)),

    with T(B, gamma) = base_s + token_s * B * (gamma + 1): drafts that are looked up take no time.

    Probes have high priority: sample 0 of each group, whose length predicts those of the other samples. alpha is a / (a
    + 1) of the mean recent acceptance a, and the profile alpha^i. A request without a draft so far counts as a = 1:
    else one early draft that is not kept ends all drafting, since nothing is measured any more.

    >>> from tltlab.state import RequestState
    >>> requests = [RequestState(key=(0, "p", i, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99)
    ...             for i in range(3)]
    >>> budget = MbaBudget(base_s=0.01, token_s=1e-3)
    >>> budget.allot(StepState(rl_step=0, batch=3, requests=requests), Strategy.chain("suffix", 8))
    [1, 1, 1]
    """

    def __init__(self, base_s: float = 9.5e-3, token_s: float = 5e-5):
        if min(base_s, token_s) <= 0:
            raise ConfigError(f"MBA: base_s and token_s must be above 0, got {base_s} and {token_s}")
        self.base_s, self.token_s = base_s, token_s

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates:
            return [0] * state.batch
        refuse_trees(strategy)
        requests = list(state.requests)
        recent = [_PRIOR_ACCEPTED if r.recent_acceptance is None else r.recent_acceptance for r in requests]
        accepted = float(np.mean(recent)) if recent else _PRIOR_ACCEPTED
        alpha = accepted / (accepted + 1.0)
        most = strategy.reach

        def seconds(depth: int) -> float:
            pass_s = self.base_s + self.token_s * state.batch * (depth + 1)
            return pass_s / sum(alpha**i for i in range(depth + 1))

        depth = min(range(most + 1), key=seconds)
        probes = [request.key[2] == 0 for request in requests] or [False] * state.batch
        high, low = marginal_depths(
            sum(probes), state.batch - sum(probes), [alpha**i for i in range(most + 2)], depth * state.batch, most=most
        )
        return [high if probe else low for probe in probes]


class LengthClasses:
    """Classes of response length, and the expected length of requests that still run.

    Class 0 is the shortest; the borders are the terciles of the last 4,096 finished lengths. A prompt's
    start class is the majority class of its own finished responses; a prompt without any has none. A running request
    is of the class that most of the responses with its start class ended in, among those longer than it is already;
    without a start class, or where none of that class got so far, all responses count. Ties go to the longer class.
    Each response counts under the start class that the other ones of its prompt give it.

    Responses that finish first are short, so early in a first RL step the history holds short responses only. New
    responses count once they are a 64th of the history: what is learned is worked out that often and no more.

    >>> classes = LengthClasses()
    >>> for prompt, length in [("short", 10), ("middle", 100), ("long", 1000)] * 4:
    ...     classes.finished(prompt, length)
    >>> [values.tolist() for values in classes.expect(["short", "long"], np.array([0.0, 400.0]))]
    [[0, 2], [10.0, 600.0]]
    """

    def __init__(self) -> None:
        self.records_: list[tuple[str, int]] = []
        self.pending_: list[tuple[str, int]] = []
        self._fitted: _Tables | None = None

    def finished(self, prompt_id: str, response_tokens: int) -> None:
        """Take the length of a finished response."""
        self.pending_.append((prompt_id, response_tokens))
        if len(self.pending_) * _REFITS_PER_WINDOW >= len(self.records_):
            self.records_ = (self.records_ + self.pending_)[-_WINDOW:]
            self.pending_ = []
            self._fitted = None

    def expect(self, prompt_ids: Sequence[str], generated_tokens: Floats) -> tuple[Ints, Floats] | None:
        """Class and expected remaining tokens of running requests, shape (requests,); None while nothing is known.

        Remaining tokens are the mean over the class. A request longer than all responses seen is expected to grow as
        much again.
        """
        tables = self._tables
        return None if tables is None else tables.expect(prompt_ids, generated_tokens)

    def state_dict(self) -> Json:
        return {"records": [list(r) for r in self.records_], "pending": [list(r) for r in self.pending_]}

    def load_state_dict(self, state: Json) -> None:
        self.records_ = [(str(prompt), int(length)) for prompt, length in state["records"]]
        self.pending_ = [(str(prompt), int(length)) for prompt, length in state["pending"]]
        self._fitted = None

    @property
    def _tables(self) -> _Tables | None:
        # Not before somebody asks: requests end in every other iteration of a large batch.
        if self._fitted is None and len(self.records_) >= _LEAST_RECORDS:
            self._fitted = _Tables(self.records_)
        return self._fitted


class _Tables:
    """Counts and sums of lengths in ascending order, for each start class and, in the last row, for all responses."""

    def __init__(self, records: Sequence[tuple[str, int]]):
        number: dict[str, int] = {}
        prompts = np.array([number.setdefault(prompt, len(number)) for prompt, _ in records], np.int64)
        lengths = np.array([length for _, length in records], np.float64)
        borders = np.quantile(lengths, _QUANTILES, method="higher")
        classes = np.searchsorted(borders, lengths, side="right")
        self.num_classes = num = len(_QUANTILES) + 1
        votes = np.bincount(prompts * num + classes, minlength=len(number) * num).reshape(-1, num)
        self.start = dict(zip(number, _majority(votes).tolist(), strict=True))
        sibling_votes = votes[prompts]
        sibling_votes[np.arange(len(records)), classes] -= 1
        start = np.where(sibling_votes.any(axis=1), _majority(sibling_votes), num)
        order = np.argsort(lengths, kind="stable")
        self.lengths = lengths[order]
        self.edges = np.concatenate([[0], np.searchsorted(self.lengths, borders, side="left"), [len(records)]])
        member = np.arange(num + 1)[:, None] == start[order][None, :]
        member[num] = True
        self.counts = np.zeros((num + 1, len(records) + 1), np.int64)
        self.sums = np.zeros((num + 1, len(records) + 1))
        np.cumsum(member, axis=1, out=self.counts[:, 1:])
        np.cumsum(member * self.lengths, axis=1, out=self.sums[:, 1:])

    def expect(self, prompt_ids: Sequence[str], generated_tokens: Floats) -> tuple[Ints, Floats]:
        num, everyone = self.num_classes, self.num_classes
        start = np.array([self.start.get(prompt, everyone) for prompt in prompt_ids], np.int64)
        passed = np.searchsorted(self.lengths, generated_tokens, side="right")
        start = np.where(self.counts[start, -1] > self.counts[start, passed], start, everyone)
        low = np.clip(passed[:, None], self.edges[:-1], self.edges[1:])
        rows, high = start[:, None], self.edges[1:]
        count = self.counts[rows, high] - self.counts[rows, low]
        likely = _majority(count)
        at = np.arange(len(start)), likely
        members = count[at]
        total = (self.sums[rows, high] - self.sums[rows, low])[at]
        doubled = np.maximum(generated_tokens, 1.0)
        remaining = np.where(members > 0, total / np.maximum(members, 1) - generated_tokens, doubled)
        return np.where(members > 0, likely, num - 1), remaining


def _majority(votes: Ints) -> Ints:
    """The column with most votes in each row, the last one of equals."""
    last: Ints = votes.shape[1] - 1 - np.argmax(votes[:, ::-1], axis=1)
    return last


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
    k, the share of a response that drafts can provide at best, is 0.9. alpha starts at 0.7; finished requests that were
    drafted for teach it, their last few hundred pooled. The plan is made anew when the batch has changed, and after 64
    calls.
    """

    def __init__(self, base_s: float = 9.5e-3, token_s: float = 5e-5):
        optimal_budget([1.0], _REACH, _EFFICIENCY, base_s, token_s)
        self.base_s = base_s
        self.token_s = token_s
        self.classes_ = LengthClasses()
        # Tokens drafted, accepted and generated: so many of the last that the settings stand for one short response.
        accepted_share = _REACH * (1.0 - math.exp(-_EFFICIENCY))
        self.pooled_ = [_PRIOR_TOKENS, accepted_share * _PRIOR_TOKENS, _PRIOR_TOKENS]
        self.keys_: list[Key] = []
        self.calls_left_ = 0
        self.plans_: dict[tuple[int, int], list[float]] = {}

    @property
    def efficiency(self) -> float:
        """Alpha as learned so far: A = k l (1 - exp(-alpha p / l)), solved for it."""
        drafted, accepted, generated = self.pooled_
        share = min(accepted / (_REACH * generated), _MOST_OF_REACH)
        return min(-math.log1p(-share) * generated / drafted, 1.0 / _REACH)

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates:
            return [0] * state.batch
        refuse_trees(strategy)
        requests = list(state.requests)
        keys = [request.key for request in requests]
        if len(keys) != state.batch:
            return even(state, strategy)
        if not self.calls_left_ or keys != self.keys_:
            self.keys_, self.calls_left_, self.plans_ = keys, _REPLAN_EVERY, {}
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
                _REACH,
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

    def state_dict(self) -> Json:
        return {
            "classes": self.classes_.state_dict(),
            "pooled": list(self.pooled_),
            "keys": [list(key) for key in self.keys_],
            "calls_left": self.calls_left_,
            "plans": [[*shape, ends] for shape, ends in self.plans_.items()],
        }

    def load_state_dict(self, state: Json) -> None:
        self.classes_.load_state_dict(state["classes"])
        self.pooled_ = list(state["pooled"])
        self.keys_ = [(key[0], key[1], key[2], key[3]) for key in state["keys"]]
        self.calls_left_ = state["calls_left"]
        self.plans_ = {(depth, verified): list(ends) for depth, verified, ends in state["plans"]}
