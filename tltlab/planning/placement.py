"""Placement: which worker gets which requests of a rollout, and in which order they begin there.

The simulator and the workers of a training run both call `Placement.place`. Clairvoyant placements (`longest_first`,
`two_pools`, ...) exist only in the simulator (`tltlab.sim.placement`).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tltlab.errors import ConfigError, did_you_mean
from tltlab.own import OwnPart, from_user, raised

Key = tuple[int, str, int, int]
Queues = list[list[int]]


class PlacedRequest(NamedTuple):
    """A response to be generated, as it is known beforehand."""

    key: Key
    prompt_tokens: int
    max_response_tokens: int


class Placement(ABC):
    """Splits the requests of a rollout over workers. One method is enough for a placement of your own.

    >>> class Halves(Placement):
    ...     def place(self, workload, workers, history):
    ...         return [list(range(w, len(workload), workers)) for w in range(workers)]
    >>> tltlab.simulate([[9, 8, 7, 6]], placement=Halves(), workers=2).scenario.queues     # doctest: +SKIP
    ([[0, 2], [1, 3]],)
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @abstractmethod
    def place(
        self, workload: Sequence[PlacedRequest], workers: int, history: Mapping[str, Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        """Return the queue of each worker: indices into `workload`, each in one queue, in the order they begin.

        `history` has the response lengths, in tokens, of earlier RL steps by prompt id, the oldest first.
        """


class Contiguous(Placement):
    """Request i of N goes to worker i * W // N: the static split of data-parallel engines."""

    def place(self, workload: Sequence[PlacedRequest], workers: int, history: Mapping[str, Sequence[int]]) -> Queues:
        num = len(workload)
        return collect([i * workers // num for i in range(num)], workers)


class RoundRobin(Placement):
    """Request i goes to worker i % W."""

    def place(self, workload: Sequence[PlacedRequest], workers: int, history: Mapping[str, Sequence[int]]) -> Queues:
        return collect([i % workers for i in range(len(workload))], workers)


class LeastLoaded(Placement):
    """Each request goes where the fewest tokens were placed so far, prompt and cap counted. Ties: the lower worker."""

    def place(self, workload: Sequence[PlacedRequest], workers: int, history: Mapping[str, Sequence[int]]) -> Queues:
        loads = [request.prompt_tokens + request.max_response_tokens for request in workload]
        return assign_least_loaded(range(len(workload)), loads, workers)


PLACEMENTS: dict[str, Placement] = {
    "contiguous": Contiguous(),
    "round_robin": RoundRobin(),
    "least_loaded": LeastLoaded(),
}
"""Placements that need no more than is known beforehand, by name."""


class OwnPlacement(OwnPart):
    """A placement class of the user's own."""

    base = Placement
    part = "placement"
    contract = "check_placement"


def load_placement(source: str | Placement | type[Placement], names: Iterable[str] = PLACEMENTS) -> Placement:
    """Return a placement from itself, a name in `PLACEMENTS`, a class, or `module:Class(key=value,...)`.

    ConfigError for another source; the message lists `names`.

    >>> load_placement("round_robin").place([PlacedRequest((0, "p", i, 0), 8, 64) for i in range(3)], 2, {})
    [[0, 2], [1]]
    """
    if isinstance(source, str) and source in PLACEMENTS:
        return PLACEMENTS[source]
    own: Placement | None = OwnPlacement.resolve(source)
    if own is None:
        near = did_you_mean(str(source), names)
        raise ConfigError(f"no placement named {source!r}{near}; there are {', '.join(names)}, or module:Class")
    return own


def placed(
    placement: Placement, workload: Sequence[PlacedRequest], workers: int, history: Mapping[str, Sequence[int]]
) -> Queues:
    """The queues of a placement; ConfigError where they do not hold every request once, or with what it raises."""
    try:
        queues = [[int(i) for i in queue] for queue in placement.place(workload, workers, history)]
    except Exception as error:  # whatever a user's placement raises
        if from_user(error):
            raise raised(error, f"placement {type(placement).__name__}") from error
        raise
    if len(queues) != workers or sorted(i for queue in queues for i in queue) != list(range(len(workload))):
        raise ConfigError(
            f"placement {type(placement).__name__}: place must return {workers} queues that hold each of the "
            f"{len(workload)} requests once, got {len(queues)} queues with {sum(map(len, queues))} places"
        )
    return queues


def collect(worker_of: Sequence[int], workers: int) -> Queues:
    """The queue of each worker, in the order of the requests."""
    queues: Queues = [[] for _ in range(workers)]
    for request, worker in enumerate(worker_of):
        queues[worker].append(request)
    return queues


def assign_least_loaded(order: Iterable[int], loads: Sequence[float], workers: int) -> Queues:
    """Requests in an order, each to the worker with the least load so far. O(n log workers)."""
    queues: Queues = [[] for _ in range(workers)]
    heap = [(0.0, worker) for worker in range(workers)]
    for request in order:
        load, worker = heap[0]
        queues[worker].append(request)
        heapq.heapreplace(heap, (load + loads[request], worker))
    return queues
