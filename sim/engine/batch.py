"""The running requests of a worker, advanced by macro-steps: many iterations at once.

One `Batch` for every source of gains; where all gain what is expected, `FluidBatch` does the same in closed form.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tltlab.arrays import Array, Floats, Ints
from tltlab.state import NEWEST_WEIGHT, RequestState, StepState, recent_acceptance

from .regime import Regime
from .requests import Requests

TOLERANCE_TOKENS = 1e-6
"""A request this close to its length has reached it: sums of expected tokens carry rounding errors."""
BLOCK_CELLS = 1 << 16
"""Gains that are drawn or looked up at once, requests times iterations."""


@dataclass(slots=True)
class MacroStep:
    """`num_iterations` iterations of `batch` requests under one regime, `seconds` in all, `first_s` the first of them.

    `context_tokens` is the sum before the first iteration. `accepted` is the mean per iteration of each request in
    order of admission; `tokens` all tokens that came out, surplus of finishing requests included. Where requests gain
    apart, `gains[i, j]` is what request i got in iteration j, a single column what it got in each; None means
    `regime.tokens` throughout. `shares` are the tokens drafted for each request, None where they are
    `regime.num_drafted` for all.
    """

    regime: Regime
    num_iterations: int
    batch: int
    seconds: float
    first_s: float
    context_tokens: float
    finished: Sequence[int]
    gains: Array | None = None
    shares: Floats | None = None

    @property
    def drafted(self) -> tuple[float, ...]:
        """Tokens drafted for each request in an iteration."""
        return (self.regime.num_drafted,) * self.batch if self.shares is None else tuple(self.shares.tolist())

    @property
    def tokens(self) -> float:
        if self.gains is None:
            return self.num_iterations * self.batch * self.regime.tokens
        return float(self.gains.sum()) * self.num_iterations / int(self.gains.shape[1])

    @property
    def gained(self) -> Floats:
        """Tokens that each request has got in all."""
        if self.gains is None:
            return np.full(self.batch, self.num_iterations * self.regime.tokens)
        gained: Floats = self.gains.mean(axis=1) * self.num_iterations
        return gained

    @property
    def accepted(self) -> tuple[float, ...]:
        if self.gains is None:
            return (self.regime.tokens - 1.0,) * self.batch
        return tuple((self.gains.mean(axis=1) - 1.0).tolist())


class SpeculativeIterations(NamedTuple):
    """Iterations that speculate: what residents gain in them, and what was `drafted` for each in one of them.

    `gains` has a row per resident and a column per iteration, or a single column where all iterations are alike.
    `regime` is that of the strategy, or one of another cost where a budget shares drafts out.
    """

    regime: Regime
    gains: Array
    num_iterations: int
    drafted: Array | float


class Gains(ABC):
    """Source of what the residents of one batch gain while a strategy speculates; without, each gains a token.

    With `is_steady` every request gains what the regime has in all iterations. With `is_apart` no request's gains
    depend on what others do.
    """

    is_steady: bool = False
    is_apart: bool = True
    shares_out: bool = False
    """A budget sets how many tokens are drafted for each request, and sees `Batch.state`."""

    @abstractmethod
    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> SpeculativeIterations:
        """Return the next iterations: until a request finishes, `limit` of them, or as many as fit, at least one."""

    def finish(self, batch: Batch, requests: Sequence[int]) -> None:  # noqa: B027
        """Note that these requests have finished."""


_NOBODY: Ints = np.zeros(0, np.int64)


class Batch:
    """Residents of a worker in order of admission, the newest last; `source` gives the gains of each while drafted for.

    `is_steady` is that of the source. With `advances_plain` iterations without speculation may be passed at once. Where
    it `lags`, residents are those that a scheduler knows while an iteration is in flight; `num_held` more wait for it.
    """

    lags = False
    num_held = 0

    def __init__(self, requests: Requests, source: Gains):
        self.requests = requests
        self.source = source
        self.state: StepState | None = None
        """The worker as its policy sees it, without the requests."""
        self.is_steady = source.is_steady
        self.advances_plain = source.is_apart
        self.residents = _NOBODY
        self._finished: list[int] = []
        # Most policies never read what was drafted, so that it is counted when it is read.
        self._uncounted: list[tuple[Ints, SpeculativeIterations]] = []

    # Arrays as long as a rollout are made when they are first needed: closed forms do without.
    @cached_property
    def made(self) -> Floats:
        """Tokens that each request of the rollout has generated."""
        return np.zeros(len(self.requests))

    @cached_property
    def num_drafts(self) -> Ints:
        """Drafts of each request of the rollout so far."""
        return np.zeros(len(self.requests), np.int64)

    @cached_property
    def _counts(self) -> Floats:
        """By request of the rollout: recent acceptance, and tokens drafted and accepted."""
        return np.zeros((len(self.requests), 3))

    @property
    def running(self) -> Sequence[int]:
        """Requests in order of admission."""
        running: list[int] = self.residents.tolist()
        return running

    def __len__(self) -> int:
        return len(self.residents)

    @property
    def context_tokens(self) -> float:
        """Prompt and generated tokens of the residents."""
        return float(self.requests.prompts[self.residents].sum() + self.made[self.residents].sum())

    @property
    def peak_kv_tokens(self) -> int:
        """Tokens that the KV cache never has to exceed for the residents, however they advance."""
        requests, residents = self.requests, self.residents
        return int(requests.prompts[residents].sum() + requests.lengths[residents].sum()) + len(residents)

    @property
    def remaining(self) -> Floats:
        """Tokens that each resident lacks."""
        remaining: Floats = self.requests.lengths[self.residents] - self.made[self.residents]
        return remaining

    def generated(self, request: int) -> float:
        """Tokens a resident has generated; expected ones in fluid mode."""
        return float(self.made[request])

    def generated_so_far(self) -> tuple[Ints, Floats]:
        """The residents and the tokens that each has generated."""
        return self.residents, self.made[self.residents]

    def drafts(self, request: int) -> tuple[float | None, float, float]:
        """Recent acceptance (None before the first draft) and the tokens that were drafted and accepted in all."""
        if self._uncounted:
            for residents, ahead in self._uncounted:
                self._count(residents, ahead)
            self._uncounted = []
        recent, drafted, accepted = self._counts[request].tolist()
        return recent if drafted else None, drafted, accepted

    def _count(self, residents: Ints, ahead: SpeculativeIterations) -> None:
        gains, n, drafted = ahead.gains, ahead.num_iterations, ahead.drafted
        if isinstance(drafted, np.ndarray) and not drafted.all():
            residents, gains, drafted = residents[drafted > 0], gains[drafted > 0], drafted[drafted > 0]
        first, faded = gains[:, 0] - 1.0, (1.0 - NEWEST_WEIGHT) ** n
        if gains.shape[1] == 1:
            newest, accepted = first * (1.0 - faded), first * n
        else:
            newest = (gains - 1.0) @ (NEWEST_WEIGHT * (1.0 - NEWEST_WEIGHT) ** np.arange(n - 1.0, -1.0, -1.0))
            accepted = gains.sum(axis=1) - n
        counts = self._counts[residents]
        counts[:, 0] = np.where(counts[:, 1] > 0, counts[:, 0], first) * faded + newest
        counts[:, 1] += n * drafted
        counts[:, 2] += accepted
        self._counts[residents] = counts

    def request_state(self, request: int) -> RequestState:
        """A resident as policies and budgets see it."""
        key = self.requests.keys[request]
        return RequestState(
            key=key,
            prompt_id=key[1],
            generated_tokens=int(self.generated(request)),
            max_response_tokens=self.requests.max_response_tokens[request],
            recent_acceptance=self.drafts(request)[0],
        )

    def admit(self, *admitted: tuple[int, float]) -> None:
        """Take requests in, each with the tokens that it has already (from before a preemption)."""
        requests = np.array([request for request, _ in admitted], np.int64)
        self.made[requests] = [generated for _, generated in admitted]
        self.residents = np.concatenate([self.residents, requests])

    def preempt(self) -> tuple[int, float]:
        """Put the newest out; the request and its generated tokens."""
        request = self.running[-1]
        return request, self.remove(request)

    def remove(self, request: int) -> float:
        """Put a resident out; the tokens that it has generated."""
        self.residents = self.residents[self.residents != request]
        return self.generated(request)

    def mark(self) -> Callable[[], None]:
        """Return what brings the residents back to where they are now, if the last macro-step has not been settled."""
        residents, made, num_drafts = self.residents, self.made[self.residents], self.num_drafts[self.residents]
        num_uncounted = len(self._uncounted)

        def back() -> None:
            self.residents, self._finished = residents, []
            self.made[residents], self.num_drafts[residents] = made, num_drafts
            del self._uncounted[num_uncounted:]

        return back

    def land(self) -> None:
        """Nothing can run before what is in flight is known: it is from now on."""

    def settle(self) -> None:
        """The last macro-step's time has passed: what it finished is known from now on."""
        if self._finished:
            finished, self._finished = self._finished, []
            self.source.finish(self, finished)

    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        """Run until a request finishes, `limit` iterations ran, or the next iteration would overflow the KV cache.

        `room_tokens` is what the context may grow before an iteration no longer fits. Finished requests leave.
        """
        self.settle()
        batch, residents, shares = len(self.residents), self.residents, None
        total: Array | int
        if regime.strategy.speculates:
            ahead = self.source.ahead(self, regime, limit, room_tokens)
            regime, gains, n = ahead.regime, ahead.gains, ahead.num_iterations
            shares = ahead.drafted if isinstance(ahead.drafted, np.ndarray) else None
            self.num_drafts[residents] += n
            self._uncounted.append((residents, ahead))
            if gains.shape[1] == 1:
                total, growth = gains[:, 0] * n, float(gains.sum()) * (n * (n - 1) / 2)
            else:
                total, growth = gains.sum(axis=1), float((gains.sum(axis=0) * np.arange(n - 1, -1, -1)).sum())
        else:
            gains, n = None, steady_iterations(self.remaining, 1.0, limit, room_tokens)
            total, growth = n, batch * n * (n - 1) / 2
        context, (fixed_s, slope_s) = self.context_tokens, regime.terms(batch)
        first_s = fixed_s + slope_s * context
        self.made[residents] = made = self.made[residents] + total
        over = made >= self.requests.lengths[residents] - TOLERANCE_TOKENS
        if over.any():
            self.residents, self._finished = residents[~over], residents[over].tolist()
        seconds = n * first_s + slope_s * growth
        return MacroStep(regime, n, batch, seconds, first_s, context, tuple(self._finished), gains, shares)

    def advance_plain(self, num_iterations: int) -> None:
        """Take these iterations without speculation as having passed; requests that end within them leave."""
        self.made[self.residents] += num_iterations
        self.residents = self.residents[self.remaining > TOLERANCE_TOKENS]


def steady_iterations(remaining: Floats, gain: Floats | float, limit: float, room_tokens: float) -> int:
    """Iterations of one `gain` each until a request has what is `remaining`, at most `limit` and what fits."""
    n = max(1, math.ceil(float(((remaining - TOLERANCE_TOKENS) / gain).min())))
    growth = float(gain.sum()) if isinstance(gain, np.ndarray) else len(remaining) * gain
    return int(min(n, limit, _iterations_that_fit(len(remaining), growth, room_tokens)))


def _iterations_that_fit(batch: int, growth_tokens: float, room_tokens: float) -> float:
    """Iterations before the context has outgrown `room_tokens`; a lone request always fits."""
    if room_tokens == math.inf or batch == 1:
        return math.inf
    return math.floor((room_tokens + TOLERANCE_TOKENS) / growth_tokens) + 1


def columns_ahead(remaining: Floats, gain: Floats | float, limit: float) -> int:
    """Iterations worth drawing at once, at most `limit`, where requests are expected to gain `gain` in each."""
    # The first to finish is likely the one with the fewest iterations left: rarely worth drawing far beyond it.
    if limit == 1:
        return 1
    soonest = math.ceil(float((remaining / gain).min()) * 1.2) + 4
    return max(1, int(min(limit, soonest, remaining.min(), BLOCK_CELLS // len(remaining))))


def until_done(gains: Ints, remaining: Floats, room_tokens: float) -> Ints:
    """Columns of `gains` until one request has what is `remaining` of it, or the context has outgrown `room_tokens`."""
    if gains.shape[1] == 1:
        return gains
    needed, n = np.ceil(remaining - TOLERANCE_TOKENS).astype(np.int64), gains.shape[1]
    if len(done := np.flatnonzero(gains.sum(axis=1) >= needed)):
        gained = np.cumsum(gains[done], axis=1)
        n = int((gained >= needed[done, None]).argmax(axis=1).min()) + 1
    if len(remaining) > 1 and not math.isinf(room_tokens):
        growth = np.concatenate([[0], np.cumsum(gains.sum(axis=0)[:-1])])
        n = min(n, max(1, int((growth[:n] <= room_tokens + TOLERANCE_TOKENS).sum())))
    return gains[:, :n]


class Expected(Gains):
    """Every resident gains the expected tokens in each iteration."""

    is_steady = True

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> SpeculativeIterations:
        n = steady_iterations(batch.remaining, regime.tokens, limit, room_tokens)
        return SpeculativeIterations(regime, np.full((len(batch), 1), regime.tokens), n, regime.num_drafted)


_EXPECTED = Expected()
_Counted = tuple[int, float | None, float, float]
_UNDRAFTED: _Counted = (0, None, 0.0, 0.0)


class FluidBatch(Batch):
    """The batch whose source is `Expected`, in O(log batch) a macro-step instead of O(batch).

    One clock serves all: it counts the tokens that a resident gained since the step began. A request admitted at clock
    C with g tokens generated has offset C - g and finishes when the clock reaches offset + length.
    """

    def __init__(self, requests: Requests):
        super().__init__(requests, _EXPECTED)
        self._clock = 0.0
        self._offsets: dict[int, float] = {}
        self._finish: list[tuple[float, int, int]] = []
        self._serial = 0
        self._entry: dict[int, int] = {}
        self._base = 0.0
        self._grows_to = 0
        # Macro-steps that drafted; by request, how many of them are in its `drafts`, and these.
        self._drafting: list[MacroStep] = []
        self._counted: dict[int, _Counted] = {}

    @property
    def running(self) -> Sequence[int]:
        return list(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def context_tokens(self) -> float:
        return len(self._offsets) * self._clock + self._base

    @property
    def peak_kv_tokens(self) -> int:
        return self._grows_to

    def generated(self, request: int) -> float:
        return self._clock - self._offsets[request]

    def generated_so_far(self) -> tuple[Ints, Floats]:
        residents = np.fromiter(self._offsets, np.int64, len(self._offsets))
        return residents, self._clock - np.fromiter(self._offsets.values(), np.float64, len(self._offsets))

    def drafts(self, request: int) -> tuple[float | None, float, float]:
        counted, recent, drafted, accepted = self._counted.get(request, _UNDRAFTED)
        for macro in self._drafting[counted:]:
            n, kept = macro.num_iterations, macro.regime.tokens - 1.0
            recent = recent_acceptance(recent, kept, n)
            drafted, accepted = drafted + n * macro.regime.num_drafted, accepted + n * kept
        self._counted[request] = len(self._drafting), recent, drafted, accepted
        return recent, drafted, accepted

    def admit(self, *admitted: tuple[int, float]) -> None:
        prompt_tokens, response_tokens, clock = self.requests.prompt_tokens, self.requests.response_tokens, self._clock
        base, grows_to, serial, entries = self._base, self._grows_to, self._serial, []
        for request, generated in admitted:
            offset, prompt, length = clock - generated, prompt_tokens[request], response_tokens[request]
            serial += 1
            self._offsets[request], self._entry[request] = offset, serial
            base += prompt - offset
            grows_to += prompt + length + 1
            entries.append((offset + length, serial, request))
        self._base, self._grows_to, self._serial = base, grows_to, serial
        if self._drafting:
            for request, _ in admitted:
                self._counted[request] = (len(self._drafting), *self._counted.get(request, _UNDRAFTED)[1:])
        if self._finish:
            for entry in entries:
                heapq.heappush(self._finish, entry)
        else:
            heapq.heapify(entries)
            self._finish = entries

    def remove(self, request: int) -> float:
        generated = self.generated(request)
        if self._drafting:
            self.drafts(request)
        self._remove(request)
        return generated

    def mark(self) -> Callable[[], None]:
        offsets, entry, finish = dict(self._offsets), dict(self._entry), list(self._finish)
        sums, num_drafting = (self._clock, self._base, self._grows_to), len(self._drafting)

        def back() -> None:
            self._offsets, self._entry, self._finish = offsets, entry, finish
            self._clock, self._base, self._grows_to = sums
            del self._drafting[num_drafting:]

        return back

    def _remove(self, request: int) -> None:
        self._base -= self.requests.prompt_tokens[request] - self._offsets.pop(request)
        del self._entry[request]
        self._grows_to -= self.requests.prompt_tokens[request] + self.requests.response_tokens[request] + 1

    def _next_finish(self) -> float:
        """The clock at which the next resident ends, infinity without one."""
        heap, entry = self._finish, self._entry
        while heap and entry.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        batch, gain = len(self._offsets), regime.tokens
        fixed_s, slope_s = regime.terms(batch)
        context = batch * self._clock + self._base
        growth = batch * gain
        next_finish = self._next_finish()
        n = max(1, math.ceil((next_finish - self._clock - TOLERANCE_TOKENS) / gain))
        if room_tokens != math.inf:
            limit = min(limit, _iterations_that_fit(batch, growth, room_tokens))
        n = int(min(n, limit))
        first_s = fixed_s + slope_s * context
        seconds = n * first_s + slope_s * growth * (n * (n - 1) / 2)
        self._clock += n * gain
        reached = self._clock + TOLERANCE_TOKENS
        finished = []
        while next_finish <= reached:
            request = heapq.heappop(self._finish)[2]
            self._remove(request)
            finished.append(request)
            next_finish = self._next_finish()
        # Logs keep it, and garbage collection passes over a tuple of numbers.
        macro = MacroStep(regime, n, batch, seconds, first_s, context, tuple(finished))
        if regime.num_drafted:
            self._drafting.append(macro)
        return macro

    def advance_plain(self, num_iterations: int) -> None:
        self._clock += num_iterations
        reached, lengths = self._clock + TOLERANCE_TOKENS, self.requests.response_tokens
        # Most leave: those that stay are admitted anew.
        left = [(request, offset) for request, offset in self._offsets.items() if offset + lengths[request] > reached]
        self._finish, self._offsets, self._entry, self._base, self._grows_to = [], {}, {}, 0.0, 0
        self.admit(*((request, self._clock - offset) for request, offset in left))


class RequestsView(Sequence[RequestState]):
    """The running requests as a policy sees them, in order of admission, made one at a time when they are read.

    Holds for the iteration it was made for.
    """

    __slots__ = ("_batch", "_running")

    def __init__(self, batch: Batch):
        self._batch = batch
        self._running: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._running is None:
            self._running = self._batch.running
        return self._batch.request_state(self._running[index])
