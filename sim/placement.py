"""Which request runs on which worker, and in which order it waits there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.planning.dispatch import Seconds, predicted_long, rank_groups, split_pools
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.requests import Requests
from tltlab.strategy import NO_SPECULATION

Placement = Literal[
    "contiguous",
    "round_robin",
    "least_loaded",
    "longest_first",
    "longest_expected",
    "recorded",
    "two_pools",
    "rank_groups",
]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


RANKER_RECALL = 0.87
"""Of the longest fifth, what StreamRL's ranker finds (arXiv 2504.15930, 7B)."""
LONG_SHARE = 0.2


def place(requests: Requests, workers: int, placement: str, costs: CostModel | None = None) -> list[list[int]]:
    """The queue of each worker: request indices in the order in which they are admitted.

    `contiguous`: request i of N goes to worker i*W//N, the static split of data-parallel engines. `round_robin`: i % W.
    `least_loaded`: each goes where the fewest tokens were placed so far, counting prompt and max_response_tokens, the
    only lengths known beforehand. `longest_first`: clairvoyant, by falling response length to the worker with the
    fewest response tokens (LPT). `recorded`: as the trace has it. Those that know a prompt's mean length:
    `longest_expected`, LPT by that mean. And those that know the `costs` too: `two_pools`, StreamRL's split, which
    takes a fifth of the prompts for long with the recall of its ranker, and `rank_groups`, RhymeRL's. Ties go to the
    lower worker and the earlier request.
    """
    if requests.turns is not None:
        # All turns of a response run where the first one did.
        first = requests.turns.first
        return [[first[i] for i in queue] for queue in place(requests.whole(), workers, placement, costs)]
    n = len(requests)
    if placement == "contiguous":
        return _collect([i * workers // n for i in range(n)], workers)
    if placement == "round_robin":
        return _collect([i % workers for i in range(n)], workers)
    if placement == "least_loaded":
        loads = [p + m for p, m in zip(requests.prompt_tokens, requests.max_response_tokens, strict=True)]
        return _to_the_least(range(n), loads, workers)
    if placement == "longest_first":
        return longest_first(requests.response_tokens, workers)
    if placement == "longest_expected":
        mean = _expected(requests)
        return longest_first([int(mean[key[1]]) for key in requests.keys], workers)
    if placement == "recorded":
        return _collect(_recorded(requests, workers), workers)
    if placement in ("two_pools", "rank_groups"):
        if costs is None:
            raise ConfigError(f"placement {placement!r} needs costs")
        token_s = _token_s(costs)
        if placement == "rank_groups":
            expected = _expected(requests)
            return _collect(rank_groups([expected[key[1]] for key in requests.keys], workers, token_s), workers)
        return _two_pools(requests, workers, token_s)
    raise ConfigError(f"no placement named {placement!r}; there are {', '.join(PLACEMENTS)}")


def longest_first(lengths: Sequence[int], workers: int) -> list[list[int]]:
    """By falling length, known or predicted, to the worker with the fewest tokens (LPT)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _to_the_least(order, lengths, workers)


def _collect(worker_of: list[int], workers: int) -> list[list[int]]:
    queues: list[list[int]] = [[] for _ in range(workers)]
    for request, worker in enumerate(worker_of):
        queues[worker].append(request)
    return queues


def _to_the_least(order: range | list[int], loads: Sequence[int], workers: int) -> list[list[int]]:
    queues: list[list[int]] = [[] for _ in range(workers)]
    heap = [(0, worker) for worker in range(workers)]
    for request in order:
        load, worker = heap[0]
        queues[worker].append(request)
        heapq.heapreplace(heap, (load + loads[request], worker))
    return queues


def _recorded(requests: Requests, workers: int) -> list[int]:
    worker_of: list[int] = []
    for request, worker in enumerate(requests.recorded_worker):
        if worker is None:
            raise ConfigError(f"placement 'recorded': outcomes.parquet has no worker for {requests.keys[request]}")
        if not 0 <= worker < workers:
            raise ConfigError(f"placement 'recorded': {requests.keys[request]} ran on worker {worker} of {workers}")
        worker_of.append(worker)
    return worker_of


def _expected(requests: Requests) -> dict[str, float]:
    """The mean response length of each prompt: what a perfect history or ranker of prompts knows."""
    lengths: dict[str, list[int]] = {}
    for key, tokens in zip(requests.keys, requests.response_tokens, strict=True):
        lengths.setdefault(key[1], []).append(tokens)
    return {name: float(np.mean(group)) for name, group in lengths.items()}


def _token_s(costs: CostModel) -> Seconds:
    plain = costs.iteration(NO_SPECULATION)
    return lambda batch, tokens: plain.seconds(batch, batch * tokens / 2)


def _two_pools(requests: Requests, workers: int, token_s: Seconds) -> list[list[int]]:
    if workers < 2:
        return _collect([0] * len(requests), workers)
    expected = _expected(requests)
    seeds = request_seeds(0, [(0, name, 0, 0) for name in expected])
    draws = uniforms(seeds, np.zeros(len(seeds), np.int64), 1)[:, 0] if len(seeds) else np.zeros(0)
    long_prompts = predicted_long(expected, LONG_SHARE, RANKER_RECALL, dict(zip(expected, draws.tolist(), strict=True)))
    pools: list[list[int]] = [[], []]
    for i in sorted(range(len(requests)), key=lambda i: -expected[requests.keys[i][1]]):
        pools[requests.keys[i][1] not in long_prompts].append(i)
    lengths = requests.lengths
    # The ranker's pools are stood for by the 90th percentile of the long ones and the median of the others.
    long_tokens = float(np.percentile(lengths[pools[0]], 90)) if pools[0] else 0.0
    regular_tokens = float(np.median(lengths[pools[1]])) if pools[1] else 0.0
    split = split_pools(len(pools[0]), len(pools[1]), long_tokens, regular_tokens, workers, token_s)
    loads = [int(expected[key[1]]) for key in requests.keys]
    queues: list[list[int]] = []
    for pool, share in zip(pools, split, strict=True):
        queues += _to_the_least(pool, loads, share) if share else []
    return queues
