"""Cases of an audit: a covering design over drafter, depth, temperature, filter and composition of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, HybridSpec, LearnedSpec
from tltlab.policies.policy import AcceptanceBudgetSpec, Policy
from tltlab.policies.specs import ExploreSpec, FixedSpec
from tltlab.strategy import NO_SPECULATION, Strategy

from .exact import Sampling
from .models import TinyModels

Composition = Literal[
    "batch", "alone", "mixed", "queue", "budgets", "switching", "updates", "updates while running", "greedy"
]

COMPOSITIONS: dict[Composition, str] = {
    "batch": "as many equal requests at once as the engine runs",
    "alone": "one request at a time",
    "mixed": "one batch of different prompts, temperatures, filters and lengths",
    "queue": "four times as many requests as the engine runs at once",
    "budgets": "fewer drafts than requests, shared out again in every iteration",
    "switching": "another drafter or depth, or none, in every iteration",
    "updates": "the target's weights change between rollouts",
    "updates while running": "the target's weights change while requests run, which keep their keys and values",
}

DEPTHS = (1, 2, 4, 8)
TEMPERATURES = (0.6, 0.9, 1.0, 1.3)
FILTERS = ((1.0, 0), (0.9, 0), (1.0, 3), (0.9, 4))
"""(top_p, top_k)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCase:
    """One setting to audit. With `depth` 0 the policy chooses it."""

    drafter: str
    depth: int
    sampling: Sampling
    composition: Composition

    def __str__(self) -> str:
        s = self.sampling
        parts = [self.drafter, f"depth {self.depth}" if self.depth else "", f"T {s.temperature:g}"]
        parts += [f"top-p {s.top_p:g}" if s.top_p < 1 else "", f"top-k {s.top_k}" if s.top_k else "", self.composition]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedDrafter:
    """A drafter under audit, by its name in an engine with a head of `method`, which samples if `probabilistic`."""

    name: str
    method: Literal["eagle", "eagle3", "draft_model"] | None = None
    probabilistic: bool = False

    def specs(self, models: TinyModels) -> dict[str, DrafterSpec]:
        """Return the engine's drafters."""
        specs: dict[str, DrafterSpec] = dict(DEFAULT_DRAFTERS)
        if self.method:
            specs["learned"] = LearnedSpec(method=self.method, model=str(getattr(models, self.method)))
        if self.method and not self.probabilistic:
            specs["hybrid"] = HybridSpec(first="suffix", otherwise="learned", min_expected=0.5)
        return specs


DRAFTERS: dict[str, AuditedDrafter] = {
    "ngram": AuditedDrafter(name="ngram"),
    "suffix": AuditedDrafter(name="suffix"),
    "eagle": AuditedDrafter(name="learned", method="eagle"),
    "hybrid": AuditedDrafter(name="hybrid", method="eagle"),
    "eagle3": AuditedDrafter(name="learned", method="eagle3"),
    "draft_model": AuditedDrafter(name="learned", method="draft_model"),
    "draft_model-sampled": AuditedDrafter(name="learned", method="draft_model", probabilistic=True),
}
"""Drafters by their names in the audit. The last one samples its drafts; verification needs their probabilities."""


def cases(drafters: Sequence[str], *, fast: bool) -> list[AuditCase]:
    """Return the default audit: every pair of two factors' values occurs in some case; `fast`, every value does.

    Cases of one engine are adjacent.
    """
    sampled = _cases(drafters, DEPTHS, 1 if fast else 2)
    likeliest = [greedy(drafter, depth) for drafter, depth in product(drafters, (1, 8) if fast else DEPTHS)]
    return sorted(sampled + likeliest, key=lambda case: list(DRAFTERS).index(case.drafter))


def given_cases(drafter: str, depth: int | None) -> list[AuditCase]:
    """Return cases for given drafting, each other value once; a policy, for which depth is None, varies it itself."""
    by_the_policy = ("budgets", "switching") if depth is None else ()
    sampled = [case for case in _cases([drafter], [depth or 0], 1) if case.composition not in by_the_policy]
    return [*sampled, greedy(drafter, depth or 0)]


def _cases(drafters: Sequence[str], depths: Sequence[int], strength: int) -> list[AuditCase]:
    return [
        AuditCase(drafter=d, depth=k, sampling=Sampling(temperature=t, top_p=f[0], top_k=f[1]), composition=c)
        for d, k, t, f, c in covering([drafters, depths, TEMPERATURES, FILTERS, list(COMPOSITIONS)], strength)
    ]


def greedy(drafter: str, depth: int) -> AuditCase:
    return AuditCase(drafter=drafter, depth=depth, sampling=Sampling(temperature=0.0), composition="greedy")


def covering(factors: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Return few combinations of one value per factor that cover every `strength` values of different factors.

    >>> covering(["ab", "xyz"], 1)
    [('a', 'x'), ('b', 'y'), ('a', 'z')]
    """
    rows = list(product(*(range(len(values)) for values in factors)))
    pairs = {row: {tuple((f, row[f]) for f in at) for at in combinations(range(len(row)), strength)} for row in rows}
    missing = set().union(*pairs.values())
    used = [[0] * len(values) for values in factors]
    chosen = []
    while missing:
        # Most newly covered first; among equals the one with the least used values, so that all values are used.
        best = max(rows, key=lambda row: (len(pairs[row] & missing), -sum(used[f][v] for f, v in enumerate(row))))
        chosen.append(tuple(values[v] for values, v in zip(factors, best, strict=True)))
        missing -= pairs[best]
        for f, v in enumerate(best):
            used[f][v] += 1
    return chosen


def policy_of(case: AuditCase, drafting: AuditedDrafter, batch: int) -> Policy:
    """Return the policy of `case` on an engine with the drafters of `drafting`, at most `batch` requests running."""
    strategy = Strategy.chain(drafting.name, case.depth)
    if case.composition == "budgets":
        budget = AcceptanceBudgetSpec(min_tokens=0, max_draft_tokens=batch * 3 // 4)
        return Policy(selector=FixedSpec(strategy=strategy), budget=budget)
    if case.composition == "switching":
        second = next(name for name in DEFAULT_DRAFTERS if name != drafting.name)
        depths = sorted({case.depth, (case.depth + 1) // 2})
        arms = (*(Strategy.chain(drafting.name, d) for d in depths), Strategy.chain(second, case.depth), NO_SPECULATION)
        return Policy(selector=ExploreSpec(strategies=arms, hold_iterations=1))
    return Policy(selector=FixedSpec(strategy=strategy))


def tiny_drafters(policy: Policy, models: TinyModels) -> Mapping[str, DrafterSpec]:
    """Return the drafters that `policy` names, the learned one replaced by the audit's own of the same method."""
    specs: dict[str, DrafterSpec] = DEFAULT_DRAFTERS | policy.drafters
    for strategy in policy.strategies:
        if policy.registry.network_passes(strategy):
            specs.setdefault(strategy.drafter, LearnedSpec(method="eagle", model=str(models.eagle)))
    for name, spec in specs.items():
        if isinstance(spec, LearnedSpec):
            specs[name] = spec.model_copy(update={"model": str(getattr(models, spec.method))})
    return specs
