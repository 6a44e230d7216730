"""Gains of each request's own: drawn at random, or replayed per position. Iterations are walked until one finishes."""

from __future__ import annotations

import numpy as np

from tltlab.acceptance.base import Acceptance
from tltlab.arrays import Bytes

from .batch import Ahead, Batch, Gains, columns_ahead, until_done
from .random_numbers import num_reached, uniforms
from .regime import Regime
from .requests import Requests


class Drawn(Gains):
    """Accepted tokens drawn per request and speculative iteration, with common random numbers (random_numbers.py)."""

    def __init__(self, requests: Requests, seed: int) -> None:
        self._seeds = requests.seeds(seed)

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> Ahead:
        residents, remaining = batch.residents, batch.remaining
        count = columns_ahead(remaining, regime.tokens, limit)
        drawn = uniforms(self._seeds[residents], batch.num_drafts[residents], count)
        assert regime.cdf is not None
        gains = until_done(1 + num_reached(drawn, regime.cdf), remaining, room_tokens)
        return Ahead(regime, gains, gains.shape[1], regime.num_drafted)


class Replayed(Gains):
    """Accepted tokens as recorded for the position at which the draft starts: deterministic in every mode."""

    def __init__(self, requests: Requests, acceptance: Acceptance) -> None:
        self._requests = requests
        self._acceptance = acceptance
        self._starts = np.concatenate([[0], np.cumsum(requests.lengths)])[:-1]
        self._flat: dict[str, Bytes] = {}

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> Ahead:
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
        return Ahead(regime, gains, gains.shape[1], regime.num_drafted)

    def _positions(self, drafter: str) -> Bytes:
        if drafter not in self._flat:
            pairs = zip(self._requests.keys, self._requests.response_tokens, strict=True)
            rows = [self._acceptance.positions(drafter, key, length) for key, length in pairs if length]
            self._flat[drafter] = np.concatenate(rows)
        return self._flat[drafter]
