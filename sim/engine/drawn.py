"""A worker's running requests where every request has its own gains: drawn at random, or replayed per position."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tltlab.acceptance.load import TraceAcceptance

from .batch import Batch, MacroStep, iterations_that_fit
from .random_numbers import request_seeds, uniforms
from .regime import Regime
from .requests import Requests

IntArray = npt.NDArray[np.int64]
_BLOCK_CELLS = 1 << 16


class WalkBatch(Batch):
    """Residents as arrays in order of admission; iterations are walked in blocks until one finishes."""

    def __init__(self, requests: Requests) -> None:
        super().__init__(requests)
        self._prompts = requests.prompts
        self._lengths = requests.lengths
        self._generated = np.zeros(len(requests), np.int64)
        self._running = np.zeros(0, np.int64)

    @property
    def running(self) -> Sequence[int]:
        return [int(r) for r in self._running]

    def __len__(self) -> int:
        return len(self._running)

    @property
    def context_tokens(self) -> float:
        return float(self._prompts[self._running].sum() + self._generated[self._running].sum())

    def generated(self, request: int) -> float:
        return float(self._generated[request])

    def admit(self, request: int, generated: float) -> None:
        assert self._generated[request] == generated
        self._running = np.append(self._running, request)

    def preempt(self) -> tuple[int, float]:
        request = int(self._running[-1])
        self._running = self._running[:-1]
        return request, self.generated(request)

    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        running, batch, context = self._running, len(self._running), self.context_tokens
        left = self._lengths[running] - self._generated[running]
        gains = None
        if regime.strategy.speculates:
            block = max(1, min(int(left.min()), _BLOCK_CELLS // batch))
            gains = self._gains(running, regime, int(min(block, limit)))
            gained = np.cumsum(gains, axis=1)
            growth = np.concatenate([[0], gained.sum(axis=0)])
            n = gains.shape[1]
            done = (gained >= left[:, None]).any(axis=0)
            n = int(done.argmax()) + 1 if done.any() else n
            if batch > 1 and not math.isinf(room_tokens):
                n = min(n, max(1, int((growth[:n] <= room_tokens).sum())))
            gains, total, grown = gains[:, :n], gained[:, n - 1], float(growth[:n].sum())
        else:
            n = int(min(left.min(), limit, iterations_that_fit(batch, batch, room_tokens)))
            total, grown = np.full(batch, n), batch * n * (n - 1) / 2
        first_s = regime.fixed_s(batch) + regime.slope_s(batch) * context
        self._walked(running, regime, n)
        self._generated[running] += total
        over = self._generated[running] >= self._lengths[running]
        self._running = running[~over]
        seconds = n * first_s + regime.slope_s(batch) * grown
        finished = [int(r) for r in running[over]]
        return MacroStep(regime, n, batch, seconds, first_s, context, finished, gains)

    @abstractmethod
    def _gains(self, running: IntArray, regime: Regime, count: int) -> IntArray:
        """Tokens of the next iterations, shape (requests, at most count), the bonus token included."""

    def _walked(self, running: IntArray, regime: Regime, num_iterations: int) -> None:
        """Note that these iterations took place."""


class SampledBatch(WalkBatch):
    """Accepted tokens drawn per request and speculative iteration, with common random numbers (random_numbers.py)."""

    def __init__(self, requests: Requests, seed: int) -> None:
        super().__init__(requests)
        self._seeds = request_seeds(seed, requests.keys)
        self._draws = np.zeros(len(requests), np.int64)

    def _gains(self, running: IntArray, regime: Regime, count: int) -> IntArray:
        left = int((self._lengths[running] - self._generated[running]).min())
        # The first to finish is likely the shortest: rarely worth drawing far beyond it.
        count = min(count, math.ceil(left / regime.tokens * 1.2) + 4)
        drawn = uniforms(self._seeds[running], self._draws[running], count)
        assert regime.cdf is not None
        return 1 + np.searchsorted(regime.cdf, drawn, side="right").astype(np.int64)

    def _walked(self, running: IntArray, regime: Regime, num_iterations: int) -> None:
        if regime.strategy.speculates:
            self._draws[running] += num_iterations


class ReplayBatch(WalkBatch):
    """Accepted tokens as recorded for the position at which the draft starts: deterministic in every mode."""

    def __init__(self, requests: Requests, acceptance: TraceAcceptance) -> None:
        super().__init__(requests)
        self._acceptance = acceptance
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])[:-1]
        self._flat: dict[str, npt.NDArray[np.uint8]] = {}

    def _gains(self, running: IntArray, regime: Regime, count: int) -> IntArray:
        flat = self._positions(regime.strategy.drafter)
        position, last = self._generated[running], self._lengths[running]
        columns = []
        for _ in range(count):
            gain = 1 + np.minimum(flat[self._starts[running] + position], regime.most).astype(np.int64)
            columns.append(gain)
            position = position + gain
            if (position >= last).any():
                break
        return np.stack(columns, axis=1)

    def _positions(self, drafter: str) -> npt.NDArray[np.uint8]:
        if drafter not in self._flat:
            pairs = zip(self.requests.keys, self.requests.response_tokens, strict=True)
            rows = [self._acceptance.positions(drafter, key, length) for key, length in pairs if length]
            self._flat[drafter] = np.concatenate(rows)
        return self._flat[drafter]
