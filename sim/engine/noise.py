"""Noise of iteration times with common random numbers: iteration i of a worker meets the same one under every policy.

A draw is a hash of (seed, RL step, worker, iteration), as in random_numbers.py. Policies need different numbers of
iterations for the same tokens, so what is common is the noise by number, not by token.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri

from tltlab.costs.noise import IterationNoise

from .batch import Floats
from .random_numbers import request_seeds, uniforms

_FIRST = 512


class NoiseDraws:
    """The noise of one worker in one rollout, drawn as far as it is asked for."""

    def __init__(self, noise: IterationNoise, seed: int, rl_step: int, worker: int) -> None:
        self._noise = noise
        lengths = [length for length, _ in noise.components]
        self._seeds = request_seeds(seed, [(rl_step, "iteration noise", worker, length) for length in lengths])
        # Blocks of different workers and steps do not begin together.
        self._offsets = [int(own) % length for own, length in zip(self._seeds.tolist(), lengths, strict=True)]
        self._drawn: Floats = np.zeros(0)
        self._sums: Floats = np.zeros(1)

    def between(self, first: int, count: int) -> Floats:
        """The noise of iterations first..first+count-1."""
        self._reach(first + count)
        return self._drawn[first : first + count]

    def mean(self, first: int, count: int) -> float:
        """Their mean."""
        self._reach(first + count)
        return float(self._sums[first + count] - self._sums[first]) / count

    def _reach(self, end: int) -> None:
        if end <= len(self._drawn):
            return
        begin, end = len(self._drawn), max(end, 2 * len(self._drawn), _FIRST)
        scores = np.zeros(end - begin)
        for (length, share), own, offset in zip(self._noise.components, self._seeds, self._offsets, strict=True):
            first, last = (begin + offset) // length, (end - 1 + offset) // length
            block = uniforms(np.array([own], np.uint64), np.array([first], np.int64), last - first + 1)[0]
            # The hash can be 0, and the normal score of that is -infinity.
            normal = ndtri(np.maximum(block, 2.0**-54))
            scores += np.sqrt(share) * normal[(np.arange(begin, end) + offset) // length - first]
        self._drawn = np.concatenate([self._drawn, self._noise.at(ndtr(scores))])
        self._sums = np.concatenate([[0.0], np.cumsum(self._drawn)])
