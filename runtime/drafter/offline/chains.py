"""Acceptance of a drafter along a text, from captured states: `kept_along`, and figures derived from it.

Only leading matches count, so a chain is followed only while it repeats the text. An EAGLE head reads its own states
instead of the target's from the second drafted token on: depth d takes a d-th pass, over the positions that still
match. Drafts are greedy, as vLLM's are by default. No pass of the target is needed.

A rejected draft is never the text's token, so along a text that an engine generated its passes (`walk`) follow exactly,
at any temperature, up to rounding differences of two programs.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tltlab.records import frozen
from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.loss import Chains
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence, pack

CHUNK = 256
"""Rows of logits held at a time."""


@torch.inference_mode()
def kept_along(head: DrafterHead, frozen: FrozenTarget, sequence: TrainingSequence, max_depth: int) -> Tensor:
    """Return the accepted tokens at each position of the response in a sequence: uint8 (response tokens).

    Position p's draft begins with the token there, so vLLM verifies it when p - 1 is the newest token known. Positions
    with fewer than two tokens of the sequence before them have no draft, and 0. The head and `frozen` are on one device
    and of one dtype, to which the sequence's states are converted.

    >>> kept_along(head, frozen, sequence, max_depth=8)                                             # doctest: +SKIP
    tensor([2, 1, 0, 8, 7], dtype=torch.uint8)
    """
    kept = torch.zeros(max(len(sequence.token_ids) - sequence.prompt_tokens, 0), dtype=torch.uint8)
    batch = pack([sequence], frozen.embedding.device)
    if not bool(batch.mask.any()):
        return kept
    chains = Chains(head, frozen, batch)
    of_rows = torch.zeros(batch.num_rows, dtype=torch.uint8, device=batch.mask.device)
    for _ in range(max_depth):
        states, at, inside = chains.step()
        greedy = torch.cat([head.likeliest(head.logits(part, frozen)) for part in states.split(CHUNK)])
        chains.keep(inside & batch.mask[chains.rows] & (greedy == batch.next_token_ids[at]))
        if not len(chains.rows):
            break
        of_rows[chains.rows] += 1
    drafts = of_rows[batch.mask]
    kept[len(kept) - len(drafts) :] = drafts
    return kept


@frozen
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
