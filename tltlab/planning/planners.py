"""The shipped planners, by name: `stay`, `gather`, `rebalance`, `clairvoyant`."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError, did_you_mean

from .placement import assign_least_loaded
from .rollout import (
    HELD,
    LENGTHS,
    Action,
    EngineCosts,
    Gather,
    Hold,
    Move,
    OwnPlanner,
    RolloutPlanner,
    RolloutState,
    Shape,
)

SAMPLES = 16
"""Samples of the lengths of a rollout over which a planner's seconds are means."""
LEAST_GAIN = 0.1
"""Share of the rest of a rollout that a gather must be expected to save, as beliefs err."""
LEAST_MOVED = 0.02
"""The same of a single move."""


class Gatherer(RolloutPlanner):
    """Gathers what is left onto fewer engines of more GPUs, when the rest is then expected to be the shortest.

    For each sample of the lengths that it believes in, and each number of requests that could be left at the gather,
    it adds what precedes the gather, the switch, the prefills and what follows it (`EngineCosts.finish_s`). The best
    mean is done where it is now; else the planner is asked again with that many left, or half as many as now.
    """

    most_an_engine: ClassVar[int] = 32
    """Requests per engine of the active shape above which a gather never pays."""

    def plan(self, state: RolloutState) -> Sequence[Action]:
        num = len(state)
        costs = state.engines.get(state.active)
        wider = [engines for shape, engines in state.engines.items() if shape.gpus > state.active.gpus]
        if costs is None or not wider or not num:
            self.asked_below = 0
            return []
        if num > (most := self.most_an_engine * state.active.engines):
            self.asked_below = most
            return []
        remaining = self.lengths(state)
        ends_s = np.full(remaining.shape, 0.0)
        on = [np.flatnonzero(state.worker == worker) for worker in range(state.active.engines)]
        for mine in on:
            ends_s[:, mine] = costs.finish_s(remaining[:, mine], state.context_tokens[mine])
        stay_s = float(ends_s.max(axis=1).mean())
        best: tuple[float, int, EngineCosts] = (stay_s * (1.0 - LEAST_GAIN), 0, costs)
        for left in dict.fromkeys(math.ceil(num * 0.8**i) for i in range(24)):
            at_s = np.zeros(len(ends_s)) if left == num else np.sort(ends_s, axis=1)[:, num - left - 1]
            gained = _gained(remaining, ends_s, on, at_s)
            for engines in wider:
                rest_s = _rest_s(engines, remaining - gained, state.context_tokens + gained)
                if (each_s := float((at_s + rest_s).mean())) < best[0]:
                    best = each_s, left, engines
        _, left, engines = best
        if left == num:
            queues = _shared(np.median(remaining, axis=0), engines.shape)
            keys = tuple(tuple(state.keys[request] for request in queue) for queue in queues)
            return [Gather(shape=engines.shape, queues=keys)]
        self.asked_below = max(left, num // 2)
        return []

    def lengths(self, state: RolloutState) -> Floats:
        """Tokens that each request still generates, by sample and request."""
        believed = state.remaining((np.arange(SAMPLES) + 0.5) / SAMPLES)
        # Every request has each quantile once, in an order of its own.
        order = np.random.default_rng(len(state)).random(believed.shape).argsort(axis=1)
        return np.take_along_axis(believed, order, axis=1).T


class Clairvoyant(Gatherer):
    """`Gatherer` that knows all lengths: what a better belief could gain at most by gathers."""

    needs = frozenset({LENGTHS})

    def lengths(self, state: RolloutState) -> Floats:
        assert state.lengths is not None
        total = np.array([[state.lengths[key] for key in state.keys]], np.float64)
        return np.maximum(1.0, total - state.generated_tokens)


class Rebalancer(RolloutPlanner):
    """Moves requests from the engine that is expected to end last to that which ends first, while that pays.

    A move's prefill counts. It is asked at each twentieth of the requests that were left before.
    """

    def plan(self, state: RolloutState) -> Sequence[Action]:
        self.asked_below = math.floor(len(state) * 0.95)
        costs = state.engines.get(state.active)
        if costs is None or state.active.engines < 2:
            return []
        remaining = state.remaining(np.array([0.5]))[:, 0]
        worker = state.worker.copy()

        def ends_s(engine: int) -> float:
            mine = np.flatnonzero(worker == engine)
            ends = costs.finish_s(remaining[None, mine], state.context_tokens[mine])
            moved = mine[state.worker[mine] != engine]
            return float(ends.max(initial=0.0)) + costs.prefill_s(float(state.context_tokens[moved].sum()))

        last_s = np.array([ends_s(engine) for engine in range(state.active.engines)])
        actions: list[Action] = []
        while True:
            source, target = int(last_s.argmax()), int(last_s.argmin())
            mine = np.flatnonzero((worker == source) & (state.worker == source))
            if source == target or len(mine) < 2:
                return actions
            request = int(mine[remaining[mine].argsort()[len(mine) // 2]])
            worker[request] = target
            after_s = last_s.copy()
            after_s[[source, target]] = ends_s(source), ends_s(target)
            if after_s.max() > last_s.max() * (1.0 - LEAST_MOVED):
                return actions
            last_s = after_s
            actions.append(Move(key=state.keys[request], worker=target))


class BufferPlanner(RolloutPlanner):
    """Keeps requests in one buffer, from which an engine gets the next as soon as it has room (`SharedBuffer`).

    It has room for as many requests as run at once, and for their tokens. What runs does not move.
    """

    def __init__(self, chunk_tokens: int = 8192):
        self.chunk_tokens = chunk_tokens

    def plan(self, state: RolloutState) -> Sequence[Action]:
        worker = state.worker.copy()
        if not state.ended and not state.generated_tokens.any() and not (worker == HELD).any():
            worker[:] = HELD
        costs, engines = state.engines.get(state.active), range(state.active.engines)
        most, room = (math.inf, math.inf) if costs is None else (costs.max_num_seqs, costs.kv_capacity_tokens)
        needs = state.prompt_tokens + np.minimum(self.chunk_tokens, state.max_response_tokens)
        counts = [int((worker == engine).sum()) for engine in engines]
        reserved = [float(needs[worker == engine].sum()) for engine in engines]
        longest: dict[str, int] = {}
        for key, tokens in state.ended.items():
            longest[key[1]] = max(longest.get(key[1], 0), tokens)

        def rank(request: int) -> tuple[bool, float]:
            key = state.keys[request]
            # Seer's L_g (arXiv 2511.14617, Alg. 2): a probe first, then the longest finished sample of a group.
            return key[2] != 0, -longest.get(key[1], float(state.max_response_tokens[request]))

        for request in sorted(np.flatnonzero(worker == HELD).tolist(), key=rank):
            engine = min(engines, key=lambda n: (reserved[n], counts[n]))
            if counts[engine] and (counts[engine] >= most or reserved[engine] + needs[request] > room):
                break
            worker[request] = engine
            counts[engine] += 1
            reserved[engine] += needs[request]
        if not (worker == HELD).any():
            self.asked_below = 0
        moved = np.flatnonzero(worker != state.worker).tolist()
        return [
            Hold(key=state.keys[i]) if worker[i] == HELD else Move(key=state.keys[i], worker=int(worker[i]))
            for i in moved
        ]


def _gained(remaining: Floats, ends_s: Floats, on: Sequence[Ints], at_s: Floats) -> Floats:
    """Tokens that each request has gained by `at_s` of its sample: on one engine all that run gain alike."""
    gained = np.zeros(remaining.shape)
    for mine in on:
        if not len(mine):
            continue
        for case, until_s in enumerate(at_s):
            order = ends_s[case, mine].argsort(kind="stable")
            times, tokens = ends_s[case, mine][order], remaining[case, mine][order]
            gained[case, mine] = np.interp(until_s, np.append(0.0, times), np.append(0.0, tokens))
    return np.minimum(gained, remaining)


def _rest_s(engines: EngineCosts, remaining: Floats, context: Floats) -> Floats:
    """Seconds from a gather to the end, by sample; requests with nothing `remaining` have ended."""
    rest_s = np.zeros(len(remaining))
    for queue in _shared(np.median(remaining, axis=0), engines.shape):
        if queue:
            left = remaining[:, queue]
            prefill_s = [engines.prefill_s(tokens) for tokens in (context[:, queue] * (left > 0)).sum(axis=1).tolist()]
            rest_s = np.maximum(rest_s, prefill_s + engines.finish_s(left, context[:, queue]).max(axis=1))
    return engines.switch_s + rest_s


def _shared(tokens: Floats, shape: Shape) -> list[list[int]]:
    """Requests of each engine: the longest first, each to the engine with the fewest tokens."""
    return assign_least_loaded(np.argsort(-tokens, kind="stable").tolist(), tokens.tolist(), shape.engines)


PLANNERS: dict[str, type[RolloutPlanner] | None] = {
    "stay": None,
    "gather": Gatherer,
    "rebalance": Rebalancer,
    "clairvoyant": Clairvoyant,
}
"""Shipped planners by name; None asks nobody."""


OF_SYSTEMS: dict[str, type[RolloutPlanner]] = {"buffer": BufferPlanner}
"""Planners of systems from the literature."""


def load_planner(source: str | RolloutPlanner | type[RolloutPlanner] | None) -> RolloutPlanner | None:
    """Return a planner from itself, a name in `PLANNERS`, a class, or `module:Class(key=value,...)`; None for `stay`.

    ConfigError for another source.
    """
    known = {**PLANNERS, **OF_SYSTEMS}
    if source is None or (isinstance(source, str) and source in known):
        shipped = known[source or "stay"]
        return None if shipped is None else shipped()
    own: RolloutPlanner | None = OwnPlanner.resolve(source)
    if own is None:
        near = did_you_mean(str(source), PLANNERS)
        raise ConfigError(f"no planner named {source!r}{near}; there are {', '.join(PLANNERS)}, or module:Class")
    return own
