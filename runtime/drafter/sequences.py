"""Training data of a drafter: a response's text with the target's hidden states, and several packed in one row.

Sequences are packed without padding: attention and positions are per sequence (`trainer.attention`). TLT (arXiv
2511.16665, Fig. 17) reports 2.2 times the samples per second of padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from tltlab.drafters.base import Key
from tltlab.records import frozen

HELD_OUT = 1 / 8
"""Share of a run's prompts that are held out: their responses judge the drafter, and no trainer learns from them."""


def prompt_draw(prompt: str, seed: int) -> float:
    """Return a number in [0, 1) drawn for a prompt: held out of a drafter's training are the lowest, a share of all.

    A hash of its arguments, so that it is the same for all responses to the prompt, for all workers and members of a
    group, in any order of arrival and after a restart. In a run `prompt` is the prompt's id, which is the same in all
    epochs, and not its key, which has the RL step: a prompt held out in one RL step and trained on in another would
    judge what has seen it. Offline, where texts have no ids, it is the prompt itself; so a run may hold out prompts of
    its drafter's warm-up, which both drafters that it compares have seen.

    >>> [round(prompt_draw(prompt, seed=0), 2) for prompt in ("p10", "p11")]
    [0.84, 0.0]
    """
    digest = hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


@frozen
class TrainingSequence:
    """A stretch of one request, prompt and response, with the states of the pass that generated or scored it.

    `token_ids` (N + 1) and `hidden` (N, H): row t is the target's last hidden state, after its final norm, at the
    position of token t; the last token was sampled and never read, so it has none. `aux` (N, A H) are the inputs of A
    of the target's layers, side by side, for EAGLE-3. `first_position` is the position of token 0 in its request, above
    0 where a cached prefix was not recomputed; the first `prompt_tokens` tokens are the prompt's.
    """

    key: Key
    token_ids: Tensor
    hidden: Tensor
    aux: Tensor | None = None
    first_position: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        rows = len(self.token_ids) - 1
        assert rows >= 0
        assert len(self.hidden) == rows
        assert self.aux is None or len(self.aux) == rows

    @property
    def rl_step(self) -> int:
        return self.key[0]

    @property
    def num_rows(self) -> int:
        """N, the tokens with a hidden state."""
        return len(self.hidden)

    @property
    def teaches(self) -> bool:
        """True if a drafter can learn from it: two states, and a token of the response after them."""
        return self.num_rows >= max(2, self.prompt_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(t.nbytes for t in (self.token_ids, self.hidden, self.aux) if t is not None)

    def stretch(self, start: int, rows: int) -> TrainingSequence:
        """Return `rows` rows from row `start` on: a view."""
        stop = start + rows
        return replace(
            self,
            token_ids=self.token_ids[start : stop + 1],
            hidden=self.hidden[start:stop],
            aux=None if self.aux is None else self.aux[start:stop],
            first_position=self.first_position + start,
            prompt_tokens=max(0, self.prompt_tokens - start),
        )

    def on_host(self) -> TrainingSequence:
        """Return a copy on the host, backed by no more memory than its own."""
        aux = None if self.aux is None else _own(self.aux)
        return replace(self, token_ids=_own(self.token_ids), hidden=_own(self.hidden), aux=aux)


def _own(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


@frozen
class PackedBatch:
    """Rows of several sequences, T in all. Row t of a sequence joins token t + 1 with the target's hidden state at t.

    token_ids (T): token t + 1. hidden (T, H): state t. next_hidden (T, H): state t + 1, for which a drafter's output
    stands and from which the target's distribution of token t + 2 follows. next_token_ids (T): token t + 2. aux (T, A
    H): inputs of A of the target's layers at t, or None. positions (T): of state t in its request. mask (T): True where
    token t + 2 belongs to the response. `lengths`: rows of each sequence: N states give N - 1 rows; sequences of fewer
    than two states give none and have no length here.
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


def pack(sequences: Sequence[TrainingSequence], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack sequences in their order, states in float32.

    `aux` is None unless all sequences have theirs. At least one sequence is needed.

    >>> pack([of_100_states, of_20_states]).lengths                                                 # doctest: +SKIP
    (99, 19)
    """
    assert sequences, "nothing to pack"
    packed = [s for s in sequences if s.num_rows >= 2]

    def joined(part: Callable[[TrainingSequence], Tensor], dtype: torch.dtype) -> Tensor:
        # Without a sequence of two states there is nothing, of the right width.
        return torch.cat([part(sequences[0])[:0], *map(part, packed)]).to(device, dtype)

    with_aux = all(s.aux is not None for s in sequences)
    return PackedBatch(
        token_ids=joined(lambda s: s.token_ids[1:-1], torch.long),
        next_token_ids=joined(lambda s: s.token_ids[2:], torch.long),
        hidden=joined(lambda s: s.hidden[:-1], torch.float32),
        next_hidden=joined(lambda s: s.hidden[1:], torch.float32),
        aux=joined(lambda s: cast(Tensor, s.aux)[:-1], torch.float32) if with_aux else None,
        positions=joined(lambda s: s.first_position + torch.arange(s.num_rows)[:-1], torch.long),
        mask=joined(lambda s: torch.arange(s.num_rows)[:-1] + 2 >= s.prompt_tokens, torch.bool),
        lengths=tuple(s.num_rows - 1 for s in packed),
    )
