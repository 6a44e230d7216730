"""A worker's running requests where every request has its own gains: drawn at random, or replayed per position."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from tltlab.acceptance.base import Settled
from tltlab.arrays import Bytes, Ints

from .batch import BLOCK_CELLS, ArrayBatch, MacroStep, iterations_until_done
from .random_numbers import uniforms
from .regime import Regime
from .requests import Requests


class WalkBatch(ArrayBatch):
    """Iterations are walked in blocks until a request finishes."""

    def __init__(self, requests: Requests) -> None:
        super().__init__(requests, np.int64)

    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        if not regime.strategy.speculates:
            return self._advance_plain(regime, limit, room_tokens)
        remaining = self._remaining()
        block = max(1, min(int(remaining.min()), BLOCK_CELLS // len(remaining)))
        gains = self._gains(regime, remaining, int(min(block, limit)))
        gains = gains[:, : iterations_until_done(gains, remaining, room_tokens)]
        self._walked(gains.shape[1])
        return self._advance_by(regime, gains)

    @abstractmethod
    def _gains(self, regime: Regime, remaining: Ints, count: int) -> Ints:
        """Tokens of the next iterations, shape (requests, at most count), the bonus token included."""

    def _walked(self, num_iterations: int) -> None:
        """Note that these speculative iterations took place."""


class SampledBatch(WalkBatch):
    """Accepted tokens drawn per request and speculative iteration, with common random numbers (random_numbers.py)."""

    def __init__(self, requests: Requests, seed: int) -> None:
        super().__init__(requests)
        self._seeds = requests.seeds(seed)
        self._draws = np.zeros(len(requests), np.int64)

    def _gains(self, regime: Regime, remaining: Ints, count: int) -> Ints:
        # The first to finish is likely the shortest: rarely worth drawing far beyond it.
        count = min(count, math.ceil(int(remaining.min()) / regime.tokens * 1.2) + 4)
        drawn = uniforms(self._seeds[self._running], self._draws[self._running], count)
        assert regime.cdf is not None
        return 1 + np.searchsorted(regime.cdf, drawn, side="right").astype(np.int64)

    def _walked(self, num_iterations: int) -> None:
        self._draws[self._running] += num_iterations


class ReplayBatch(WalkBatch):
    """Accepted tokens as recorded for the position at which the draft starts: deterministic in every mode."""

    def __init__(self, requests: Requests, acceptance: Settled) -> None:
        super().__init__(requests)
        self._acceptance = acceptance
        self._starts = np.concatenate([[0], np.cumsum(requests.lengths)])[:-1]
        self._flat: dict[str, Bytes] = {}

    def _gains(self, regime: Regime, remaining: Ints, count: int) -> Ints:
        flat, running = self._positions(regime.strategy.drafter), self._running
        position, last = self._generated[running], self.requests.lengths[running]
        columns = []
        for _ in range(count):
            gain = 1 + np.minimum(flat[self._starts[running] + position], regime.most).astype(np.int64)
            columns.append(gain)
            position = position + gain
            if (position >= last).any():
                break
        return np.stack(columns, axis=1)

    def _positions(self, drafter: str) -> Bytes:
        if drafter not in self._flat:
            pairs = zip(self.requests.keys, self.requests.response_tokens, strict=True)
            rows = [self._acceptance.positions(drafter, key, length) for key, length in pairs if length]
            self._flat[drafter] = np.concatenate(rows)
        return self._flat[drafter]
