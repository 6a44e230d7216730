"""What a system from the literature is: a composition of the core's parts.

It says what is drafted by whom (`drafters`, `ladder`), who decides (`selector`, `activation`, `budget`), where
requests run (`placement`, `topology`) and what idle workers do (`idle_use`). What a row leaves out is plain: nothing.
What a paper does not say is in `assumptions`. `system_binding.bind` fits a row to the acceptance that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.drafters.specs import DrafterSpec
from tltlab.policies.policy import (
    Activation,
    BegMabSpec,
    Bucket,
    BudgetSpec,
    FixedSpec,
    LengthAwareBudgetSpec,
    NoneSpec,
    TableRow,
    TableSpec,
)
from tltlab.policies.specs import SelectorSpec
from tltlab.strategy import NO_SPECULATION, Strategy

Shape = tuple[int, int, int]
"""Draft depth, top-k, tokens to verify."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What a system may draft from `min_batch` running requests on: `trees` where its drafter can, else `chains`."""

    min_batch: int
    trees: tuple[Shape, ...] = ()
    chains: tuple[int, ...] = ()


def no_speculation(buckets: Sequence[Bucket]) -> SelectorSpec:
    return NoneSpec()


def one_strategy(buckets: Sequence[Bucket]) -> SelectorSpec:
    """The first strategy of the first bucket, always."""
    return FixedSpec(strategy=buckets[0].strategies[0])


def batch_size_table(buckets: Sequence[Bucket]) -> SelectorSpec:
    """The first strategy of the bucket that holds the batch size."""
    return TableSpec(rows=tuple(TableRow(min_batch=b.min_batch, strategy=b.strategies[0]) for b in buckets))


def beg_mab(buckets: Sequence[Bucket]) -> SelectorSpec:
    """TLT's Algorithm 1 with the epsilon and window of its released code."""
    return BegMabSpec(buckets=tuple(buckets), epsilon=0.1, window=300, reward="paper")


def length_aware(costs: CostModel) -> BudgetSpec:
    """DAS's budget with t = c_base + c_tok * n fitted to iterations of 1 to 32 requests of 1 to 9 tokens."""
    points = []
    for depth in (0, 1, 2, 4, 8):
        strategy = Strategy.chain("suffix", depth)
        cost = costs.iteration(strategy)
        points += [(b * strategy.tokens_to_verify, cost.without_context_s(b)) for b in (1, 2, 4, 8, 16, 32)]
    tokens, seconds = np.array(points, np.float64).T
    token_s, base_s = np.polyfit(tokens, seconds, 1)
    least = 1e-6 * float(seconds.max())
    return LengthAwareBudgetSpec(base_s=max(float(base_s), least), token_s=max(float(token_s), least))


@dataclass(frozen=True, kw_only=True)
class System:
    """One system. `lossless`: every token is drawn from the current policy, as without the system.

    `drafters` are names in order of preference, "learned" for one with a network; a system runs with those whose
    acceptance is known. `generating_share` of the workers' GPUs generate; where it is below 1 the rest trains
    (`topology` "separate"). `specs` are drafters that differ from an engine's own of that name.
    """

    name: str
    title: str
    source: str
    drafters: tuple[str, ...] = ()
    ladder: tuple[Rung, ...] = ()
    selector: Callable[[Sequence[Bucket]], SelectorSpec] = no_speculation
    activation: Activation | None = None
    budget: Callable[[CostModel], BudgetSpec] | None = None
    specs: tuple[tuple[str, DrafterSpec], ...] = ()
    idle_use: SpotTraining | None = None
    placement: Literal["contiguous", "round_robin", "least_loaded"] = "contiguous"
    topology: Literal["colocated", "separate"] = "colocated"
    generating_share: float = 1.0
    lossless: bool = True
    assumptions: tuple[str, ...] = ()


def strategies(rung: Rung, drafter: str, *, trees: bool) -> tuple[Strategy, ...]:
    """What a rung lets a drafter draft; no speculation where it has nothing."""
    if trees and rung.trees:
        return tuple(Strategy(drafter, *shape) for shape in rung.trees)
    return tuple(Strategy.chain(drafter, depth) for depth in rung.chains) or (NO_SPECULATION,)
