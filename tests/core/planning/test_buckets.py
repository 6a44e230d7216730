"""Exact buckets: equal to trying everything."""

import itertools
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.planning.buckets import plan_buckets
from tltlab.planning.graph_pool import GraphMemory, GraphPool, plan_bucketed, sglang_sizes
from tltlab.strategy import NO_SPECULATION, Strategy

POOL = GraphPool(num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=8192, bytes_per_layer=1e6)
NGRAM, SUFFIX = Strategy.chain("ngram", 4), Strategy.chain("suffix", 4)
TREES = (Strategy("learned", 8, 4, 16), Strategy("learned", 4, 4, 16), Strategy("learned", 4, 8, 16))
SMALL = (NO_SPECULATION, NGRAM, SUFFIX, *TREES, Strategy("learned", 3, 2, 5), Strategy("learned", 8, 4, 48))
MANY = (
    NO_SPECULATION, NGRAM, *(Strategy.chain("learned", depth) for depth in (2, 4)),
    *(Strategy("learned", d, k, v) for d in (3, 5, 8) for k, v in ((2, 8), (4, 16), (4, 32), (8, 48))),
)  # fmt: skip


def room(max_batch, cap=float("inf"), pool=POOL, sizes=None):
    sizes = sglang_sizes(max_batch) if sizes is None else tuple(sizes)
    return GraphMemory(pool=pool, cap_bytes=cap, max_batch=max_batch, sizes=sizes)


def exhaustive(weights, seconds, strategies, pool, cap, sizes, max_batch, max_buckets):
    """Every assignment of strategies to batches: (seconds, bytes) of the best, None where none fits."""
    best = None
    for choice in itertools.product(strategies, repeat=max_batch):
        rows = [(b, s) for b, s in enumerate(choice, 1) if b == 1 or s != choice[b - 2]]
        if max_buckets is not None and len(rows) > max_buckets:
            continue
        total = sum(weights.get(b, 0.0) * seconds[s, b] for b, s in enumerate(choice, 1))
        if best is not None and total > best[0] + 1e-9:
            continue
        memory = pool.memory_bytes(plan_bucketed(rows, max_batch, sizes))
        if memory <= cap and (best is None or (round(total, 9), memory) < (round(best[0], 9), best[1])):
            best = (total, memory)
    return best


def random_case(rng):
    max_batch = int(rng.integers(1, 6))
    strategies = [
        SMALL[i] for i in rng.choice(len(SMALL), size=rng.integers(1, 5 if max_batch > 4 else 6), replace=False)
    ]
    sizes = sorted({int(b) for b in rng.integers(1, max_batch + 3, size=rng.integers(0, 5))})
    weights = {b: float(rng.integers(0, 4)) for b in range(1, max_batch + 1)}
    seconds = {(s, b): float(rng.integers(1, 12)) for s in strategies for b in range(1, max_batch + 1)}
    pool = POOL.model_copy(
        update={
            "bytes_per_layer": float(rng.choice([0.0, 1e6, 3e7])),
            "workspace_bytes": int(rng.choice([0, 2**25, 2**29])),
            "context_tokens": int(rng.choice([1024, 131_072])),
            "tensor_parallel": int(rng.choice([1, 4])),
        }
    )
    # The cap is what some plan takes to the byte, so that it binds.
    borders = sorted({1, *(int(b) for b in rng.integers(1, max_batch + 1, size=2))})
    rows = [(b, strategies[rng.integers(len(strategies))]) for b in borders]
    cap = pool.memory_bytes(plan_bucketed(rows, max_batch, sizes)) * float(rng.choice([0.7, 1.0, 1.0, 1.2]))
    max_buckets = None if rng.random() < 0.6 else int(rng.integers(1, max_batch + 1))
    return weights, seconds, strategies, pool, cap, sizes, max_batch, max_buckets


def assert_is_best(case):
    weights, seconds, strategies, pool, cap, sizes, max_batch, max_buckets = case
    best = exhaustive(*case)
    graphs = room(max_batch, cap, pool, sizes)
    arguments = {"graphs": graphs, "max_batch": max_batch, "max_buckets": max_buckets}
    with refused(ConfigError, naming=("fits",)) if best is None else nullcontext():
        plan = plan_buckets(lambda s, b: weights[b] * seconds[s, b], strategies, **arguments)
        assert plan.seconds == pytest.approx(best[0])
        assert plan.memory_bytes == pool.memory_bytes(plan_bucketed(plan.rows, max_batch, sizes)) <= cap * (1 + 1e-12)
        assert max_buckets is None or len(plan.rows) <= max_buckets
        assert all(s != t for (_, s), (_, t) in itertools.pairwise(plan.rows))


@given(st.integers(0, 2**32 - 1))
def test_any_small_case_equals_exhaustive_search(seed):
    rng = np.random.default_rng([7, seed])
    for _ in range(2):
        assert_is_best(random_case(rng))


@given(st.integers(0, 2**32 - 1))
def test_without_graphs_any_case_equals_exhaustive_search(seed):
    weights, seconds, arms, *_, max_batch, max_buckets = random_case(np.random.default_rng(seed))
    plan = plan_buckets(lambda s, b: weights[b] * seconds[s, b], arms, max_batch=max_batch, max_buckets=max_buckets)
    best = exhaustive(weights, seconds, arms, POOL, float("inf"), (), max_batch, max_buckets)
    assert plan.seconds == pytest.approx(best[0])
    assert len(plan.rows) <= (max_buckets or max_batch)


def test_batches_without_weight_go_with_a_neighbour():
    wanted = {2: 4, 5: 0}
    plan = plan_buckets(lambda s, b: abs(s.draft_depth - wanted.get(b, s.draft_depth)), SMALL[:2], max_batch=8)
    assert len(plan.rows) == 2
    assert (plan.rows[0][0], plan.rows[0][1], plan.rows[1][1], plan.seconds) == (1, NGRAM, NO_SPECULATION, 0.0)


def test_a_larger_cap_is_never_slower():
    rng = np.random.default_rng(1)
    took = {(s, b): rng.uniform(1, 3) * (33 - b) for s in MANY for b in range(1, 33)}
    plan = partial(plan_buckets, lambda s, b: took[s, b], MANY, max_batch=32)
    free = plan(graphs=room(32)).memory_bytes
    least = min(POOL.memory_bytes(plan_bucketed([(1, s)], 32, sglang_sizes(32))) for s in MANY)
    caps = [least + share * (free - least) for share in (0.05, 0.1, 0.25, 0.6, 0.9)]
    plans = [plan(graphs=room(32, cap)) for cap in caps]
    assert all(plan.memory_bytes <= cap for plan, cap in zip(plans, caps, strict=True))
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_a_cap_that_no_plan_meets_is_refused():
    with refused(ConfigError, naming=("1",)):
        plan_buckets(lambda s, b: 1.0, [NGRAM], max_batch=2, graphs=room(2, 1.0))
