"""Common random numbers: request r's k-th speculative iteration has the same luck under every policy.

A uniform is a hash of (seed, request, k), SplitMix64 (Steele et al. 2014), so nothing is stored, blocks are drawn in
one vectorised call, and neither the order of events nor the number of workers changes what a request draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tltlab.acceptance.load import Key

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def request_seeds(seed: int, keys: Iterable[Key]) -> npt.NDArray[np.uint64]:
    """One 64-bit seed per request, from the simulation's seed and the request's key."""
    digests = (hashlib.blake2b(repr((seed, key)).encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def uniforms(seeds: npt.NDArray[np.uint64], start: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """Draws start[i]..start[i]+count-1 of each request: shape (requests, count), in [0, 1)."""
    k = (start[:, None] + np.arange(1, count + 1)[None, :]).astype(np.uint64)
    z = seeds[:, None] + k * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return np.asarray(((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)
