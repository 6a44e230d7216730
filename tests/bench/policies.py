"""What policies take: microseconds of a decision of the shipped ones, by batch size; seconds to plan buckets exactly.

Buckets are found under a memory cap that binds, and on small cases held against exhaustive search.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.harness import Table, Text, in_turn, spread
from tltlab.planning.buckets import BucketPlan, plan_buckets
from tltlab.planning.graph_pool import GraphPool, plan_bucketed, sglang_sizes
from tltlab.policies.policy import SHIPPED, Policy
from tltlab.state import RequestState, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

BATCHES = (1, 8, 32, 128)
GOAL_US = 20.0
RESPONSE_ITERATIONS = 1000
"""Iterations that a response takes: batch / this many end, and begin, in each."""
_PROMPTS = 64
_HISTORY = 4096
_WARM_UP = 500


def bench_policies(calls: int, rounds: int) -> dict[str, Any]:
    """Time `calls` decisions of every shipped policy at every batch size, `rounds` times, in turn.

    A decision is `choose` and `observe`, and where the policy has a budget `allot`, with `finished` for the requests
    that end. What they are given is made outside the measured time; windows and history are full. Counted is the CPU
    time of this thread, so other processes do not matter. `decide_us` and
    `allot_us` are medians and 99th percentiles of all calls; `mean_us` is the mean of a decision with its allotment in
    the best round, `within_20_us` whether that holds.
    """
    cases = [(name, batch) for name in SHIPPED for batch in BATCHES]
    times = in_turn(cases, lambda case, number: _time(SHIPPED[case[0]], case[1], calls, number), rounds, warm_up=0)
    return {"goal_us": GOAL_US, "rows": [_row(name, batch, times[name, batch]) for name, batch in cases]}


def _row(name: str, batch: int, rounds: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    decide, allot = (np.concatenate(parts) for parts in zip(*rounds, strict=True))
    mean_us = min(float((decisions + allotments).mean()) for decisions, allotments in rounds)
    return {
        "policy": name,
        "batch": batch,
        "decide_us": spread(decide),
        "allot_us": spread(allot) if SHIPPED[name].budget else None,
        "mean_us": mean_us,
        "within_20_us": mean_us <= GOAL_US,
    }


def _time(policy: Policy, batch: int, calls: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each decision and of each allotment."""
    rng = np.random.default_rng(seed)
    selector, budget = policy.build(rng), policy.build_budget()
    for n in range(_HISTORY if policy.budget else 0):
        tokens = int(rng.lognormal(6.0 + n % _PROMPTS / 16, 0.5)) + 1
        budget.finished(_request(n, tokens), drafted=2 * tokens, accepted=tokens // 2)
    decide, allot = np.zeros(calls), np.zeros(calls)
    clock = time.thread_time_ns
    for i, (state, ended) in enumerate(_states(batch, calls + _WARM_UP)):
        began = clock()
        strategy = selector.choose(state)
        chosen = clock()
        depth = strategy.draft_depth
        accepted = rng.binomial(depth, 0.6, batch).tolist() if depth else ()
        outcome = StepOutcome(
            elapsed_s=1e-2 + 1e-3 * depth, batch=batch, drafted=(depth,) * batch if depth else (), accepted=accepted
        )
        resumed = clock()
        selector.observe(strategy, outcome)
        observed = clock()
        if policy.budget:
            if ended is not None:
                budget.finished(ended, drafted=2000, accepted=1000)
            budget.allot(state, strategy)
        shared_out = clock()
        if i >= _WARM_UP:
            decide[i - _WARM_UP] = (chosen - began + observed - resumed) / 1e3
            allot[i - _WARM_UP] = (shared_out - observed) / 1e3
    return decide, allot


def _states(batch: int, count: int) -> Iterator[tuple[StepState, RequestState | None]]:
    """A full batch in which, one after another, requests end and others take their place; and the one that ended."""
    numbers = list(range(batch))
    generated = [RESPONSE_ITERATIONS * j // batch * 3 for j in range(batch)]
    ended_before = 0
    for i in range(count):
        generated = [tokens + 3 for tokens in generated]
        ended = None
        if (i + 1) * batch // RESPONSE_ITERATIONS > ended_before:
            at = ended_before % batch
            ended = _request(numbers[at], generated[at])
            ended_before += 1
            numbers[at] += batch
            generated[at] = 1
        requests = tuple(_request(n, tokens) for n, tokens in zip(numbers, generated, strict=True))
        yield StepState(rl_step=0, batch=batch, context_tokens=float(sum(generated)), requests=requests), ended


def _request(number: int, generated: int) -> RequestState:
    prompt = f"p{number % _PROMPTS}"
    return RequestState(
        key=(0, prompt, number, 0), prompt_id=prompt, generated_tokens=generated, max_response_tokens=32768
    )


TEXT: Text = (
    Table(
        "rows",
        "policy: {policy}; batch: {batch}; decide us: {decide_us.median:.1f}; p99: {decide_us.p99:.1f}; "
        "allot us: {allot_us.median:.1f};  p99: {allot_us.p99:.1f}; mean: {mean_us:.1f}; : {within_20_us:|over 20 us}",
    ),
)


POOL = GraphPool(num_layers=32, hidden_size=4096, vocab_size=128_256, context_tokens=8192, bytes_per_layer=1e6)
STRATEGIES = (
    NO_SPECULATION,
    Strategy.chain("ngram", 4),
    Strategy.chain("learned", 2),
    Strategy.chain("learned", 4),
    *(Strategy("learned", d, k, v) for d in (3, 5, 8) for k, v in ((2, 8), (4, 16), (4, 32), (8, 48))),
)
SMALL_BATCH, SMALL_STRATEGIES = 6, (STRATEGIES[0], STRATEGIES[1], STRATEGIES[9], STRATEGIES[14])


def bench_buckets(rounds: int = 5) -> dict[str, Any]:
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


BUCKETS_TEXT: Text = (
    "{num_sizes} batch sizes x {num_strategies} strategies under {num_searches} caps: median {seconds:1e3*.0f} ms, at "
    "most {most_seconds:1e3*.0f} ms",
    "a small case: {small_seconds:1e3*.1f} ms, {equal_to_exhaustive:equal to|NOT equal to} exhaustive search, which "
    "takes {exhaustive_seconds:1e3*.0f} ms",
)


class _Case:
    """Weights by batch, and t_s(b) / A_s of a roofline: memory-bound up to a number of tokens, then linear."""

    def __init__(self, seed: int, max_batch: int) -> None:
        rng = np.random.default_rng(seed)
        self.weights = {b: float(rng.exponential()) * (max_batch + 1 - b) for b in range(1, max_batch + 1)}
        self.acceptance = rng.uniform(0.5, 0.8)

    def seconds(self, strategy: Strategy, batch: int) -> float:
        chance = min(self.acceptance + 0.03 * strategy.top_k, 0.95)
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
