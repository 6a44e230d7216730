"""Which request runs on which worker, and in which order it waits there."""

from __future__ import annotations

import heapq
from typing import Literal, get_args

from tltlab.errors import ConfigError
from tltlab.sim.engine.requests import Requests

Placement = Literal["contiguous", "round_robin", "least_loaded", "longest_first", "recorded"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


def place(requests: Requests, workers: int, placement: str) -> list[list[int]]:
    """The queue of each worker: request indices in the order in which they are admitted.

    `contiguous`: request i of N goes to worker i*W//N, the static split of data-parallel engines. `round_robin`: i % W.
    `least_loaded`: each goes where the fewest tokens were placed so far, counting prompt and max_response_tokens, the
    only lengths known beforehand. `longest_first`: clairvoyant, by falling response length to the worker with the
    fewest response tokens (LPT). `recorded`: as the trace has it. Ties go to the lower worker and the earlier request.
    """
    n = len(requests)
    if placement == "contiguous":
        return _collect([i * workers // n for i in range(n)], workers)
    if placement == "round_robin":
        return _collect([i % workers for i in range(n)], workers)
    if placement == "least_loaded":
        loads = [p + m for p, m in zip(requests.prompt_tokens, requests.max_response_tokens, strict=True)]
        return _to_the_least(range(n), loads, workers)
    if placement == "longest_first":
        order = sorted(range(n), key=lambda i: -requests.response_tokens[i])
        return _to_the_least(order, requests.response_tokens, workers)
    if placement == "recorded":
        return _collect(_recorded(requests, workers), workers)
    raise ConfigError(f"no placement named {placement!r}; there are {', '.join(PLACEMENTS)}")


def _collect(worker_of: list[int], workers: int) -> list[list[int]]:
    queues: list[list[int]] = [[] for _ in range(workers)]
    for request, worker in enumerate(worker_of):
        queues[worker].append(request)
    return queues


def _to_the_least(order: range | list[int], loads: list[int], workers: int) -> list[list[int]]:
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
