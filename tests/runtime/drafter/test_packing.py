"""Packed sequences know nothing of each other, of what comes later, or of where in the batch they lie."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tltlab.runtime.drafter.heads.loss import Chains
from tltlab.runtime.drafter.sequences import pack

from .small_heads import made_head, made_sequence, made_target

METHODS = ["eagle", "eagle3"]


def steps_of(head, frozen, batch, num_steps=3):
    """The states (T, H) of some steps; those of chains beyond their sequence's end are zero."""
    chains = Chains(head, frozen, batch)
    made = []
    with torch.no_grad():
        for _ in range(num_steps):
            states, _, inside = chains.step()
            made.append(states * inside[:, None])
    return made


def near(found, expected, share=1e-4):
    return bool((found - expected).norm() < share * expected.norm())


def changed(sequence, row):
    """The same with another state, and another token after it, at one row."""
    hidden, tokens = sequence.hidden.clone(), sequence.token_ids.clone()
    aux = sequence.aux.clone()
    hidden[row], aux[row], tokens[row + 1] = 5.0, -5.0, (tokens[row + 1] + 1) % 13
    return dataclasses.replace(sequence, hidden=hidden, aux=aux, token_ids=tokens)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.booleans())
def test_nothing_is_padded(rows, with_aux):
    sequences = [made_sequence(n, seed=n, first_position=n) for n in rows]
    if not with_aux:
        sequences = [dataclasses.replace(s, aux=None) for s in sequences]
    batch = pack(sequences)
    assert batch.lengths == tuple(n - 1 for n in rows if n >= 2)
    per_row = [batch.token_ids, batch.next_token_ids, batch.hidden, batch.next_hidden, batch.positions, batch.mask]
    assert {len(tensor) for tensor in per_row} == {sum(batch.lengths)}
    assert (batch.aux is not None) == with_aux
    assert batch.aux is None or len(batch.aux) == sum(batch.lengths)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row", [1, 7])
def test_nothing_later_changes_what_was_drafted_earlier(method, row):
    head, frozen, sequence = made_head(method), made_target(), made_sequence(12)
    steps = steps_of(head, frozen, pack([sequence]))
    others = steps_of(head, frozen, pack([changed(sequence, row)]))
    for step, (before, after) in enumerate(zip(steps, others, strict=True)):
        # Step i of the chain from s reads the target's states up to s and tokens up to s + i + 1.
        same = row - step
        assert torch.equal(before[: max(same, 0)], after[: max(same, 0)])
        assert not torch.allclose(before[row], after[row])


@pytest.mark.parametrize("method", METHODS)
def test_packed_is_each_alone_at_its_own_positions(method):
    head, frozen = made_head(method), made_target()
    sequences = [made_sequence(n, seed=n, first_position=first) for n, first in ((6, 0), (300, 40), (2, 5))]
    packed = steps_of(head, frozen, pack(sequences))
    alone = [steps_of(head, frozen, pack([sequence])) for sequence in sequences]
    for step, together in enumerate(packed):
        assert near(together, torch.cat([made[step] for made in alone]))
    elsewhere = dataclasses.replace(sequences[1], first_position=0)
    # Rotary positions are relative: a shift of all alike changes nothing, and that is why each has to count its own.
    assert near(steps_of(head, frozen, pack([elsewhere]))[0], alone[1][0])
    gap = pack([sequences[1]])
    gap = dataclasses.replace(gap, positions=torch.where(gap.positions > 60, gap.positions + 9, gap.positions))
    assert not near(steps_of(head, frozen, gap)[0], alone[1][0], 1e-2)
