"""Memory of a pool of captured CUDA graphs, bucketed as in TLT.

A runner is what SGLang calls so: one capture session for one drafter or one tokens_to_verify, with a graph per batch
size. TLT (arXiv 2511.16665, section on the bucketed CUDAGraph pool) captures graphs only for the batches that a
strategy is meant for, target and drafter apart, and lets strategies with the same tokens_to_verify share the target's.

Bytes on one GPU of a runner whose graphs hold t_1..t_n tokens (batch times tokens per request), the largest batch m:

    nodes        n * passes * bytes_per_layer          passes: layers run once; the head and sampling count as one more
    outputs      sum(t) * 2*hidden, and max(t) * 4*vocab in fp32
    logits       max(t) * 2*vocab, on p > 1 GPUs also max(t) * 2*vocab/p: bf16, after and before gathering
    page tables  attention states * m * page_tables * context * 4
    workspace    `workspace_bytes` per capture: cuBLAS keeps one per stream

Captures run from the largest size down, so smaller graphs reuse the activations of the largest; sessions on streams of
their own reuse nothing of each other. A drafter's runner drafts in depth - 1 passes of one layer at batch * top_k
tokens (with an fp32 softmax, 4*vocab a token more) and has a second graph per batch, one pass over what was accepted.
Terms sum over runners, so memory is additive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from tltlab.config import FrozenModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.policies.beg_mab import BegMab
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.simple import BatchTable
from tltlab.records import frozen
from tltlab.strategy import NO_SPECULATION, Strategy

Batches = tuple[int, ...]
"""Batch sizes with a graph, ascending."""


@frozen
class CapturePlan:
    """CUDA graphs to capture: the target's batch sizes by tokens_to_verify, the drafters' by strategy.

    A drafter has two graphs per batch size, drafting and taking the accepted tokens in.
    """

    target: dict[int, Batches]
    drafter: dict[Strategy, Batches]

    @property
    def target_graphs(self) -> list[tuple[int, int]]:
        """(batch, tokens_to_verify) of each of the target's graphs."""
        return [(b, tokens) for tokens, batches in self.target.items() for b in batches]


def sglang_sizes(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that SGLang 0.5 captures with speculation: each to 8, by 2 to 32, by 4 to 60, by 8 to 256.

    >>> sglang_sizes(12)
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
    """
    steps = (*range(1, 9), *range(10, 33, 2), *range(40, 64, 4), *range(72, 257, 8), *range(272, max_batch + 1, 16))
    return tuple(b for b in steps if b <= max_batch)


def plan_bucketed(
    rows: Sequence[tuple[int, Strategy]],
    max_batch: int,
    sizes: Sequence[int],
    drafters: Drafters = STANDARD,
) -> CapturePlan:
    """Each strategy captured from its min_batch up to the next larger one; equal tokens_to_verify share the target's.

    Rows with one min_batch are strategies of one bucket; batches below the first use the first. A bucket's largest
    batch is always captured, so each of its batches has a graph. Drafters with a network have their own graphs.

    >>> plan = plan_bucketed([(1, Strategy("learned", 8, 4, 48)), (3, Strategy("learned", 8, 4, 16))], 8, (1, 2, 4, 8))
    >>> plan.target_graphs
    [(4, 16), (8, 16), (1, 48), (2, 48)]
    """
    if not rows:
        raise ConfigError("no rows to capture graphs for: give (min_batch, strategy) pairs")
    starts = sorted({min_batch for min_batch, _ in rows})
    if starts[0] < 1 or starts[-1] > max_batch:
        raise ConfigError(f"min_batch must lie in 1..max_batch = {max_batch}, got {starts}")
    ends = dict(pairwise([*starts, max_batch + 1]))
    target: dict[int, set[int]] = {}
    drafter: dict[Strategy, set[int]] = {}
    for min_batch, strategy in rows:
        batches = _within(sizes, 1 if min_batch == starts[0] else min_batch, ends[min_batch] - 1)
        target.setdefault(strategy.tokens_to_verify, set()).update(batches)
        if drafters.network_passes(strategy):
            drafter.setdefault(strategy, set()).update(batches)
    return CapturePlan(
        target={tokens: tuple(sorted(target[tokens])) for tokens in sorted(target)},
        drafter={strategy: tuple(sorted(batches)) for strategy, batches in drafter.items()},
    )


def plan_for(policy: Policy, max_batch: int, sizes: Sequence[int], drafters: Drafters | None = None) -> CapturePlan:
    """Graphs that an engine captures to run a policy: each strategy at the batches at which the policy may choose it.

    `drafters` are by default the policy's.

    A table's rows and BEG-MAB's buckets, with all their arms, are captured as `plan_bucketed` does; what other
    selectors may choose at every batch. Speculation is captured up to the activation's `max_requests`; decoding plainly
    is a strategy of one token, captured beyond that, where a policy chooses it, and at every batch where the activation
    counts the remaining requests: a policy that never speculates has the target's plain graphs alone. Iterations in
    which a hold keeps the other side of the threshold run without a graph.

    >>> from tltlab.policies.policy import Activation
    >>> from tltlab.policies.specs import FixedSpec
    >>> tree = FixedSpec(strategy=Strategy("learned", 8, 4, 48))
    >>> policy = Policy(selector=tree, activation=Activation(max_requests=2))
    >>> plan_for(policy, 8, (1, 2, 4, 8)).target_graphs
    [(4, 1), (8, 1), (1, 48), (2, 48)]
    """
    last, counts_waiting = max_batch, False
    if policy.activation:
        last, counts_waiting = min(policy.activation.max_requests, max_batch), policy.activation.count == "remaining"
    rows = [row for row in _rows(policy.selector.build(np.random.default_rng(0))) if row[0] <= last]
    if counts_waiting:
        rows += [(start, NO_SPECULATION) for start in dict.fromkeys(start for start, _ in rows)]
    if last < max_batch:
        rows.append((last + 1, NO_SPECULATION))
    return plan_bucketed(rows, max_batch, sizes, drafters=policy.registry if drafters is None else drafters)


def _rows(selector: Selector) -> list[tuple[int, Strategy]]:
    """(least batch, strategy) of all that a selector may choose; the first bucket holds all batches below it."""
    starts: tuple[int, ...] = (1,)
    arms: tuple[tuple[Strategy, ...], ...] = (tuple(selector.strategies),)
    if isinstance(selector, BatchTable):
        starts, arms = selector.thresholds, tuple((strategy,) for strategy in selector.rows)
    elif isinstance(selector, BegMab):
        starts, arms = selector.thresholds, selector.arms
    return [(start, arm) for start, bucket in zip((1, *starts[1:]), arms, strict=True) for arm in bucket]


class GraphPool(FrozenModel):
    """Bytes that captured graphs take on one GPU; see the module for the terms.

    `bytes_per_layer` is what a graph keeps for the kernels of one layer, the one parameter without a source: fit it on
    a measured pool. `page_tables` per attention state is 7 in SGLang 0.5's FlashAttention backend with top_k > 1.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    context_tokens: PositiveInt
    tensor_parallel: PositiveInt = 1
    page_tables: NonNegativeInt = 7
    workspace_bytes: NonNegativeInt = 32 * 2**20
    bytes_per_layer: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def memory_bytes(self, plan: CapturePlan) -> float:
        """Bytes of all runners of a plan."""
        target = sum(self.target_bytes(tokens, batches) for tokens, batches in plan.target.items())
        return target + sum(self.drafter_bytes(strategy, batches) for strategy, batches in plan.drafter.items())

    def target_bytes(self, tokens_to_verify: int, batches: Batches) -> float:
        """Bytes of the target's runner for one tokens_to_verify."""
        largest = tokens_to_verify * batches[-1]
        nodes = len(batches) * (self.num_layers + 1) * self.bytes_per_layer
        outputs = 2 * self.hidden_size * tokens_to_verify * sum(batches)
        logits = largest * (self._head_bytes() + 4 * self.vocab_size)
        return nodes + outputs + logits + self._table_bytes(batches[-1]) + self.workspace_bytes

    def drafter_bytes(self, strategy: Strategy, batches: Batches) -> float:
        """Bytes of the runner of one strategy's drafter, both its graphs per batch."""
        # A layer and a head each, depth - 1 times in drafting and once in taking tokens in.
        nodes = len(batches) * 2 * strategy.draft_depth * self.bytes_per_layer
        softmax = self._head_bytes() + 4 * self.vocab_size
        tokens = strategy.top_k * (strategy.draft_depth > 1) + 1
        logits = batches[-1] * (tokens * softmax + 4 * self.vocab_size)
        tables = strategy.draft_depth * self._table_bytes(batches[-1])
        return nodes + logits + tables + 2 * self.workspace_bytes

    def _head_bytes(self) -> float:
        gathered = 2 * self.vocab_size
        return gathered + (gathered / self.tensor_parallel if self.tensor_parallel > 1 else 0.0)

    def _table_bytes(self, batch: int) -> float:
        return 4.0 * self.page_tables * self.context_tokens * batch


@frozen
class GraphMemory:
    """Room for captured CUDA graphs: the engine's pool, what it captures, and how many bytes may go into it."""

    pool: GraphPool
    cap_bytes: float
    max_batch: int
    sizes: tuple[int, ...]
    drafters: Drafters = STANDARD

    def bytes_of(self, rows: Sequence[tuple[int, Strategy]], max_batch: int) -> float:
        """Bytes of the graphs of a table's rows."""
        return float(self.pool.memory_bytes(plan_bucketed(rows, max_batch, self.sizes, drafters=self.drafters)))

    def holds(self, policy: Policy) -> bool:
        """True if the graphs of a policy fit."""
        return self.pool.memory_bytes(plan_for(policy, self.max_batch, self.sizes, self.drafters)) <= self.cap_bytes


def _within(sizes: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    if high < 1 or any(size < 1 for size in sizes):
        raise ConfigError(f"batch sizes to capture must be at least 1, got {list(sizes)} up to {high}")
    return tuple(sorted({size for size in sizes if low <= size <= high} | {high}))
