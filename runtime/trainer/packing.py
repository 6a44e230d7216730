"""Sequences back to back in one row of a batch, without padding: `pack`.

Attention goes over each sequence alone (`attention.py`) and positions are each sequence's own, so packed
sequences know nothing of each other. TLT (arXiv 2511.16665, Fig. 17) reports 2.2 times the samples per second of
padding; `tltlab.bench.drafter.packing` measures ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tltlab.runtime.drafter.sequences import TrainingSequence


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Rows of several sequences, T in all. Row t of a sequence joins token t + 1 with the target's hidden state at t.

    token_ids (T): token t + 1. hidden (T, H): state t. next_hidden (T, H): state t + 1, which a drafter's output stands
    for and from which the target's distribution of token t + 2 follows. next_token_ids (T): token t + 2. aux (T, A H):
    what entered A of the target's layers at t, or None. positions (T): of state t in its request. mask (T): whether
    token t + 2 belongs to the response. `lengths`: rows of each sequence: N states give
    N - 1 rows; sequences of fewer than two states give none and have no length here.
    """

    token_ids: Tensor
    next_token_ids: Tensor
    hidden: Tensor
    next_hidden: Tensor
    aux: Tensor | None
    positions: Tensor
    mask: Tensor
    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def pack(
    sequences: Sequence[TrainingSequence], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> PackedBatch:
    """Pack sequences in their order, states in `dtype` or, without one, in that of the first sequence.

    `aux` is None unless all sequences have theirs. At least one sequence is needed.

    >>> pack([of_100_states, of_20_states]).lengths                                                 # doctest: +SKIP
    (99, 19)
    """
    assert sequences, "nothing to pack"
    dtype = dtype or sequences[0].hidden.dtype
    used = [s for s in sequences if s.num_rows >= 2]
    lengths = tuple(s.num_rows - 1 for s in used)
    with_aux = all(s.aux is not None for s in sequences)

    def joined(parts: list[Tensor], like: Tensor) -> Tensor:
        return torch.cat(parts) if parts else like[:0]

    first = sequences[0]
    steps = [torch.arange(length) for length in lengths]
    aux = [s.aux[:-1] for s in used if s.aux is not None] if with_aux else []
    numbers = torch.arange(0)
    return PackedBatch(
        token_ids=joined([s.token_ids[1:-1] for s in used], first.token_ids).long().to(device),
        next_token_ids=joined([s.token_ids[2:] for s in used], first.token_ids).long().to(device),
        hidden=joined([s.hidden[:-1] for s in used], first.hidden).to(device, dtype),
        next_hidden=joined([s.hidden[1:] for s in used], first.hidden).to(device, dtype),
        aux=joined(aux, first.aux).to(device, dtype) if with_aux and first.aux is not None else None,
        positions=joined([s.first_position + t for s, t in zip(used, steps, strict=True)], numbers).to(device),
        mask=joined([t + 2 >= s.prompt_tokens for s, t in zip(used, steps, strict=True)], numbers.bool()).to(device),
        lengths=lengths,
    )
