"""How sequences are dealt out to ranks and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from tltlab.runtime.trainer.ranks import micro_batches, own_micro_batches, ranks_of


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 5), st.integers(1, 80))
def test_every_sequence_is_in_one_micro_batch(lengths, ranks, budget):
    dealt = micro_batches(lengths, ranks, budget)
    assert dealt == micro_batches(lengths, ranks, budget)
    assert sorted(i for rank in dealt for members in rank for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in m) <= budget or len(m) == 1 for rank in dealt for m in rank)
    assert len(dealt) == ranks
    assert len({len(rank) for rank in dealt}) == 1
    for turn in zip(*dealt, strict=True) if budget >= 60 else ():
        tokens = [sum(lengths[i] for i in members) for members in turn]
        assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 5), st.integers(1, 4), st.integers(8, 100))
def test_every_rank_has_as_many_micro_batches(lengths, ranks, num_parts, budget):
    parts = [list(range(n, len(lengths), num_parts)) for n in range(num_parts)]
    rank_of = ranks_of(lengths, parts, ranks, budget)
    own = [own_micro_batches(lengths, rank_of, rank, ranks, budget) for rank in range(ranks)]
    assert len({len(batches) for batches in own}) == 1
    for rank, batches in enumerate(own):
        assert sorted(i for members in batches for i in members) == [i for i, r in enumerate(rank_of) if r == rank]
        assert all(len(members) == 1 or sum(lengths[i] for i in members) <= budget for members in batches if members)


def test_one_rank_packs_as_if_alone():
    lengths = [7, 3, 9, 2, 2, 8]
    assert own_micro_batches(lengths, [0] * 6, 0, 1, 12) == micro_batches(lengths, 1, 12)[0]
