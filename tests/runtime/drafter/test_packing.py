"""Sequences packed in one row."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from tltlab.runtime.drafter.sequences import pack

from .small_heads import made_sequence


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.booleans())
def test_nothing_is_padded(rows, with_aux):
    sequences = [made_sequence(n, seed=n, first_position=n) for n in rows]
    if not with_aux:
        sequences = [dataclasses.replace(s, aux=None) for s in sequences]
    batch = pack(sequences)
    assert batch.lengths == tuple(n - 1 for n in rows if n >= 2)
    per_row = [batch.token_ids, batch.next_token_ids, batch.hidden, batch.next_hidden, batch.positions, batch.mask]
    assert {len(tensor) for tensor in per_row} == {sum(batch.lengths)}
    assert batch.positions.tolist() == [n + t for n in rows for t in range(n - 1)]
    assert (batch.aux is not None) == with_aux
    assert batch.aux is None or len(batch.aux) == sum(batch.lengths)
