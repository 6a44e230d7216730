"""Common random numbers: request r's k-th speculative iteration draws the same uniform under every policy.

A uniform is a hash of (seed, request, k), SplitMix64 (Steele et al. 2014), so nothing is stored and blocks are drawn in
one vectorised call. The draws of a request do not depend on the order of events or the number of workers.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from tltlab.arrays import Floats, Ints, Words
from tltlab.costs.noise import IterationNoise
from tltlab.state import Key

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_FIRST = 512
_MANY = 128
"""Numbers to a threshold from which comparing with each threshold takes less than a search at random places."""


def request_seeds(seed: int, keys: Iterable[Key]) -> Words:
    """One 64-bit seed per request, from the simulation's seed and the request's key."""
    digests = (hashlib.blake2b(repr((seed, key)).encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def uniforms(seeds: Words, start: Ints, count: int) -> Floats:
    """Draws start[i]..start[i]+count-1 of each request: shape (requests, count), in [0, 1)."""
    z = (seeds + start.astype(np.uint64) * _GOLDEN)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return np.asarray(((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def num_reached(drawn: Floats, thresholds: Floats) -> Ints:
    """Ascending thresholds that each number has reached: the same for all rows, or a row of them for each row."""
    if thresholds.ndim == 1 and drawn.size < _MANY * len(thresholds):
        return np.searchsorted(thresholds, drawn, side="right")
    reached = np.zeros(drawn.shape, np.min_scalar_type(thresholds.shape[-1]))
    for column in thresholds.T[..., None]:
        reached += (drawn >= column).view(np.uint8)
    return reached.astype(np.int64)


class NoiseDraws:
    """The noise of one worker in one rollout, drawn as it is asked for.

    Iteration i of a worker meets the same noise under every policy. Policies need different numbers of iterations for
    the same tokens, so what is common is the noise by number, not by token.
    """

    def __init__(self, noise: IterationNoise, seed: int, rl_step: int, worker: int):
        self._noise = noise
        lengths = [length for length, _ in noise.components]
        self._seeds = request_seeds(seed, [(rl_step, "iteration noise", worker, length) for length in lengths])
        # Blocks of different workers and steps do not begin together.
        self._offsets = [int(number) % length for number, length in zip(self._seeds.tolist(), lengths, strict=True)]
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
        from scipy.special import ndtr, ndtri  # takes longer to import than an RL step to simulate

        begin, end = len(self._drawn), max(end, 2 * len(self._drawn), _FIRST)
        scores = np.zeros(end - begin)
        for (length, share), number, offset in zip(self._noise.components, self._seeds, self._offsets, strict=True):
            first, last = (begin + offset) // length, (end - 1 + offset) // length
            block = uniforms(np.array([number], np.uint64), np.array([first], np.int64), last - first + 1)[0]
            # The hash can be 0, and the normal score of that is -infinity.
            normal = ndtri(np.maximum(block, 2.0**-54))
            scores += np.sqrt(share) * normal[(np.arange(begin, end) + offset) // length - first]
        self._drawn = np.concatenate([self._drawn, self._noise.at(ndtr(scores))])
        self._sums = np.concatenate([[0.0], np.cumsum(self._drawn)])
