"""Which request runs on which worker, and in which order it waits there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.own import is_own
from tltlab.planning import placement as core
from tltlab.planning.dispatch import Seconds, predicted_long, rank_groups, split_pools
from tltlab.planning.placement import PlacedRequest, Placement, assign_least_loaded, collect, placed
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.requests import Requests
from tltlab.strategy import NO_SPECULATION

RANKER_RECALL = 0.87
"""Share of the longest fifth that StreamRL's ranker finds (arXiv 2504.15930, 7B)."""
LONG_SHARE = 0.2
EXPECTED = "longest_expected"
"""Placement by expected lengths, whose gain every answer has."""


def place(
    requests: Requests,
    workers: int,
    placement: str | Placement | type[Placement],
    costs: CostModel | None = None,
    history: Mapping[str, Sequence[int]] = {},
) -> list[list[int]]:
    """The queue of each worker: request indices in the order in which they are admitted.

    A placement is one of `tltlab.planning.placement`, a user's own as `module:Class(...)`, class or instance, which
    gets the `history`, or a clairvoyant one. `longest_first`: clairvoyant, by falling
    response length to the worker with the fewest response tokens (LPT). `recorded`: as the trace has it. Placements
    that know a prompt's mean length: `longest_expected`, LPT by that mean. And those that know the `costs` too:
    `two_pools`, StreamRL's split, which takes a fifth of the prompts for long with the recall of its ranker, and
    `rank_groups`, RhymeRL's. Ties go to the lower worker and the earlier request.
    """
    if requests.turns is not None:
        # All turns of a response run where the first one did.
        first = requests.turns.first
        return [[first[i] for i in queue] for queue in place(requests.whole(), workers, placement, costs, history)]
    rule = placement if isinstance(placement, Placement) else find_placement(placement)
    if isinstance(rule, str):
        return _CLAIRVOYANT[rule](requests, workers, costs)
    return placed(rule, _Workload(requests), workers, history)


class _Workload(Sequence[PlacedRequest]):
    """An RL step's requests as a placement sees them, made when it looks at the first: most count them only."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, at: Any) -> Any:
        return self._made[at]

    @cached_property
    def _made(self) -> list[PlacedRequest]:
        r = self._requests
        return list(map(PlacedRequest, r.keys, r.prompt_tokens, r.max_response_tokens))


def place_steps(
    steps: Sequence[Requests], workers: int, placement: str | Placement | type[Placement] | None, costs: CostModel
) -> tuple[list[list[int]], ...]:
    """The queues of RL steps that follow each other, see `place`; by default contiguous.

    A placement of the user's own has the lengths of the steps before as its history; no other looks at them.
    """
    rule, queues = find_placement(placement or "contiguous"), []
    history: dict[str, list[int]] = {}
    for step in steps:
        queues.append(place(step, workers, rule, costs, history))
        if isinstance(rule, Placement) and is_own(rule):
            add_lengths(history, step)
    return tuple(queues)


def find_placement(source: str | Placement | type[Placement]) -> str | Placement:
    """The placement that a user means, a clairvoyant one by its name. Raises ConfigError."""
    if isinstance(source, str) and source in _CLAIRVOYANT:
        return source
    return core.load_placement(source, PLACEMENTS)


def longest_first(lengths: Sequence[int], workers: int) -> list[list[int]]:
    """By falling length, known or predicted, to the worker with the fewest tokens (LPT)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return assign_least_loaded(order, lengths, workers)


def _longest_expected(requests: Requests, workers: int, costs: CostModel | None) -> list[list[int]]:
    mean = _expected(requests)
    return longest_first([int(mean[key[1]]) for key in requests.keys], workers)


def _rank_groups(requests: Requests, workers: int, costs: CostModel | None) -> list[list[int]]:
    expected = _expected(requests)
    return collect(rank_groups([expected[key[1]] for key in requests.keys], workers, _token_s(costs)), workers)


def _recorded(requests: Requests, workers: int, costs: CostModel | None) -> list[list[int]]:
    worker_of: list[int] = []
    for request, worker in enumerate(requests.recorded_worker.tolist()):
        if math.isnan(worker):
            raise ConfigError(f"placement 'recorded': outcomes.parquet has no worker for {requests.keys[request]}")
        if not 0 <= worker < workers:
            raise ConfigError(f"placement 'recorded': {requests.keys[request]} ran on worker {worker:g} of {workers}")
        worker_of.append(int(worker))
    return collect(worker_of, workers)


def _expected(requests: Requests) -> dict[str, float]:
    """The mean response length of each prompt: what a perfect history or ranker of prompts knows."""
    lengths: dict[str, list[int]] = {}
    add_lengths(lengths, requests)
    return {name: float(np.mean(group)) for name, group in lengths.items()}


def add_lengths(lengths: dict[str, list[int]], requests: Requests) -> None:
    """Add the lengths of an RL step's responses to those of earlier ones, by prompt id."""
    responses = requests.whole()
    for key, tokens in zip(responses.keys, responses.response_tokens, strict=True):
        lengths.setdefault(key[1], []).append(tokens)


def _token_s(costs: CostModel | None) -> Seconds:
    if costs is None:
        raise ConfigError("this placement needs costs: two_pools and rank_groups split by the seconds of a token")
    plain = costs.iteration(NO_SPECULATION)
    return lambda batch, tokens: plain.seconds(batch, batch * tokens / 2)


def _two_pools(requests: Requests, workers: int, costs: CostModel | None) -> list[list[int]]:
    token_s = _token_s(costs)
    if workers < 2:
        return collect([0] * len(requests), workers)
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
        queues += assign_least_loaded(pool, loads, share) if share else []
    return queues


_CLAIRVOYANT: dict[str, Callable[[Requests, int, Any], list[list[int]]]] = {
    "longest_first": lambda requests, workers, costs: longest_first(requests.response_tokens, workers),
    "longest_expected": _longest_expected,
    "recorded": _recorded,
    "two_pools": _two_pools,
    "rank_groups": _rank_groups,
}
"""Clairvoyant placements by name."""
PLACEMENTS: tuple[str, ...] = (*core.PLACEMENTS, *_CLAIRVOYANT)
