"""Microseconds of a decision of the shipped policies, by batch size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.harness import Table, Text, in_turn, spread
from tltlab.policies.policy import SHIPPED, Policy
from tltlab.policies.selector import chosen
from tltlab.state import RequestState, StepOutcome, StepState

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
    that end, in CPU time of this thread; windows and history are full. `decide_us` and `allot_us` are of all calls;
    `mean_us` is the mean of a decision with its allotment in the best round.
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
        choice = chosen(selector, state)
        decided = clock()
        strategy = choice.strategy
        depth = strategy.draft_depth
        accepted = rng.binomial(depth, 0.6, batch).tolist() if depth else ()
        outcome = StepOutcome(
            elapsed_s=1e-2 + 1e-3 * depth, batch=batch, drafted=(depth,) * batch if depth else (), accepted=accepted
        )
        resumed = clock()
        selector.observe(choice, outcome)
        observed = clock()
        if policy.budget:
            if ended is not None:
                budget.finished(ended, drafted=2000, accepted=1000)
            budget.allot(state, strategy)
        shared_out = clock()
        if i >= _WARM_UP:
            decide[i - _WARM_UP] = (decided - began + observed - resumed) / 1e3
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
