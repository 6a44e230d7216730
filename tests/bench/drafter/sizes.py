"""How much of everything the parts of the drafter's benchmark do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tltlab.runtime.models.runs import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes(Sizes):
    """RL steps of the runs are `steps` frozen and adaptive, over `seeds` seeds, and `pairs` of coordination.

    `texts`: held-out responses on which recipes are judged. `updates`: of each recipe.
    """

    seeds: int = 1
    texts: int = 96
    updates: int = 200
    pairs: int = 16
    checkpoint_megabytes: int = 240
    rounds: int = 8


FAST = BenchSizes(
    model="tiny", prompts_per_step=6, group_size=4, max_response_tokens=128, steps=4, warm_up_texts=48,
    warm_up_length=1.5, warm_up_updates=60, texts=16, tokens_per_update=512, updates=8, pairs=3, heldout=32,
    checkpoint_megabytes=20, rounds=2,
)  # fmt: skip


def sizes_of(*, fast: bool, **changed: Any) -> BenchSizes:
    """The sizes of a full or of a fast benchmark, changed where a value is not None."""
    changes = {name: value for name, value in changed.items() if value is not None}
    return replace(FAST if fast else BenchSizes(), **changes)
