"""Acceptance of a drafter along a text, from captured states: `kept_along`, and figures derived from it.

Only leading matches count, so a chain is followed only while it repeats the text. An EAGLE head reads its own states
instead of the target's from the second drafted token on: depth d takes a d-th pass, over the positions that still
match. Drafts are greedy, as vLLM's are by default. No pass of the target is needed.

A rejected draft is never the text's token, so along a text that an engine generated its passes (`walk`) follow exactly,
at any temperature, up to rounding differences of two programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.trainer.attention import two_part_attention

CHUNK = 256
"""Chains followed at a time: bounds the memory of logits and attention scores."""


@torch.inference_mode()
def kept_along(head: DrafterHead, frozen: FrozenTarget, sequence: TrainingSequence, max_depth: int) -> Tensor:
    """Return the accepted tokens at each position of the response in a sequence: uint8 (response tokens).

    Position p's draft begins with the token there, so vLLM verifies it when p - 1 is the newest token known. Positions
    with fewer than two tokens of the sequence before them have no draft, and 0. The head and `frozen` are on one device
    and of one dtype, to which the sequence's states are converted.

    >>> kept_along(head, frozen, sequence, max_depth=8)                                             # doctest: +SKIP
    tensor([2, 1, 0, 8, 7], dtype=torch.uint8)
    """
    device, dtype = frozen.embedding.device, frozen.embedding.dtype
    text = sequence.token_ids.to(device).long()
    start = min(sequence.prompt_tokens, len(text))
    kept = torch.zeros(len(text) - start, dtype=torch.uint8, device=device)
    if len(text) < 3 or start == len(text):
        return kept.cpu()
    # The last state is for a draft beyond the text.
    hidden = sequence.hidden[: len(text) - 2].to(device, dtype)
    aux = None if sequence.aux is None else sequence.aux[: len(text) - 2].to(device, dtype)
    embedded = functional.embedding(text, frozen.embedding)
    states = head.first_states(hidden, aux)
    # Input t is (token t + 1, state t), its draft is for token t + 2.
    positions = torch.arange(len(text), device=device) + sequence.first_position
    here = positions[None, : len(text) - 2]
    x, residual = head.inputs(embedded[None, 1:-1], states[None], here)
    q, k, v = head.layer.self_attn.project(x, head.rotation(here))
    run = _Run(head, frozen, text, embedded, positions, k[0], v[0])
    first = max(start - 2, 0)
    for begin in range(first, x.shape[1], CHUNK):
        at = torch.arange(begin, min(begin + CHUNK, x.shape[1]), device=device)
        kept[at + 2 - start] = run.follow(at, residual[0, at], q[0, :, at].transpose(0, 1), max_depth)
    return kept.cpu()


@dataclass(frozen=True, slots=True)
class _Run:
    """One text with the keys and values (KV heads, T, D) of the target's states along it."""

    head: DrafterHead
    frozen: FrozenTarget
    text: Tensor
    embedded: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor

    def follow(self, at: Tensor, residual: Tensor, q: Tensor, max_depth: int) -> Tensor:
        """Return the accepted tokens of the chains that start at the inputs `at` (A): uint8 (A).

        `residual` (A, H) and `q` (A, heads, D) are those of these inputs. A chain attends to the keys up to its own
        input, and its own later ones.
        """
        layer, text = self.head.layer, self.text
        mask = torch.arange(self.keys.shape[1], device=at.device) <= at[:, None]
        kept, alive = torch.zeros(len(at), dtype=torch.uint8, device=at.device), torch.arange(len(at), device=at.device)
        own_k = own_v = self.keys.new_zeros(len(at), self.keys.shape[0], 0, self.keys.shape[2])
        for step in range(max_depth):
            attended = two_part_attention(q, self.keys, self.values, mask[alive], own_k, own_v)
            states = self.head.finish(residual[:, None], attended[:, :, None])[:, 0]
            here = at[alive] + 2 + step
            hit = self.head.greedy(states, self.frozen) == text[here]
            kept[alive[hit]] += 1
            goes_on = hit & (here + 1 < len(text))
            alive, states, own_k, own_v, here = (part[goes_on] for part in (alive, states, own_k, own_v, here))
            if not len(alive):
                break
            at_states = self.positions[here - 1][:, None]
            inputs = self.head.inputs(self.embedded[here][:, None], states[:, None], at_states)
            x, residual = (part[:, 0] for part in inputs)
            rotation = self.head.rotation(at_states)
            q, k, v = layer.self_attn.project(x[:, None], rotation)
            q, own_k, own_v = q[:, :, 0], torch.cat([own_k, k], 2), torch.cat([own_v, v], 2)
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChains:
    """Acceptance of a head's drafts.

    `accept_length`: 1 + mean accepted tokens of a draft. `positions[i]`: the acceptance rate of token i given that all
    tokens before it were accepted, None where there was no such draft. `drafts`: the number of drafts.
    """

    accept_length: float
    positions: list[float | None]
    drafts: int


def acceptance_along(
    head: DrafterHead, frozen: FrozenTarget, sequences: Iterable[TrainingSequence], max_depth: int
) -> MeasuredChains:
    """Return the acceptance of drafts of `max_depth` tokens at every position of the responses in `sequences`.

    A draft at the end of the text counts up to there.
    """
    reached, kept_at = torch.zeros(max_depth), torch.zeros(max_depth)
    drafts = total = 0
    depths = torch.arange(max_depth)
    for sequence in sequences:
        # Positions that can have a draft, with the tokens of the text from there on.
        first = max(0, 2 - sequence.prompt_tokens)
        kept = kept_along(head, frozen, sequence, max_depth).long()[first:]
        room = torch.arange(len(kept), 0, -1)
        drafts, total = drafts + len(kept), total + int(kept.sum())
        reached += ((kept[:, None] >= depths) & (room[:, None] > depths)).sum(0)
        kept_at += (kept[:, None] > depths).sum(0)
    positions = [float(k / n) if n else None for k, n in zip(kept_at.tolist(), reached.tolist(), strict=True)]
    return MeasuredChains(accept_length=1 + total / drafts if drafts else 1.0, positions=positions, drafts=drafts)


def walk(kept: Sequence[int]) -> list[int]:
    """Return the positions of a response at which an engine verifies a draft, given accepted tokens by position.

    The first token comes with the prompt's pass; each later pass gives its accepted tokens and one more.

    >>> walk([0, 2, 9, 9, 0, 1, 9])
    [1, 4, 5]
    """
    at, passes = 1, []
    while at < len(kept):
        passes.append(at)
        at += kept[at] + 1
    return passes


def chances(drafts: int, kept: Sequence[int]) -> list[float | None]:
    """Return acceptance rates of token i given all tokens before it; None where there was no such draft.

    >>> chances(4, [3, 1])
    [0.75, 0.3333333333333333]
    """
    return [k / tried if tried else None for tried, k in zip([drafts, *kept], kept, strict=False)]
