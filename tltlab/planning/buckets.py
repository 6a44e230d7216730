"""Buckets chosen exactly: which strategy for which batch sizes, within a memory cap for their CUDA graphs.

As responses end, a worker's batch falls. The tokens generated at batch b take some seconds under each strategy. A plan
gives contiguous ranges of batch sizes one strategy each; borders may lie anywhere in 1..max_batch. Its graphs take what
`graph_pool` counts, to rounding.

Without a cap each batch takes its fastest strategy, and a limit on the number of rows is a dynamic programme over
(batch, rows, strategy). A cap couples the ranges, since strategies share runners and a runner is paid at its largest
batch: then HiGHS (scipy.optimize.milp) solves an integer programme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.strategy import Strategy

from .graph_pool import GraphMemory

ROUNDING = 1e-12
LEAST_S = 1e-300
_SCALE, _ROW, _TOLERANCE = 1e4, 1e-5, 2e-6
"""The least seconds in a programme, whose gap is 1e-6; the weight of a row; the tolerance above the cap."""


@frozen
class BucketPlan:
    """(min_batch, strategy) rows as a `BatchTable` takes them, the seconds they need and the bytes of their graphs.

    `memory_bytes` is 0 where no pool was given.
    """

    rows: tuple[tuple[int, Strategy], ...]
    seconds: float
    memory_bytes: float


def plan_buckets(
    seconds_of: Callable[[Strategy, int], float],
    strategies: Sequence[Strategy],
    *,
    max_batch: int,
    max_buckets: int | None = None,
    graphs: GraphMemory | None = None,
) -> BucketPlan:
    """The plan for batches 1..max_batch with the fewest seconds; of equals the one with the least memory or rows.

    `seconds_of(s, b)` is what all that is generated at batch b takes under s. Raises ConfigError where no plan's
    `graphs` fit.

    >>> from tltlab.strategy import NO_SPECULATION
    >>> took = {("ngram", 1): 45.0, ("ngram", 2): 20.0, ("none", 1): 90.0, ("none", 2): 10.0}
    >>> arms = [NO_SPECULATION, Strategy.chain("ngram", 4)]
    >>> plan = plan_buckets(lambda s, b: took[s.drafter, b], arms, max_batch=2)
    >>> [(b, str(s)) for b, s in plan.rows]
    [(1, 'ngram:4'), (2, 'none')]
    """
    strategies = tuple(dict.fromkeys(strategies))
    seconds = np.array([[seconds_of(s, b) for b in range(1, max_batch + 1)] for s in strategies])
    max_rows = max_batch if max_buckets is None else min(max_buckets, max_batch)
    plan = _plan(_without_cap(seconds, max_rows), seconds, strategies, graphs)
    if graphs is None or plan.memory_bytes <= graphs.cap_bytes:
        return plan
    fitting = _within_cap(seconds, strategies, graphs, max_rows)
    if fitting is None:
        least = min(graphs.bytes_of([(1, s)], max_batch) for s in strategies)
        raise ConfigError(
            f"no plan of {', '.join(map(str, strategies))} fits into {graphs.cap_bytes:.4g} bytes; the smallest of "
            f"them alone takes {least:.4g} for batches to {max_batch}: raise the cap, or lower max_batch or the "
            "captured sizes"
        )
    return fitting


def _without_cap(seconds: Floats, max_rows: int) -> list[int]:
    """The fastest choice for all batches; of equals one with the fewest rows: a batch of no weight joins its neighbour.

    `floor_s` [b, k, s] are the least seconds of batches 1..b below a row of s, with k rows more.
    """
    num_strategies, num_batches = seconds.shape
    floor_s = np.zeros((num_batches + 1, max_rows, num_strategies))
    for b in range(1, num_batches + 1):
        goes_on = floor_s[b - 1] + seconds[:, b - 1]
        floor_s[b] = goes_on
        floor_s[b, 1:] = np.minimum(goes_on[1:], goes_on[:-1].min(axis=1, keepdims=True))
    totals = (floor_s[-2] + seconds[:, -1]).min(axis=1)
    k = int(totals.argmin())
    choice = [int((floor_s[-2, k] + seconds[:, -1]).argmin())]
    for b in range(num_batches - 1, 0, -1):
        goes_on = floor_s[b - 1] + seconds[:, b - 1]
        s = choice[-1]
        if k and goes_on[k - 1].min() < goes_on[k, s]:
            k -= 1
            s = int(goes_on[k].argmin())
        choice.append(s)
    return choice[::-1]


def _plan(
    choice: Sequence[int], seconds: Floats, strategies: Sequence[Strategy], graphs: GraphMemory | None
) -> BucketPlan:
    rows = tuple((b + 1, strategies[s]) for b, s in enumerate(choice) if b == 0 or s != choice[b - 1])
    took = math.fsum(seconds[s, b] for b, s in enumerate(choice))
    return BucketPlan(rows=rows, seconds=took, memory_bytes=graphs.bytes_of(rows, len(choice)) if graphs else 0.0)


def _within_cap(
    seconds: Floats, strategies: Sequence[Strategy], graphs: GraphMemory, max_rows: int
) -> BucketPlan | None:
    """The plan of least `seconds` [strategy, batch] whose graphs fit; None where none fits.

    Variables: x[s, b], s serves b; z[r, b], runner r is open at b, falling in b; q[s, b], a row of s ends at b. A graph
    is captured where its runner serves a captured size or a row ends, and a runner costs its opening beyond its graphs
    at its largest batch.
    """
    pool, cap = graphs.pool, graphs.cap_bytes
    (num_s, num_b), batches = seconds.shape, range(1, seconds.shape[1] + 1)
    targets = sorted({s.tokens_to_verify for s in strategies})
    drafted = [s for s in strategies if graphs.drafters.network_passes(s)]
    uses = np.array([[s.tokens_to_verify == v for v in targets] + [s == d for d in drafted] for s in strategies])
    runners = [partial(pool.target_bytes, v) for v in targets] + [partial(pool.drafter_bytes, s) for s in drafted]
    single, pair = (np.array([[runner((b,) * n) for b in batches] for runner in runners]) for n in (1, 2))
    graph = pair - single
    num_r, end = len(graph), uses @ graph
    captured = np.isin(np.array(batches), np.asarray(graphs.sizes))
    # Imported here: these take half a second, and only a cap needs them.
    import scipy.sparse as sp
    from scipy.optimize import Bounds, LinearConstraint, milp

    each, after = sp.identity(num_b), sp.eye(num_b, k=1)
    falls = sp.eye(num_b - 1, num_b, k=1) - sp.eye(num_b - 1, num_b)
    memory = (end * captured, np.diff(single - graph, axis=1, prepend=0), end * ~captured)
    rows = sp.bmat(
        [
            [sp.kron(uses.T.astype(np.float64), each), -sp.identity(num_r * num_b), None],
            [None, sp.kron(sp.identity(num_r), falls), None],
            [sp.kron(sp.identity(num_s), each - after), None, -sp.identity(num_s * num_b)],
        ],
        format="csr",
    )
    bytes_of, ends = np.concatenate([part.ravel() for part in memory]) / cap, np.zeros(rows.shape[1])
    ends[-num_s * num_b :] = 1.0
    scale = _SCALE / max(float(seconds.min(axis=0).sum()), LEAST_S)
    serves = sp.hstack([sp.kron(np.ones((1, num_s)), each), sp.csr_matrix((num_b, rows.shape[1] - num_s * num_b))])
    for margin in (0.0, _TOLERANCE):
        found = milp(
            np.concatenate([scale * seconds.ravel(), np.zeros(num_r * num_b), np.full(num_s * num_b, _ROW)]),
            integrality=np.repeat([1, 0, 0], [num_s * num_b, num_r * num_b, num_s * num_b]),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(rows, ub=0),
                LinearConstraint(serves, 1, 1),
                LinearConstraint(np.array([bytes_of, ends]), ub=[1.0 - margin, max_rows]),
            ],
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        choice: list[int] = found.x[: num_s * num_b].reshape(num_s, num_b).argmax(axis=0).tolist()
        plan = _plan(choice, seconds, strategies, graphs)
        # The solver's tolerance may let a plan be larger than the cap.
        if plan.memory_bytes <= cap * (1.0 + ROUNDING):
            break
    return plan
