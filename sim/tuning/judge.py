"""Finalists on held-out RL steps: ratios with intervals, regret, and whether anything beats a fixed strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tltlab.arrays import Floats
from tltlab.policies.policy import Policy
from tltlab.sim.study.band import Band, Effect, InputErrors, Source, at_range_ends, effect, of_steps, with_overhead
from tltlab.stats import finite, paired_interval
from tltlab.strategy import Strategy

from .cases import ORACLE, TuningCase, TuningCases

ORDER = ("none", "fixed", "elastic", "table", "bandit", "own")
"""From simple to complicated: of policies that are equally good the first is taken."""
TUNED = ORDER[2:]


@dataclass(frozen=True, kw_only=True)
class Finalists:
    """Policies by name, what kind each is, and the fixed strategy (or none) that was best on the tuning steps."""

    policies: Mapping[str, Policy]
    kind_of: Mapping[str, str]
    best_fixed: str

    def scores(self, cases: TuningCases, *, seeds: Sequence[int], seed: int) -> dict[str, float]:
        """Scores of the candidates to choose from; tuned and fixed policies race separately."""
        tuned, simple = ({n: p for n, p in self.policies.items() if self.kind_of[n] in k} for k in (TUNED, ORDER[:2]))
        races = (cases.race(runners, seeds=seeds, seed=seed) for runners in (tuned, simple) if runners)
        return {name: score for race in races for name, score in race.items()}


@dataclass(frozen=True, kw_only=True)
class JudgedPolicy:
    """A finalist on the held-out steps.

    `acceptance` has in words what is granted to each of its `drafters`, of all traces where they differ. `ratio` of the
    objective to the best fixed strategy's with its 95 % interval, None where one RL step gives none; `regret` of the
    makespan to the clairvoyant bound, as in `compare`, None under a per-request budget.
    """

    name: str
    kind: str
    drafters: list[str]
    acceptance: dict[str, str]
    makespan_s: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    regret: float | None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The finalists on held-out RL steps as `candidates`, the fastest first, and the `name` of the one to take.

    The `champion` is the best of what is tuned, by its score on the tuning steps. `bands` are the 90 % ranges of its
    speed-up over the `best_fixed` strategy and over plain decoding, "none"; {} of one RL step, or without a champion.
    `bound_s` is the least of the clairvoyant bounds to which the candidates' regrets are.
    """

    name: str
    worth_it: bool
    verdict: str
    best_fixed: str
    champion: str
    bands: Mapping[str, Band]
    candidates: tuple[JudgedPolicy, ...]
    oracle_s: float
    bound_s: float


def judge(
    cases: TuningCases,
    finalists: Finalists,
    scores: Mapping[str, float],
    strategies: Sequence[Strategy],
    *,
    errors_of: Callable[[TuningCase, Sequence[Strategy]], InputErrors],
    seeds: Sequence[int],
    seed: int,
) -> Judged:
    """Compare the finalists in sampled mode; `scores` are theirs on the tuning steps, which name the champion.

    The champion is faster where its interval over the best fixed strategy lies below 1, and the range of that speed-up
    above 1, with what costs and acceptance may be wrong by (`errors_of` a case and strategies). Tuning is worth it
    where the range of its speed-up over plain decoding lies above 1 too. The policy to take is the simplest that a
    bootstrap of the RL steps does not distinguish from the best one: of all where the champion is faster, else of those
    not tuned. With few RL steps a bootstrap distinguishes too readily, which here only favours the faster policy.
    """
    makespans = cases.makespans(finalists.policies, mode="sampled", seeds=seeds, oracle=strategies)
    oracle_s = cases.mean_s(makespans.pop(ORACLE))
    bound_s = math.inf
    plain, fixed = makespans["none"], finalists.best_fixed
    rows = []
    for name, seconds in makespans.items():
        interval = cases.ratio(seconds, makespans[fixed], plain, seed=seed)
        makespan_s, bounds_s = cases.mean_s(seconds), cases.bounds_s(finalists.policies[name])
        if bounds_s is not None:
            bound_s = min(bound_s, float(bounds_s.mean()))
        rows.append(
            JudgedPolicy(
                name=name,
                kind=finalists.kind_of[name],
                **cases.granted(finalists.policies[name]),
                makespan_s=makespan_s,
                ratio=interval.estimate,
                ratio_low=finite(interval.low),
                ratio_high=finite(interval.high),
                regret=None if bounds_s is None or not bounds_s.any() else makespan_s / float(bounds_s.mean()) - 1.0,
            )
        )
    by_name = {row.name: row for row in rows}
    eligible = [name for name in makespans if finalists.kind_of[name] in ORDER]
    tuned = [name for name in eligible if finalists.kind_of[name] in TUNED]
    champion = min(tuned, key=lambda n: scores[n]) if tuned else fixed
    high = by_name[champion].ratio_high
    bands = {}
    if champion != fixed and high is not None:
        used = {name: finalists.policies[name] for name in dict.fromkeys((champion, fixed, "none"))}
        bands = _bands(cases, used, makespans, errors_of, seeds=seeds, seed=seed)
    is_faster = bool(bands) and high is not None and high < 1.0 and not bands[fixed].loses
    worth_it = is_faster and not bands["none"].loses
    if not is_faster:
        eligible = [name for name in eligible if finalists.kind_of[name] not in TUNED]
    best = champion if is_faster else min(eligible, key=lambda n: scores[n])
    level = [n for n in eligible if _reaches(cases, makespans[n], makespans[best], plain, seed) or n == best]
    name = min(level, key=lambda n: (ORDER.index(finalists.kind_of[n]), scores[n]))
    return Judged(
        name=name,
        worth_it=worth_it,
        verdict=_verdict(by_name[champion], bands, fixed, name, worth_it, robust=cases.robust),
        best_fixed=fixed,
        champion=champion,
        bands=bands,
        candidates=tuple(sorted(rows, key=lambda row: row.makespan_s)),
        oracle_s=oracle_s,
        bound_s=bound_s,
    )


def _reaches(
    cases: TuningCases, seconds: Sequence[Floats], best: Sequence[Floats], plain: Sequence[Floats], seed: int
) -> bool:
    """Return True if a policy may be as good as the best one; a single pair has no interval, so it must be as good."""
    interval = cases.ratio(seconds, best, plain, seed=seed, paired=paired_interval)
    return (interval.estimate if math.isnan(interval.low) else interval.low) <= 1.0


def _bands(
    cases: TuningCases,
    policies: Mapping[str, Policy],
    makespans: Mapping[str, Sequence[Floats]],
    errors_of: Callable[[TuningCase, Sequence[Strategy]], InputErrors],
    *,
    seeds: Sequence[int],
    seed: int,
) -> dict[str, Band]:
    """Ranges of the speed-up of the first of these policies over each of the others, over the nominal cases."""
    champion, *others = policies
    nominal = replace(cases, cases=cases.nominal, robust=False)
    strategies = [s for policy in policies.values() for s in policy.strategies]
    errors = [errors_of(case, strategies) for case in nominal.cases]
    ends = [at_range_ends(case.scenario, error) for case, error in zip(nominal.cases, errors, strict=True)]
    for case, error, found in zip(nominal.cases, errors, ends, strict=True):
        found["costs"] += with_overhead(case.scenario, strategies, error.speed_up)

    def seconds(source: Source, end: int) -> dict[str, list[Floats]]:
        """Simulate every case at one end of an input's range, under one seed."""
        moved = [
            replace(case, scenario=found[source][end]) if end < len(found[source]) else case
            for case, found in zip(nominal.cases, ends, strict=True)
        ]
        return replace(nominal, cases=tuple(moved)).makespans(policies, mode="sampled", seeds=seeds[:1])

    def ratio(found: Mapping[str, Sequence[Floats]], other: str) -> float:
        return float(np.concatenate(found[other]).sum() / np.concatenate(found[champion]).sum())

    same_seed = nominal.makespans(policies, mode="sampled", seeds=seeds[:1])
    nums = {source: max(len(found[source]) for found in ends) for source in ends[0]}
    at = {source: [seconds(source, end) for end in range(num)] for source, num in nums.items() if num}
    judged = {
        name: [row for case, row in zip(cases.cases, makespans[name], strict=True) if case in nominal.cases]
        for name in policies
    }
    bands = {}
    for other in others:
        effects: dict[Source, Effect] = {
            source: effect(ratio(same_seed, other), [ratio(found, other) for found in both])
            for source, both in at.items()
        }
        if "acceptance" not in at:
            # Replayed acceptance is the same for both policies: only plain decoding does not depend on it.
            drafts = any(s.speculates for s in policies[other].strategies)
            effects["acceptance"] = (0.0, 0.0) if drafts else errors[0].of_tokens()
        rows = (np.concatenate(judged[name]) for name in (other, champion))
        effects["lengths"] = of_steps(*rows, seed=seed)
        bands[other] = Band(estimate=ratio(judged, other), effects=effects)
    return bands


def _verdict(
    row: JudgedPolicy, bands: Mapping[str, Band], fixed: str, choice: str, worth_it: bool, *, robust: bool
) -> str:
    if row.name == fixed:
        return f"there was nothing to tune; take {choice}"
    if row.ratio_low is None or row.ratio_high is None:
        return (
            f"one RL step to judge on gives no interval, so tuning is not shown to be worth it: the speed-up of "
            f"{row.name} over {fixed} is {1 / row.ratio:.2f}x (simulated); take {choice}"
        )
    comparison = f"on held-out RL steps the speed-up of {row.name} over {fixed} is {bands[fixed]}"
    comparison += f", in the worst case {1 / row.ratio:.2f}x" if robust else ""
    comparison += "" if fixed == "none" else f", over plain decoding {bands['none']}"
    comparison += " (simulated)"
    if not worth_it:
        slower = "none" in bands and bands["none"].loses and not bands[fixed].loses
        first = ", and measure it first: a slowdown is within the range" if slower else ""
        return f"not worth it: {comparison}; take {choice}{first}"
    return f"worth it: {comparison}" + ("" if choice == row.name else f"; {choice} is simpler and within noise of it")
