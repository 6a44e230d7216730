"""Which request runs on which worker, and in which order it waits there."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.own import is_own
from tltlab.planning import placement as core
from tltlab.planning.dispatch import predicted_long
from tltlab.planning.placement import PlacedRequest, Placement, collect, placed
from tltlab.sim.engine.random_numbers import request_seeds, uniforms
from tltlab.sim.engine.requests import Requests

RANKER_RECALL = 0.87
"""Share of the longest fifth that StreamRL's ranker finds (arXiv 2504.15930, 7B)."""
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
    that know a prompt's mean length: `longest_expected`, LPT by that mean. And those that know the `costs`, if given:
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

    def __init__(self, requests: Requests):
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

    A placement of the user's own, and one by expected lengths that is not given by name, has the lengths of the steps
    before as its history; no other looks at them.
    """
    rule, queues = find_placement(placement or "contiguous"), []
    history: dict[str, list[int]] = {}
    for step in steps:
        queues.append(place(step, workers, rule, costs, history))
        if isinstance(rule, core.ByExpectedLength) or (isinstance(rule, Placement) and is_own(rule)):
            add_lengths(history, step)
    return tuple(queues)


def find_placement(source: str | Placement | type[Placement]) -> str | Placement:
    """The placement that a user means, a clairvoyant one by its name. Raises ConfigError."""
    if isinstance(source, str) and source in _CLAIRVOYANT:
        return source
    return core.load_placement(source, PLACEMENTS)


def _recorded(requests: Requests, workers: int, costs: CostModel | None) -> list[list[int]]:
    worker_of: list[int] = []
    for request, worker in enumerate(requests.recorded_worker.tolist()):
        if math.isnan(worker):
            raise ConfigError(f"placement 'recorded': outcomes.parquet has no worker for {requests.keys[request]}")
        if not 0 <= worker < workers:
            raise ConfigError(f"placement 'recorded': {requests.keys[request]} ran on worker {worker:g} of {workers}")
        worker_of.append(int(worker))
    return collect(worker_of, workers)


def add_lengths(lengths: dict[str, list[int]], requests: Requests) -> None:
    """Add the lengths of an RL step's responses to those of earlier ones, by prompt id."""
    responses = requests.whole()
    for key, tokens in zip(responses.keys, responses.response_tokens, strict=True):
        lengths.setdefault(key[1], []).append(tokens)


class _RankedPools(core.TwoPools):
    """StreamRL's pools, whose ranker misses some of the long prompts."""

    def long_prompts(self, expected: Mapping[str, float]) -> set[str]:
        seeds = request_seeds(0, [(0, name, 0, 0) for name in expected])
        draws = uniforms(seeds, np.zeros(len(seeds), np.int64), 1)[:, 0]
        return predicted_long(
            expected, core.LONG_SHARE, RANKER_RECALL, dict(zip(expected, draws.tolist(), strict=True))
        )


def _knowing(
    made: Callable[[CostModel | None], Placement],
) -> Callable[[Requests, int, CostModel | None], list[list[int]]]:
    """A placement by expected lengths that knows the mean length of each prompt's responses in this RL step."""

    def placing(requests: Requests, workers: int, costs: CostModel | None) -> list[list[int]]:
        lengths: dict[str, list[int]] = {}
        add_lengths(lengths, requests)
        return placed(made(costs), _Workload(requests), workers, lengths)

    return placing


_CLAIRVOYANT: dict[str, Callable[[Requests, int, Any], list[list[int]]]] = {
    "longest_first": lambda requests, workers, costs: core.longest_first(requests.response_tokens, workers),
    "longest_expected": _knowing(core.LongestExpected),
    "recorded": _recorded,
    "two_pools": _knowing(_RankedPools),
    "rank_groups": _knowing(core.RankGroups),
}
"""Clairvoyant placements by name."""
PLACEMENTS: tuple[str, ...] = (*core.PLACEMENTS, *_CLAIRVOYANT)
