"""How many of a head's drafts are kept along texts: at every position, and in the passes that an engine would make.

Both follow from `chains.kept_along`. A rejected draft is never the text's token, so along a text that an engine
generated the passes that it made follow exactly, at any temperature: only the rounding of two programs differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tltlab.runtime.drafter.heads.head import DrafterHead
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence

from .chains import kept_along


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """`accept_length`: 1 + mean accepted tokens of a draft. `positions[i]`: the share of drafts of which token i was
    kept among those of which all before it were, None where there was none; `drafts`: how many drafts that is from."""

    accept_length: float
    positions: list[float | None]
    drafts: int

    def to_json(self) -> dict[str, Any]:
        return {"accept_length": self.accept_length, "positions": self.positions, "drafts": self.drafts}


def acceptance_along(
    head: DrafterHead, frozen: FrozenTarget, sequences: Iterable[TrainingSequence], max_depth: int
) -> Acceptance:
    """Of drafts of `max_depth` tokens at every position of the responses in `sequences`.

    Where the text ends in mid-draft only the tokens up to there count.
    """
    reached, kept_at = torch.zeros(max_depth), torch.zeros(max_depth)
    drafts = total = 0
    depths = torch.arange(max_depth)
    for sequence in sequences:
        kept, room = _drafts(kept_along(head, frozen, sequence, max_depth), sequence)
        drafts, total = drafts + len(kept), total + int(kept.sum())
        reached += ((kept[:, None] >= depths) & (room[:, None] > depths)).sum(0)
        kept_at += (kept[:, None] > depths).sum(0)
    positions = [float(k / n) if n else None for k, n in zip(kept_at.tolist(), reached.tolist(), strict=True)]
    return Acceptance(accept_length=1 + total / drafts if drafts else 1.0, positions=positions, drafts=drafts)


def walk(kept: Sequence[int]) -> list[int]:
    """Positions of a response at which an engine verifies a draft, of the tokens kept of a draft at each position.

    The first token comes with the prompt's pass; each later pass gives what it keeps and one token more.

    >>> walk([0, 2, 9, 9, 0, 1, 9])
    [1, 4, 5]
    """
    at, passes = 1, []
    while at < len(kept):
        passes.append(at)
        at += kept[at] + 1
    return passes


def chances(drafts: int, kept: Sequence[int]) -> list[float | None]:
    """The share of drafts of which token i was kept, of those of which all before it were; None where none was.

    >>> chances(4, [3, 1])
    [0.75, 0.3333333333333333]
    """
    return [k / tried if tried else None for tried, k in zip([drafts, *kept], kept, strict=False)]


def _drafts(kept: Tensor, sequence: TrainingSequence) -> tuple[Tensor, Tensor]:
    """What was kept at each position that can have a draft, and the tokens of the text from there on, as integers."""
    room = torch.arange(len(kept), 0, -1)
    first = max(0, 2 - sequence.prompt_tokens)
    return kept.long()[first:], room[first:]
