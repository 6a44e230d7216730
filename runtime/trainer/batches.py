"""How sequences are dealt out: to ranks, and within a rank to micro-batches that fit a token budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """For each of `ranks` ranks its micro-batches, each a list of indices into `lengths` (tokens), ascending.

    Every rank gets the same number of them, hardly more than needed, some empty where there are fewer sequences than
    that: collectives of sharded models keep step by it. A micro-batch has up to `budget` tokens; a longer sequence has
    one of its own. Longest sequences go first, each to the micro-batch with the fewest tokens, and ranks then take
    turns from both ends (longest processing time first, Graham 1969). The same lengths give the same answer.

    >>> micro_batches([5, 3, 4, 2], ranks=2, budget=8)
    [[[0, 3]], [[1, 2]]]
    """
    assert ranks >= 1
    assert budget >= 1
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # No two of more than half a budget share a micro-batch.
    least = max(-(-sum(min(n, budget) for n in lengths) // budget), sum(2 * n > budget for n in lengths))
    per_rank = -(-least // ranks)
    while (bins := _filled(order, lengths, ranks * per_rank, budget)) is None:
        # By 2 %: one at a time would take seconds for thousands of sequences.
        per_rank += 1 + per_rank // 50
    bins.sort(key=lambda members: (-sum(lengths[i] for i in members), members))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn in range(per_rank):
        row = bins[turn * ranks : (turn + 1) * ranks]
        for rank, members in enumerate(row if turn % 2 == 0 else reversed(row)):
            dealt[rank].append(members)
    return dealt


def _filled(order: Sequence[int], lengths: Sequence[int], num: int, budget: int) -> list[list[int]] | None:
    """`num` micro-batches that hold all sequences within the budget, or None where they do not fit so."""
    bins: list[list[int]] = [[] for _ in range(num)]
    heap = [(0, n) for n in range(num)]
    for i in order:
        if not heap:
            return None
        tokens, n = heapq.heappop(heap)
        if tokens and tokens + lengths[i] > budget:
            return None
        bins[n].append(i)
        heapq.heappush(heap, (tokens + lengths[i], n))
    return [sorted(members) for members in bins]
