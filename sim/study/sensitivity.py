"""How the order of systems changes where numbers that had to be assumed lie elsewhere in their plausible range.

Both ends of each range are tried separately, on the same responses with common random numbers. Only the systems
that the number touches are simulated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from tltlab.acceptance.base import Scaled
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.costs.base import CostModel
from tltlab.costs.scaled import ScaledCosts
from tltlab.planning.system_binding import BoundSystem
from tltlab.stats import kendall_tau

Variant = tuple[BoundSystem, CostModel]
"""A system with the costs that it runs under."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """A number that was assumed: `change(variant, end)` at an end, None where the system does not depend on it."""

    name: str
    ends: tuple[float, float]
    change: Callable[[Variant, float], Variant | None]


def _scale_chances(of_text: bool) -> Callable[[Variant, float], Variant | None]:
    def change(variant: Variant, ratio: float) -> Variant | None:
        bound, costs = variant
        drafted = {s.drafter for s in bound.policy.strategies if s.speculates}
        names = tuple(sorted(name for name in drafted if bound.registry[name].has_network != of_text))
        if not names or not bound.defaults or bound.acceptance is None:
            return None
        return replace(bound, acceptance=Scaled(bound.acceptance, names, ratio)), costs

    return change


def _age_faster(variant: Variant, factor: float) -> Variant | None:
    """The share of its chances that an untrained or old drafter loses times `factor`, which it loses as much faster."""
    bound, costs = variant
    model = bound.acceptance
    if not isinstance(model, FreshAcceptance) or not bound.defaults:
        return None
    usual = model.freshness
    freshness = Freshness(
        untrained=max(0.0, 1.0 - factor * (1.0 - usual.untrained)),
        floor=max(0.0, 1.0 - factor * (1.0 - usual.floor)),
        updates_to_train=usual.updates_to_train * factor,
        age_steps=usual.age_steps / factor,
    )
    return replace(bound, acceptance=model.model_copy(update={"freshness": freshness})), costs


def _overhead(variant: Variant, factor: float) -> Variant | None:
    bound, costs = variant
    if not any(s.speculates for s in bound.policy.strategies):
        return None
    return bound, ScaledCosts.wrapping(costs, overhead=factor)


RANGES = (
    Range(name="chance of a learned drafter's token", ends=(0.8, 1.1), change=_scale_chances(of_text=False)),
    Range(name="chance of a model-free drafter's token", ends=(0.7, 1.2), change=_scale_chances(of_text=True)),
    Range(name="what a learned drafter loses untrained or old", ends=(0.5, 2.0), change=_age_faster),
    Range(name="what speculation adds to an iteration", ends=(0.7, 1.3), change=_overhead),
)
"""Varied inputs, as factors: acceptance where a default stands for it, and costs by 30 % either way."""


def over_ranges(
    systems: Sequence[BoundSystem],
    costs: CostModel,
    seconds: Mapping[str, float],
    measure: Callable[[Sequence[Variant]], Sequence[float]],
) -> list[dict[str, Any]]:
    """Order of the systems at each end of each range; no entry for a range that touches no system.

    `seconds` are the systems' times as assumed, `measure` returns those of variants. One entry per end: `number`,
    `factor`, `seconds` by system, `order` (fastest first), `changed` (systems simulated again) and `kendall_tau` with
    the order as assumed, None for fewer than two systems.
    """
    ends = []
    for number in RANGES:
        for factor in number.ends:
            changed = {b.system.name: v for b in systems if (v := number.change((b, costs), factor)) is not None}
            if changed:
                ends.append((number.name, factor, changed))
    measured = iter(measure([variant for _, _, changed in ends for variant in changed.values()]))
    pairs = list(combinations(range(len(seconds)), 2))
    rows = []
    for name, factor, changed in ends:
        times = dict(seconds) | {system: next(measured) for system in changed}
        tau = kendall_tau(list(seconds.values()), list(times.values()), pairs) if pairs else None
        rows.append(
            {
                "number": name, "factor": factor, "seconds": times, "order": sorted(times, key=times.__getitem__),
                "changed": list(changed), "kendall_tau": tau,
            }
        )  # fmt: skip
    return rows
