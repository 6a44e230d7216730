"""Buckets chosen exactly: which strategy for which batch sizes.

As responses end, a worker's batch falls. The tokens generated at batch b take some seconds under each strategy. A plan
gives contiguous ranges of batch sizes one strategy each; borders may lie anywhere in 1..max_batch. A limit on the
number of rows is a dynamic programme over (batch, rows, strategy).
"""

from collections.abc import Callable, Sequence

import numpy as np

from tltlab.arrays import Floats
from tltlab.strategy import Strategy


def plan_buckets(
    seconds_of: Callable[[Strategy, int], float], strategies: Sequence[Strategy], *, max_batch: int, max_buckets: int
) -> list[tuple[int, Strategy]]:
    """The rows (min_batch, strategy) for batches 1..max_batch with the fewest seconds, and of equals the fewest rows.

    `seconds_of(s, b)` is what all that is generated at batch b takes under s.

    >>> from tltlab.strategy import NO_SPECULATION
    >>> took = {("ngram", 1): 45.0, ("ngram", 2): 20.0, ("none", 1): 90.0, ("none", 2): 10.0}
    >>> arms = [NO_SPECULATION, Strategy.chain("ngram", 4)]
    >>> plan = plan_buckets(lambda s, b: took[s.drafter, b], arms, max_batch=2, max_buckets=4)
    >>> [(b, str(s)) for b, s in plan]
    [(1, 'ngram:4'), (2, 'none')]
    """
    strategies = tuple(dict.fromkeys(strategies))
    seconds = np.array([[seconds_of(s, b) for b in range(1, max_batch + 1)] for s in strategies])
    choice = _fastest(seconds, min(max_buckets, max_batch))
    return [(b + 1, strategies[s]) for b, s in enumerate(choice) if b == 0 or s != choice[b - 1]]


def _fastest(seconds: Floats, max_rows: int) -> list[int]:
    """The fastest choice for all batches; of equals one with the fewest rows: a batch of no weight joins its neighbour.

    `floor_s` [b, k, s] are the least seconds of batches 1..b below a row of s, with k rows more.
    """
    num_strategies, num_batches = seconds.shape
    floor_s = np.zeros((num_batches + 1, max_rows, num_strategies))
    for b in range(1, num_batches + 1):
        goes_on = floor_s[b - 1] + seconds[:, b - 1]
        floor_s[b] = goes_on
        floor_s[b, 1:] = np.minimum(goes_on[1:], goes_on[:-1].min(axis=1, keepdims=True))
    totals = (floor_s[-2] + seconds[:, -1]).min(axis=1)
    k = int(totals.argmin())
    choice = [int((floor_s[-2, k] + seconds[:, -1]).argmin())]
    for b in range(num_batches - 1, 0, -1):
        goes_on = floor_s[b - 1] + seconds[:, b - 1]
        s = choice[-1]
        if k and goes_on[k - 1].min() < goes_on[k, s]:
            k -= 1
            s = int(goes_on[k].argmin())
        choice.append(s)
    return choice[::-1]
