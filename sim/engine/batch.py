"""The running requests of a worker, advanced by macro-steps: many iterations at once, in closed form."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from tltlab.arrays import Array, Floats, Ints
from tltlab.state import RequestState

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
    `regime.tokens` throughout.
    """

    regime: Regime
    num_iterations: int
    batch: int
    seconds: float
    first_s: float
    context_tokens: float
    finished: list[int]
    gains: Array | None = None

    @property
    def tokens(self) -> float:
        if self.gains is None:
            return self.num_iterations * self.batch * self.regime.tokens
        return float(self.gains.sum()) * self.num_iterations / int(self.gains.shape[1])

    @property
    def accepted(self) -> tuple[float, ...]:
        if self.gains is None:
            return (self.regime.tokens - 1.0,) * self.batch
        return tuple((self.gains.mean(axis=1) - 1.0).tolist())


class Batch(ABC):
    """Residents in order of admission; the newest is the last."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    @property
    @abstractmethod
    def running(self) -> Sequence[int]:
        """Requests in order of admission."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def context_tokens(self) -> float:
        """Prompt and generated tokens of the residents."""

    @property
    @abstractmethod
    def grows_to(self) -> int:
        """Tokens that the KV cache never has to exceed for the residents, however they advance."""

    @abstractmethod
    def generated(self, request: int) -> float:
        """Tokens a resident has generated; expected ones in fluid mode."""

    @abstractmethod
    def generated_so_far(self) -> tuple[Ints, Floats]:
        """The residents and the tokens that each has generated."""

    def recent_acceptance(self, request: int) -> float | None:
        """Accepted tokens per draft of a resident lately; None where it was not drafted for, or requests are alike."""
        return None

    def request_state(self, request: int) -> RequestState:
        """A resident as policies and budgets see it."""
        key = self.requests.keys[request]
        return RequestState(
            key=key,
            prompt_id=key[1],
            generated_tokens=int(self.generated(request)),
            max_response_tokens=self.requests.max_response_tokens[request],
            recent_acceptance=self.recent_acceptance(request),
        )

    @property
    def is_steady(self) -> bool:
        """Whether every request gains the same in all iterations under one strategy at one batch size."""
        return False

    def settle(self) -> None:  # noqa: B027
        """The last macro-step's time has passed: what it finished is known from now on."""

    @abstractmethod
    def admit(self, request: int, generated: float) -> None:
        """Take a request in that has `generated` tokens already (from before a preemption)."""

    @abstractmethod
    def preempt(self) -> tuple[int, float]:
        """Put the newest out; the request and its generated tokens."""

    @abstractmethod
    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        """Run until a request finishes, `limit` iterations ran, or the next iteration would overflow the KV cache.

        `room_tokens` is what the context may grow before an iteration no longer fits. Finished requests leave.
        """


def iterations_that_fit(batch: int, growth_tokens: float, room_tokens: float) -> float:
    """Iterations before the context has outgrown `room_tokens`; a lone request always fits."""
    if room_tokens == math.inf or batch == 1:
        return math.inf
    return math.floor((room_tokens + TOLERANCE_TOKENS) / growth_tokens) + 1


class FluidBatch(Batch):
    """Every resident gains the expected tokens in each iteration.

    So one clock serves all: it counts the tokens that a resident gained since the step began. A request admitted at
    clock C with g tokens generated has offset C - g and finishes when the clock reaches offset + length.
    """

    is_steady = True

    def __init__(self, requests: Requests) -> None:
        super().__init__(requests)
        self._clock = 0.0
        self._offsets: dict[int, float] = {}
        self._finish: list[tuple[float, int, int]] = []
        self._serial = 0
        self._entry: dict[int, int] = {}
        self._base = 0.0
        self._grows_to = 0

    @property
    def running(self) -> Sequence[int]:
        return list(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def context_tokens(self) -> float:
        return len(self._offsets) * self._clock + self._base

    @property
    def grows_to(self) -> int:
        return self._grows_to

    def generated(self, request: int) -> float:
        return self._clock - self._offsets[request]

    def admit(self, request: int, generated: float) -> None:
        offset = self._clock - generated
        self._serial += 1
        self._offsets[request] = offset
        self._entry[request] = self._serial
        self._base += self.requests.prompt_tokens[request] - offset
        self._grows_to += self.requests.prompt_tokens[request] + self.requests.response_tokens[request] + 1
        heapq.heappush(self._finish, (offset + self.requests.response_tokens[request], self._serial, request))

    def preempt(self) -> tuple[int, float]:
        request = next(reversed(self._offsets))
        generated = self.generated(request)
        self._remove(request)
        return request, generated

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
        slope_s = regime.slope_s(batch)
        context = batch * self._clock + self._base
        growth = batch * gain
        n = max(1, math.ceil((self._next_finish() - self._clock - TOLERANCE_TOKENS) / gain))
        n = int(min(n, limit, iterations_that_fit(batch, growth, room_tokens)))
        first_s = regime.fixed_s(batch) + slope_s * context
        seconds = n * first_s + slope_s * growth * (n * (n - 1) / 2)
        self._clock += n * gain
        reached = self._clock + TOLERANCE_TOKENS
        finished = []
        while self._next_finish() <= reached:
            request = heapq.heappop(self._finish)[2]
            self._remove(request)
            finished.append(request)
        return MacroStep(regime, n, batch, seconds, first_s, context, finished)

    def generated_so_far(self) -> tuple[Ints, Floats]:
        residents = np.fromiter(self._offsets, np.int64, len(self._offsets))
        return residents, self._clock - np.fromiter(self._offsets.values(), np.float64, len(self._offsets))


class ArrayBatch(Batch):
    """Residents as an array in order of admission, where every request has gains of its own."""

    def __init__(self, requests: Requests, dtype: type[np.int64] | type[np.float64]) -> None:
        super().__init__(requests)
        self._running = np.zeros(0, np.int64)
        self._generated: Array = np.zeros(len(requests), dtype)

    @property
    def running(self) -> Sequence[int]:
        return [int(r) for r in self._running]

    def __len__(self) -> int:
        return len(self._running)

    @property
    def context_tokens(self) -> float:
        return float(self.requests.prompts[self._running].sum() + self._generated[self._running].sum())

    def generated(self, request: int) -> float:
        return float(self._generated[request])

    def admit(self, request: int, generated: float) -> None:
        self._generated[request] = generated
        self._running = np.append(self._running, request)

    def preempt(self) -> tuple[int, float]:
        request = int(self._running[-1])
        self._running = self._running[:-1]
        return request, self.generated(request)

    @property
    def grows_to(self) -> int:
        requests, running = self.requests, self._running
        return int(requests.prompts[running].sum() + requests.lengths[running].sum()) + len(running)

    def generated_so_far(self) -> tuple[Ints, Floats]:
        return self._running, self._generated[self._running].astype(np.float64)

    def pass_plainly(self, num_iterations: int) -> None:
        """Take these iterations without speculation as having passed; requests that end within them leave."""
        self._generated[self._running] += num_iterations
        self._running = self._running[self._remaining() > TOLERANCE_TOKENS]

    def _remaining(self) -> Array:
        """Tokens that each resident lacks."""
        remaining: Array = self.requests.lengths[self._running] - self._generated[self._running]
        return remaining

    def _advance_plain(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        """Run without speculation: a token per request and iteration."""
        batch = len(self._running)
        whole = max(1, math.ceil(float(self._remaining().min()) - TOLERANCE_TOKENS))
        n = int(min(whole, limit, iterations_that_fit(batch, batch, room_tokens)))
        return self._advanced(regime, n, n, batch * n * (n - 1) / 2)

    def _advance_by(self, regime: Regime, gains: Array) -> MacroStep:
        """Run as many iterations as there are columns of `gains`."""
        n = gains.shape[1]
        growth = float((gains.sum(axis=0) * np.arange(n - 1, -1, -1)).sum())
        return self._advanced(regime, n, gains.sum(axis=1), growth, gains)

    def _advance_steadily(self, regime: Regime, n: int, gain: Floats) -> MacroStep:
        """Run `n` iterations in each of which request i gains `gain[i]`."""
        return self._advanced(regime, n, gain * n, float(gain.sum()) * (n * (n - 1) / 2), gain[:, None])

    def _advanced(
        self, regime: Regime, n: int, total: Array | int, growth: float, gains: Array | None = None
    ) -> MacroStep:
        """`growth` sums over the iterations what the context has grown by before each."""
        running, batch, context = self._running, len(self._running), self.context_tokens
        first_s = regime.fixed_s(batch) + regime.slope_s(batch) * context
        self._generated[running] = generated = self._generated[running] + total
        over = generated >= self.requests.lengths[running] - TOLERANCE_TOKENS
        self._running = running[~over]
        seconds = n * first_s + regime.slope_s(batch) * growth
        return MacroStep(regime, n, batch, seconds, first_s, context, running[over].tolist(), gains)


def iterations_until_done(gains: Array, remaining: Array, room_tokens: float) -> int:
    """Columns of `gains` until one request has what is `remaining` of it, or the context has outgrown `room_tokens`."""
    gained = np.cumsum(gains, axis=1)
    done = (gained >= remaining[:, None]).any(axis=0)
    n = int(done.argmax()) + 1 if done.any() else gains.shape[1]
    if len(remaining) > 1 and not math.isinf(room_tokens):
        growth = np.concatenate([[0], gained.sum(axis=0)[:-1]])
        n = min(n, max(1, int((growth[:n] <= room_tokens + TOLERANCE_TOKENS).sum())))
    return n


class RequestsView(Sequence[RequestState]):
    """The running requests as a policy sees them, in order of admission, made one at a time when they are read.

    Holds for the iteration it was made for.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @cached_property
    def _running(self) -> Sequence[int]:
        return self._batch.running

    def __len__(self) -> int:
        return len(self._batch)

    @overload
    def __getitem__(self, index: int) -> RequestState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestState]: ...
    def __getitem__(self, index: int | slice) -> RequestState | Sequence[RequestState]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._batch.request_state(self._running[index])
