"""Exact buckets: equal to trying everything."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tltlab.planning.buckets import plan_buckets
from tltlab.strategy import NO_SPECULATION, Strategy

NGRAM, SUFFIX = Strategy.chain("ngram", 4), Strategy.chain("suffix", 4)
TREES = (Strategy("learned", 8, 4, 16), Strategy("learned", 4, 4, 16), Strategy("learned", 4, 8, 16))
SMALL = (NO_SPECULATION, NGRAM, SUFFIX, *TREES, Strategy("learned", 3, 2, 5), Strategy("learned", 8, 4, 48))


def exhaustive(weights, seconds, strategies, max_batch, max_buckets):
    """Seconds of the best of every assignment of strategies to batches."""
    totals = []
    for choice in itertools.product(strategies, repeat=max_batch):
        num_rows = 1 + sum(one != next_one for one, next_one in itertools.pairwise(choice))
        if num_rows <= max_buckets:
            totals.append(sum(weights[b] * seconds[s, b] for b, s in enumerate(choice, 1)))
    return min(totals)


@given(st.integers(0, 2**32 - 1))
def test_any_small_case_equals_exhaustive_search(seed):
    rng = np.random.default_rng(seed)
    max_batch = int(rng.integers(1, 6))
    arms = [SMALL[i] for i in rng.choice(len(SMALL), size=rng.integers(1, 5 if max_batch > 4 else 6), replace=False)]
    weights = {b: float(rng.integers(0, 4)) for b in range(1, max_batch + 1)}
    seconds = {(s, b): float(rng.integers(1, 12)) for s in arms for b in weights}
    max_buckets = int(rng.integers(1, max_batch + 2))
    plan = plan_buckets(lambda s, b: weights[b] * seconds[s, b], arms, max_batch=max_batch, max_buckets=max_buckets)
    of_batch = {b: next(s for first, s in reversed(plan) if first <= b) for b in weights}
    took = sum(weights[b] * seconds[s, b] for b, s in of_batch.items())
    assert took == exhaustive(weights, seconds, arms, max_batch, max_buckets)
    assert len(plan) <= max_buckets
    assert all(s != t for (_, s), (_, t) in itertools.pairwise(plan))


def test_batches_without_weight_go_with_a_neighbour():
    wanted = {2: 4, 5: 0}
    first, (border, above) = plan_buckets(
        lambda s, b: abs(s.draft_depth - wanted.get(b, s.draft_depth)), SMALL[:2], max_batch=8, max_buckets=8
    )
    assert (first, above, 2 < border <= 5) == ((1, NGRAM), NO_SPECULATION, True)
