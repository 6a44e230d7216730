"""How sequences are dealt out to ranks and micro-batches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.runtime.trainer.ranks import micro_batches


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 5), st.integers(1, 80))
def test_every_sequence_is_in_one_micro_batch_within_the_budget_and_ranks_differ_little(
    lengths: list[int], ranks: int, budget: int
):
    dealt = micro_batches(lengths, ranks, budget)
    assert dealt == micro_batches(lengths, ranks, budget)
    assert sorted(i for rank in dealt for members in rank for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in m) <= budget or len(m) == 1 for rank in dealt for m in rank)
    assert len(dealt) == ranks
    assert len({len(rank) for rank in dealt}) == 1
    for turn in zip(*dealt, strict=True) if budget >= 60 else ():
        tokens = [sum(lengths[i] for i in members) for members in turn]
        assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_a_sequence_above_the_budget_is_alone_and_others_share():
    assert micro_batches([100, 3, 4, 3], ranks=1, budget=10) == [[[0], [1, 2, 3]]]


def test_ranks_without_work_get_empty_micro_batches():
    assert micro_batches([7], ranks=3, budget=10) == [[[0]], [[]], [[]]]
    assert micro_batches([], ranks=2, budget=10) == [[], []]
