"""Policies that engines ship: SGLang's thresholds on accepted tokens, and vLLM's budget.

vLLM's table over batch sizes (#32374) is `BatchTable`; SGLang's profiled costs (#28045) are `Goodput` with a measured
cost model. Built from the public descriptions and sources, to compare with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tltlab.arrays import Floats
from tltlab.costs.base import CostModel
from tltlab.drafters.budget import DraftBudget, accept_probabilities, refuse_trees, share_out
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .goodput import COSTS
from .selector import Selector
from .simple import bucket_of, checked_thresholds

SGLANG_STEPS: tuple[tuple[int, tuple[int, ...], float], ...] = (
    (1, (1, 3, 5, 7), -0.25),
    (8, (0, 1, 3), 0.0),
    (32, (0, 1), 0.0),
    (64, (0,), 0.0),
)
"""SGLang's defaults: from a batch size on, the depths to choose from and what is added to thresholds going down."""
_WEIGHT, _EVERY, _WARM_UP = 0.2, 5, 10


@dataclass(slots=True)
class _Slot:
    """Depths of a range of batch sizes; accepted tokens as a moving average, and iterations so far."""

    depths: tuple[int, ...]
    down: float
    at: int
    accepted: float
    iterations: int = 0


class AcceptedThresholds(Selector, kind="thresholds"):
    """SGLang's adaptive steps (pull request #21599, by batch size since #24055): deeper while drafts are kept whole.

    In each range of batch sizes a moving average of the accepted tokens, of weight 0.2 for the newest iteration,
    moves the depth every 5 iterations, after 10: up past depth d where it exceeds d - 0.5, down from d to
    the next lower e where it is at most e - 0.5 + down (0.5 + down where e is 0). Depth 0 is left again for a look at
    the next one. Time is never looked at. `rows` are (min_batch, depths, down).
    """

    def __init__(
        self,
        drafter: str = "ngram",
        rows: Sequence[tuple[int, tuple[int, ...], float]] = SGLANG_STEPS,
    ):
        self.thresholds = checked_thresholds([min_batch for min_batch, _, _ in rows])
        if any(not depths or sorted(set(depths)) != list(depths) or depths[0] < 0 for _, depths, _ in rows):
            raise ConfigError(f"thresholds: each range needs depths that ascend, got {[list(d) for _, d, _ in rows]}")
        self.drafter = drafter
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
            slot.accepted += _WEIGHT * (outcome.accept_length - 1.0 - slot.accepted)
        slot.iterations += 1
        due = slot.iterations - _WARM_UP
        if due > 0 and due % _EVERY == 0:
            slot.at = _moved(slot)
            slot.accepted = max(slot.accepted, 0.0)

    def state_dict(self) -> Json:
        return {"slots": [[slot.at, slot.accepted, slot.iterations] for slot in self.slots_]}

    def load_state_dict(self, state: Json) -> None:
        for slot, (at, accepted, iterations) in zip(self.slots_, state["slots"], strict=True):
            slot.at, slot.accepted, slot.iterations = at, accepted, iterations


def _moved(slot: _Slot) -> int:
    depths, at = slot.depths, slot.at
    if depths[at] == 0:
        return min(at + 1, len(depths) - 1)
    while at > 0 and slot.accepted <= max(depths[at - 1] - 0.5, 0.5 if depths[at - 1] == 0 else 0.0) + slot.down:
        at -= 1
    if at == slot.at:
        while at < len(depths) - 1 and slot.accepted > depths[at] - 0.5:
            at += 1
    return at


class VerificationBudget(DraftBudget):
    """vLLM's adaptive verification (pull requests #47808, #52228): verify what promises the most tokens per second.

    All requests are drafted to the strategy's depth. Each slot of a draft has a chance to be kept, all before it kept
    too; the target verifies the N best of the batch, with the N that maximises (batch + sum of their chances) / seconds
    by `costs`, which stand for the curve that vLLM profiles at its start.

    vLLM's chances come from a confidence head or from the draft's logits. Here a request's are alpha^i as in
    `AcceptanceBudget`: they differ between requests, not between the drafts of one. Unverified tokens are not measured
    either: N is 0 or at least one token each, and where it is 0 one call in 16 verifies one each.

    >>> from tltlab.costs.load import load_costs
    >>> from tltlab.state import RequestState
    >>> budget = VerificationBudget(load_costs("cpu-small"))
    >>> requests = [RequestState(key=(0, "p", i, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99,
    ...                          recent_acceptance=a) for i, a in enumerate((6.0, 0.1))]
    >>> budget.allot(StepState(rl_step=0, batch=2, requests=requests), Strategy.chain("learned", 7))
    [7, 1]
    """

    drafts_whole = True
    _TOTALS, _LOOK_EVERY = 64, 16

    def __init__(self, costs: Annotated[CostModel, COSTS]):
        self.calls_off_ = 0
        self._costs = costs
        self.drafts_with(STANDARD)

    def drafts_with(self, drafters: Drafters) -> None:
        self._drafters = drafters
        self._seconds: dict[tuple[Strategy, int], tuple[Floats, Floats, Floats]] = {}

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates or not state.batch:
            return [0] * state.batch
        refuse_trees(strategy)
        chances = accept_probabilities(state)
        total = self._best_total(chances, state, strategy)
        self.calls_off_ = 0 if total else self.calls_off_ + 1
        if self.calls_off_ >= self._LOOK_EVERY:
            self.calls_off_, total = 0, state.batch
        return share_out(chances, strategy.draft_depth, total, 1)

    def _best_total(self, chances: Floats, state: StepState, strategy: Strategy) -> int:
        """N, among 0 and at most 64 totals from one token each up to what the strategy verifies."""
        totals, fixed_s, slope_s = self._curve(strategy, state.batch)
        further = np.sort((chances[:, None] ** np.arange(2, strategy.draft_depth + 1)).ravel())[::-1]
        beyond = np.maximum(totals - state.batch, 0.0).astype(np.int64)
        kept = chances.sum() + np.concatenate([[0.0], np.cumsum(further)])[beyond]
        kept[totals == 0] = 0.0
        return int(totals[np.argmax((state.batch + kept) / (fixed_s + slope_s * state.context_tokens))])

    def _curve(self, strategy: Strategy, batch: int) -> tuple[Floats, Floats, Floats]:
        """Totals, seconds of an iteration that verifies them, and seconds per token of context."""
        if (strategy, batch) not in self._seconds:
            most = batch * (strategy.tokens_to_verify - 1)
            totals = np.unique(np.append(np.linspace(batch, most, min(self._TOTALS, most - batch + 1)).round(), 0.0))
            costs = [
                self._costs.iteration(
                    strategy, tokens_to_verify=1.0 + total / batch, drafter_loaded=True, drafters=self._drafters
                )
                for total in totals.tolist()
            ]
            fixed_s = np.array([cost.without_context_s(batch) for cost in costs])
            slope_s = np.array([cost.context_slope_s(batch) for cost in costs])
            self._seconds[strategy, batch] = totals, fixed_s, slope_s
        return self._seconds[strategy, batch]

    def state_dict(self) -> Json:
        return {"calls_off": self.calls_off_}

    def load_state_dict(self, state: Json) -> None:
        self.calls_off_ = state["calls_off"]
