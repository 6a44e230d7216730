"""How fast buckets are found under a memory cap that binds, and whether they are those of exhaustive search."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tltlab.planning.buckets import BucketPlan, plan_buckets
from tltlab.planning.graph_pool import GraphPool, plan_bucketed, sglang_sizes
from tltlab.strategy import NO_SPECULATION, Strategy

POOL = GraphPool(num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=8192, bytes_per_layer=1e6)
STRATEGIES = (
    NO_SPECULATION,
    Strategy.chain("ngram", 4),
    Strategy.chain("learned", 2),
    Strategy.chain("learned", 4),
    *(Strategy("learned", d, k, v) for d in (3, 5, 8) for k, v in ((2, 8), (4, 16), (4, 32), (8, 48))),
)
SMALL_BATCH, SMALL_STRATEGIES = 6, (STRATEGIES[0], STRATEGIES[1], STRATEGIES[9], STRATEGIES[14])


def bench(rounds: int = 5) -> dict[str, Any]:
    """Seconds of the exact search, 32 batch sizes and 16 strategies under caps that bind, and of both on a small case.

    The step times are a roofline's with random weights, the memory that of Llama-3-8B. Times are of this thread's
    processor, so that other programs do not count.
    """
    large, exact, everything, equal = [], [], [], True
    for seed in range(rounds):
        large += [_timed(seed, 32, STRATEGIES, cap)[1] for cap in _caps(seed, 32, STRATEGIES)]
        for cap in _caps(seed, SMALL_BATCH, SMALL_STRATEGIES):
            plan, seconds = _timed(seed, SMALL_BATCH, SMALL_STRATEGIES, cap)
            exact.append(seconds)
            start = time.thread_time()
            equal &= bool(np.isclose(_exhaustive(seed, cap), plan.seconds))
            everything.append(time.thread_time() - start)
    return {
        "num_sizes": 32,
        "num_strategies": len(STRATEGIES),
        "num_searches": len(large),
        "seconds": float(np.median(large)),
        "most_seconds": max(large),
        "small_seconds": float(np.median(exact)),
        "exhaustive_seconds": float(np.median(everything)),
        "equal_to_exhaustive": equal,
    }


def text(found: dict[str, Any]) -> str:
    """The figures for people."""
    agrees = "equal to" if found["equal_to_exhaustive"] else "NOT equal to"
    return (
        f"{found['num_sizes']} batch sizes x {found['num_strategies']} strategies under {found['num_searches']} caps: "
        f"median {1e3 * found['seconds']:.0f} ms, at most {1e3 * found['most_seconds']:.0f} ms\n"
        f"{SMALL_BATCH} x {len(SMALL_STRATEGIES)}: {1e3 * found['small_seconds']:.1f} ms, {agrees} exhaustive search, "
        f"which takes {1e3 * found['exhaustive_seconds']:.0f} ms"
    )


class _Case:
    """Weights by batch, and t_s(b) / A_s of a roofline: memory-bound up to a number of tokens, then linear."""

    def __init__(self, seed: int, max_batch: int) -> None:
        rng = np.random.default_rng(seed)
        self.weights = {b: float(rng.exponential()) * (max_batch + 1 - b) for b in range(1, max_batch + 1)}
        self.kept = rng.uniform(0.5, 0.8)

    def seconds(self, strategy: Strategy, batch: int) -> float:
        chance = min(self.kept + 0.03 * strategy.top_k, 0.95)
        tokens = sum(chance**i for i in range(strategy.draft_depth + 1))
        drafting = 0.3 * strategy.draft_depth if strategy.drafter == "learned" else 0.0
        return float((max(6.0, 0.04 * batch * strategy.tokens_to_verify) + drafting + 0.02 * batch) / tokens)


def _caps(seed: int, max_batch: int, strategies: Sequence[Strategy]) -> list[float]:
    """Caps between the smallest plan of one strategy and what the fastest plan takes."""
    case = _Case(seed, max_batch)
    free = plan_buckets(case.weights, case.seconds, strategies, pool=POOL, max_batch=max_batch).memory_bytes
    sizes = sglang_sizes(max_batch)
    least = min(POOL.memory_bytes(plan_bucketed([(1, s)], max_batch, sizes)) for s in strategies)
    return [least + share * (free - least) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]


def _timed(seed: int, max_batch: int, strategies: Sequence[Strategy], cap: float) -> tuple[BucketPlan, float]:
    case = _Case(seed, max_batch)
    start = time.thread_time()
    plan = plan_buckets(case.weights, case.seconds, strategies, pool=POOL, cap_bytes=cap, max_batch=max_batch)
    return plan, time.thread_time() - start


def _exhaustive(seed: int, cap: float) -> float:
    """Seconds of the best of all assignments of a strategy to each batch."""
    case, sizes, best_s = _Case(seed, SMALL_BATCH), sglang_sizes(SMALL_BATCH), np.inf
    for choice in itertools.product(SMALL_STRATEGIES, repeat=SMALL_BATCH):
        total = sum(case.weights[b] * case.seconds(s, b) for b, s in enumerate(choice, 1))
        rows = [(b, s) for b, s in enumerate(choice, 1) if b == 1 or s != choice[b - 2]]
        if total < best_s and POOL.fits(plan_bucketed(rows, SMALL_BATCH, sizes), cap):
            best_s = total
    return float(best_s)
