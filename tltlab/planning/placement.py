"""Placement: which worker gets which requests of a rollout, and in which order they begin there.

The simulator and the workers of a training run both call `Placement.place`. Placements by expected lengths
(`BY_HISTORY`) know in a run what earlier epochs have shown, and in the simulator what the RL step itself will show;
those that know each response (`longest_first`, `recorded`) exist only there (`tltlab.sim.placement`).
"""

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError, did_you_mean
from tltlab.own import OwnPart, from_user, raised
from tltlab.state import Key
from tltlab.strategy import NO_SPECULATION

from .dispatch import Seconds, predicted_long, rank_groups, split_pools

Queues = list[list[int]]
Lengths = Mapping[str, Sequence[int]]
"""Response lengths of earlier RL steps by prompt id, in tokens, the oldest first."""
LONG_SHARE = 0.2
"""Share of the prompts that StreamRL takes for long (arXiv 2504.15930)."""


class PlacedRequest(NamedTuple):
    """A response to be generated, as it is known beforehand."""

    key: Key
    prompt_tokens: int
    max_response_tokens: int


PlacedRequests = Sequence[PlacedRequest]


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
    def place(self, workload: PlacedRequests, workers: int, history: Lengths) -> Sequence[Sequence[int]]:
        """Return the queue of each worker: indices into `workload`, each in one queue, in the order they begin.

        `history` has the response lengths of earlier RL steps.
        """


class Contiguous(Placement):
    """Request i of N goes to worker i * W // N: the static split of data-parallel engines."""

    def place(self, workload: PlacedRequests, workers: int, history: Lengths) -> Queues:
        num = len(workload)
        return collect([i * workers // num for i in range(num)], workers)


class RoundRobin(Placement):
    """Request i goes to worker i % W."""

    def place(self, workload: PlacedRequests, workers: int, history: Lengths) -> Queues:
        return collect([i % workers for i in range(len(workload))], workers)


class LeastLoaded(Placement):
    """Each request goes where the fewest tokens were placed so far, prompt and cap counted. Ties: the lower worker."""

    def place(self, workload: PlacedRequests, workers: int, history: Lengths) -> Queues:
        loads = [request.prompt_tokens + request.max_response_tokens for request in workload]
        return assign_least_loaded(range(len(workload)), loads, workers)


PLACEMENTS: dict[str, Placement] = {
    "contiguous": Contiguous(),
    "round_robin": RoundRobin(),
    "least_loaded": LeastLoaded(),
}
"""Placements that need no more than is known beforehand, by name."""


def token_seconds(costs: CostModel | None) -> Seconds:
    """Seconds per token of plain decoding; without costs a request more takes a hundredth of a batch of one.

    >>> token_seconds(None)(100, 500.0) / token_seconds(None)(0, 500.0)
    2.0
    """
    if costs is None:
        return lambda batch, tokens: 1.0 + batch / 100
    plain = costs.iteration(NO_SPECULATION)
    return lambda batch, tokens: plain.seconds(batch, batch * tokens / 2)


class ByExpectedLength(Placement):
    """A placement that knows the mean length of a prompt's newest responses, as many as it now has requests.

    A prompt of which nothing is known is expected to be as long as those around it; where nothing is known of any, as
    in a run's first epoch, the split is contiguous.
    """

    def __init__(self, costs: CostModel | None = None):
        self._token_s = token_seconds(costs)

    def place(self, workload: PlacedRequests, workers: int, history: Lengths) -> Queues:
        names = [request.key[1] for request in workload]
        counts = Counter(names)
        known = {name: history[name][-count:] for name, count in counts.items() if history.get(name)}
        if not known:
            return Contiguous().place(workload, workers, history)
        means = {name: float(np.mean(lengths)) for name, lengths in known.items()}
        return self.split(names, dict.fromkeys(names, float(np.mean(list(means.values())))) | means, known, workers)

    @abstractmethod
    def split(self, names: Sequence[str], expected: Mapping[str, float], known: Lengths, workers: int) -> Queues:
        """Return the queues of requests by their prompts' `names`, expected tokens and `known` lengths."""


class LongestExpected(ByExpectedLength):
    """By falling expected length, each to the worker with the fewest tokens (LPT)."""

    def split(self, names: Sequence[str], expected: Mapping[str, float], known: Lengths, workers: int) -> Queues:
        return longest_first([int(expected[name]) for name in names], workers)


class RankGroups(ByExpectedLength):
    """RhymeRL's rank groups of requests (`dispatch.rank_groups`)."""

    def split(self, names: Sequence[str], expected: Mapping[str, float], known: Lengths, workers: int) -> Queues:
        return collect(rank_groups([expected[name] for name in names], workers, self._token_s), workers)


class TwoPools(ByExpectedLength):
    """StreamRL's split: workers of their own for the longest fifth of the prompts, as many as `split_pools` finds.

    A pool is stood for by the 90th percentile of the long prompts' known lengths and the median of the others'. Its
    requests go by falling expected length to its least loaded worker.
    """

    def split(self, names: Sequence[str], expected: Mapping[str, float], known: Lengths, workers: int) -> Queues:
        if workers < 2:
            return collect([0] * len(names), workers)
        long, pools = self.long_prompts(expected), ([], [])  # type: tuple[set[str], tuple[list[int], list[int]]]
        for i in sorted(range(len(names)), key=lambda i: -expected[names[i]]):
            pools[names[i] not in long].append(i)
        stands = []
        for pool, rank in zip(pools, (90, 50), strict=True):
            lengths = [n for name in {names[i]: None for i in pool} for n in known.get(name, (expected[name],))]
            stands.append(float(np.percentile(lengths, rank)) if lengths else 0.0)
        shares = split_pools(len(pools[0]), len(pools[1]), stands[0], stands[1], workers, self._token_s)
        loads = [int(expected[name]) for name in names]
        queues: Queues = []
        for pool, share in zip(pools, shares, strict=True):
            queues += assign_least_loaded(pool, loads, share) if share else []
        return queues

    def long_prompts(self, expected: Mapping[str, float]) -> set[str]:
        """The prompts that are taken for long, by their expected tokens."""
        return predicted_long(expected, LONG_SHARE, 1.0, dict.fromkeys(expected, 0.0))


BY_HISTORY: dict[str, Callable[[CostModel | None], Placement]] = {
    "longest_expected": LongestExpected,
    "two_pools": TwoPools,
    "rank_groups": RankGroups,
}
"""Placements by expected lengths, by name, made from the costs of an engine where these are known."""


class OwnPlacement(OwnPart):
    """A placement class of the user's own."""

    base = Placement
    part = "placement"
    contract = "check_placement"


def load_placement(
    source: str | Placement | type[Placement],
    names: Iterable[str] = (*PLACEMENTS, *BY_HISTORY),
    costs: Callable[[], CostModel | None] = lambda: None,
) -> Placement:
    """Return a placement from itself, a name, a class, or `module:Class(key=value,...)`.

    Names are those in `PLACEMENTS`, and in `BY_HISTORY`, which take the `costs`. ConfigError for another source; the
    message lists `names`.

    >>> load_placement("round_robin").place([PlacedRequest((0, "p", i, 0), 8, 64) for i in range(3)], 2, {})
    [[0, 2], [1]]
    """
    if isinstance(source, str) and source in PLACEMENTS:
        return PLACEMENTS[source]
    if isinstance(source, str) and source in BY_HISTORY:
        return BY_HISTORY[source](costs())
    own: Placement | None = OwnPlacement.resolve(source)
    if own is None:
        near = did_you_mean(str(source), names)
        raise ConfigError(f"no placement named {source!r}{near}; there are {', '.join(names)}, or module:Class")
    return own


def placed(placement: Placement, workload: PlacedRequests, workers: int, history: Lengths) -> Queues:
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


def longest_first(lengths: Sequence[int], workers: int) -> Queues:
    """By falling length, known or predicted, to the worker with the fewest tokens (LPT)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return assign_least_loaded(order, lengths, workers)


def assign_least_loaded(order: Iterable[int], loads: Sequence[float], workers: int) -> Queues:
    """Requests in an order, each to the worker with the least load so far. O(n log workers)."""
    queues: Queues = [[] for _ in range(workers)]
    heap = [(0.0, worker) for worker in range(workers)]
    for request in order:
        load, worker = heap[0]
        queues[worker].append(request)
        heapq.heapreplace(heap, (load + loads[request], worker))
    return queues
