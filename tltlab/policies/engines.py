"""Depth selection as shipped by engines: SGLang's thresholds on accepted tokens, and vLLM's table over context lengths.

vLLM's table over batch sizes (#32374) is `BatchTable`; SGLang's profiled costs (#28045) are `Goodput` with a measured
cost model. Built from the public descriptions and sources, to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tltlab.errors import ConfigError
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector
from .simple import BatchTable, bucket_of, checked_thresholds

SGLANG_STEPS: tuple[tuple[int, tuple[int, ...], float], ...] = (
    (1, (1, 3, 5, 7), -0.25),
    (8, (0, 1, 3), 0.0),
    (32, (0, 1), 0.0),
    (64, (0,), 0.0),
)
"""SGLang's defaults: from a batch size on, the depths to choose from and what is added to thresholds going down."""


@dataclass(slots=True)
class _Slot:
    """Depths of a range of batch sizes; accepted tokens as a moving average, and iterations so far."""

    depths: tuple[int, ...]
    down: float
    at: int
    accepted: float
    iterations: int = 0


class AcceptedThresholds(Selector):
    """SGLang's adaptive steps (pull request #21599, by batch size since #24055): deeper while drafts are kept whole.

    In each range of batch sizes a moving average of the accepted tokens, of weight `weight` for the newest iteration,
    moves the depth every `every` iterations, after `warm_up`: up past depth d where it exceeds d - 0.5, down from d to
    the next lower e where it is at most e - 0.5 + down (0.5 + down where e is 0). Depth 0 is left again for a look at
    the next one. Time is never looked at. `rows` are (min_batch, depths, down).
    """

    def __init__(
        self,
        drafter: str = "ngram",
        rows: Sequence[tuple[int, Sequence[int], float]] = SGLANG_STEPS,
        weight: float = 0.2,
        every: int = 5,
        warm_up: int = 10,
    ) -> None:
        self.thresholds = checked_thresholds([min_batch for min_batch, _, _ in rows])
        if any(not depths or sorted(set(depths)) != list(depths) or depths[0] < 0 for _, depths, _ in rows):
            raise ConfigError(f"thresholds: each range needs depths that ascend, got {[list(d) for _, d, _ in rows]}")
        if not 0.0 < weight <= 1.0 or every < 1:
            raise ConfigError(f"thresholds: weight is above 0 and at most 1, every at least 1: {weight}, {every}")
        self.drafter = drafter
        self.weight, self.every, self.warm_up = weight, every, warm_up
        self.slots_ = [
            _Slot(tuple(depths), down, len(depths) // 2, float(max(depths[len(depths) // 2] - 1, 0)))
            for _, depths, down in rows
        ]
        chains = (Strategy.chain(drafter, depth) for slot in self.slots_ for depth in slot.depths)
        self.strategies = tuple(dict.fromkeys((NO_SPECULATION, *chains)))

    def choose(self, state: StepState) -> Choice:
        bucket = bucket_of(self.thresholds, state.batch)
        slot = self.slots_[bucket]
        return Choice(Strategy.chain(self.drafter, slot.depths[slot.at]), bucket=bucket)

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        slot = self.slots_[bucket_of(self.thresholds, outcome.batch)]
        if choice.strategy.draft_depth != slot.depths[slot.at]:
            return  # Chosen before the last move, or for another range of batch sizes.
        if choice.strategy.speculates and outcome.batch:
            slot.accepted += self.weight * (outcome.accept_length - 1.0 - slot.accepted)
        slot.iterations += 1
        due = slot.iterations - self.warm_up
        if due > 0 and due % self.every == 0:
            slot.at = _moved(slot)
            slot.accepted = max(slot.accepted, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"slots": [[slot.at, slot.accepted, slot.iterations] for slot in self.slots_]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for slot, (at, accepted, iterations) in zip(self.slots_, state["slots"], strict=True):
            slot.at, slot.accepted, slot.iterations = at, accepted, iterations


def _moved(slot: _Slot) -> int:
    """Where a slot's depth goes from here."""
    depths, at = slot.depths, slot.at
    if depths[at] == 0:
        return min(at + 1, len(depths) - 1)
    while at > 0 and slot.accepted <= max(depths[at - 1] - 0.5, 0.5 if depths[at - 1] == 0 else 0.0) + slot.down:
        at -= 1
    if at == slot.at:
        while at < len(depths) - 1 and slot.accepted > depths[at] - 0.5:
            at += 1
    return at


class ContextTable(BatchTable):
    """A strategy for each range of mean context per request, in tokens: vLLM's proposal #54801.

    `rows` are (min_tokens, strategy) with ascending min_tokens, as in `BatchTable`.

    >>> table = ContextTable([(1, Strategy.chain("learned", 5)), (131072, NO_SPECULATION)])
    >>> str(table.choose(StepState(rl_step=0, batch=2, context_tokens=3e5)).strategy)
    'none'
    """

    memoryless = False

    def choose(self, state: StepState) -> Choice:
        bucket = bucket_of(self.thresholds, int(state.context_tokens / max(state.batch, 1)))
        return Choice(self.rows[bucket], bucket=bucket)
