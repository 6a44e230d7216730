"""Lower bounds for the search for buckets under a memory cap: what the smaller batches must still cost.

A runner (see `graph_pool`) is paid once, at its largest batch e: opening_r(e), which grows with e. The bound charges
it in parts instead, share_r(b) for each batch b that it serves. As long as share_r(1) + .. + share_r(e) <= opening_r(e)
for every e, no choice is charged more than it pays, and without the memory of what is open the rest falls apart into a
short dynamic programme over batches. Any such shares and any price of a byte give valid bounds; the dual of the linear
programme gives the best ones for the whole problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.optimize import linprog

from tltlab.arrays import Flags, Floats, Ints, Words
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.strategy import Strategy

from .graph_pool import DrafterRunner, GraphPool, TargetRunner

PRICES = (0.0, 0.7, 1.0, 1.4)
"""Prices of a byte that are tried, in units of the linear programme's; the best one shifts with what is left."""


@dataclass(frozen=True, kw_only=True)
class BucketProblem:
    """One search: S strategies, R runners, batches 1..B (index 0 is batch 1); seconds and bytes.

    seconds[S, B]: w_b * t_s(b) / A_s. uses[S, R]: the runners of a strategy. graph[R, B]: a captured size.
    opening[R, B]: what the runner's largest batch costs beyond that. captured[B]: sizes captured also within a row.
    """

    seconds: Floats
    uses: Floats
    graph: Floats
    opening: Floats
    captured: Flags
    cap: float

    @classmethod
    def of(
        cls,
        seconds: Floats,
        strategies: Sequence[Strategy],
        pool: GraphPool,
        sizes: Sequence[int],
        cap: float,
        drafters: Drafters = STANDARD,
    ) -> BucketProblem:
        """The pool's bytes taken apart into runners, graphs and openings."""
        batches = range(1, seconds.shape[1] + 1)
        targets = sorted({s.tokens_to_verify for s in strategies})
        drafted = [s for s in strategies if drafters.network_levels(s)]
        single = [[pool.target_bytes(TargetRunner(tokens_to_verify=v, batches=(b,))) for b in batches] for v in targets]
        pair = [[pool.target_bytes(TargetRunner(tokens_to_verify=v, batches=(b, b))) for b in batches] for v in targets]
        single += [[pool.drafter_bytes(DrafterRunner(strategy=s, batches=(b,))) for b in batches] for s in drafted]
        pair += [[pool.drafter_bytes(DrafterRunner(strategy=s, batches=(b, b))) for b in batches] for s in drafted]
        graph = np.array(pair) - np.array(single)
        uses = [[s.tokens_to_verify == v for v in targets] + [s == d for d in drafted] for s in strategies]
        return cls(
            seconds=seconds,
            uses=np.array(uses, np.float64),
            graph=graph,
            opening=np.array(single) - graph,
            captured=np.isin(np.array(batches), np.asarray(sizes)),
            cap=cap,
        )

    @cached_property
    def end(self) -> Floats:
        """Bytes of the graphs of strategy s at batch b, [S, B], where a row ends there."""
        return self.uses @ self.graph

    @cached_property
    def stay(self) -> Floats:
        """The same within a row: only captured sizes."""
        return self.end * self.captured

    @cached_property
    def bits(self) -> Words:
        """The runners of each strategy as a set of bits."""
        return np.asarray((self.uses.astype(np.uint64) << np.arange(len(self.graph), dtype=np.uint64)).sum(axis=1))

    def has(self, masks: Words) -> Floats:
        """1 where runner r is in mask n, [N, R]."""
        runners = np.arange(len(self.graph), dtype=np.uint64)
        return ((masks[:, None] >> runners) & np.uint64(1)).astype(np.float64)


@dataclass(kw_only=True)
class Bounds:
    """What batches 1..b cost at least, given the runners that are open and the strategy in force at b + 1.

    Row 0 counts bytes alone, the others seconds + price * bytes, for `prices`.
    """

    problem: BucketProblem
    prices: Floats
    shares: Floats
    _by_mask: dict[int, Floats] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, problem: BucketProblem) -> Bounds:
        price, shares = _duals(problem)
        return cls(problem=problem, prices=price * np.array(PRICES if price else (0.0,)), shares=shares)

    def below(self, masks: Words, last: Ints, b: int) -> Floats:
        """For each label the bounds of batches 1..b, [N, 1 + prices]."""
        unique, inverse = np.unique(masks, return_inverse=True)
        if new := [mask for mask in unique.tolist() if len(self._by_mask.get(mask, ())) < b]:
            self._by_mask.update(zip(new, self._tables(np.array(new, np.uint64), b), strict=True))
        tables = np.array([self._by_mask[mask][b - 1] for mask in unique.tolist()])
        return np.asarray(tables[inverse, :, last])

    def _tables(self, masks: Words, b: int) -> Floats:
        """[N, b, 1 + prices, S]."""
        p = self.problem
        shares = np.tensordot(1.0 - p.has(masks), p.uses[:, :, None] * self.shares[:, :b], axes=([1], [1]))
        seconds = np.concatenate([[0.0], np.ones(len(self.prices))])[:, None]
        prices = np.concatenate([[1.0], self.prices])[:, None]
        below = np.zeros((len(masks), len(prices), len(p.seconds)))
        tables = np.empty((len(masks), b, *below.shape[1:]))
        for i in range(b):
            below = below + seconds * p.seconds[:, i] + prices * (p.stay[:, i] + shares[:, None, :, i])
            # Another row may begin here; its end is a graph even where the size is not captured anyway.
            begin = (below + prices * (p.end[:, i] - p.stay[:, i])).min(axis=2, keepdims=True)
            below = np.minimum(below, begin)
            tables[:, i] = below
        return tables


def _duals(p: BucketProblem) -> tuple[float, Floats]:
    """The price of a byte and the shares from the linear programme; a price of 0 where the cap does not bind in it.

    Variables: x[s, b], s serves b; z[r, b], r is open at b, falling in b; q[s, b], a row of s ends at b, a size not
    captured anyway. The duals of x <= z are the shares times the price.
    """
    (num_s, num_b), num_r = p.seconds.shape, len(p.graph)
    ends = np.flatnonzero(~p.captured)
    num_z, num_q = num_r * num_b, num_s * len(ends)
    each = sp.identity(num_b)
    step = sp.diags([-1.0, 1.0], [0, 1], shape=(num_b - 1, num_b))
    begins = (each - sp.diags([1.0], [1], shape=(num_b, num_b))).tocsr()[ends]
    at_most = sp.bmat(
        [
            [sp.kron(p.uses.T, each), -sp.identity(num_z), None],
            [None, sp.kron(sp.identity(num_r), step), None],
            [sp.kron(sp.identity(num_s), begins), None, -sp.identity(num_q)],
            [_row(p.stay) / p.cap, _row(np.diff(p.opening, axis=1, prepend=0)) / p.cap, _row(p.end[:, ends]) / p.cap],
        ],
        format="csr",
    )
    solution: Any = linprog(
        np.concatenate([p.seconds.ravel(), np.zeros(num_z + num_q)]),
        at_most,
        np.append(np.zeros(at_most.shape[0] - 1), 1.0),
        sp.hstack([sp.kron(np.ones((1, num_s)), each), sp.csr_matrix((num_b, num_z + num_q))]),
        np.ones(num_b),
        method="highs",
    )
    shares = np.diff(p.opening, axis=1, prepend=0)
    shares[:, 0] = 0.0
    if solution.status != 0 or (price := -float(solution.ineqlin.marginals[-1]) / p.cap) <= 0.0:
        return 0.0, shares
    shares = np.maximum(-solution.ineqlin.marginals[:num_z].reshape(num_r, num_b) / price, 0.0)
    # What the solver's tolerance leaves above an opening would make the bound no bound.
    over = np.cumsum(shares, axis=1) / np.maximum(p.opening, 1e-300)
    return price, shares / np.maximum(over.max(axis=1, keepdims=True), 1.0)


def _row(values: Floats) -> Any:
    return sp.csr_matrix(values.reshape(1, -1))
