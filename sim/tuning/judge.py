"""Finalists on held-out RL steps: ratios with intervals, regret, and whether anything beats a fixed strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tltlab.arrays import Floats
from tltlab.policies.policy import Policy
from tltlab.stats import finite, paired_interval
from tltlab.strategy import Strategy

from .cases import ORACLE, TuningCases

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
        """Scores of those that may be taken: of what is tuned, and of what is not, each by a race of its own."""
        tuned, simple = ({n: p for n, p in self.policies.items() if self.kind_of[n] in k} for k in (TUNED, ORDER[:2]))
        races = (cases.race(runners, seeds=seeds, seed=seed) for runners in (tuned, simple) if runners)
        return {name: score for race in races for name, score in race.items()}


@dataclass(frozen=True, kw_only=True)
class JudgedPolicy:
    """A finalist on the held-out steps.

    `acceptance` has in words what is granted to each of its `drafters`, of all traces where they differ. `ratio` of the
    objective to the best fixed strategy's with its 95 % interval, None where one RL step gives none; `regret` of the
    makespan to the per-iteration oracle, `regret_to_bound` to the clairvoyant bound.
    """

    name: str
    kind: str
    drafters: list[str]
    acceptance: dict[str, str]
    makespan_s: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    regret: float
    regret_to_bound: float | None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The finalists on held-out RL steps as `candidates`, the fastest first, and the `name` of the one to take.

    The `champion` is the best of what is tuned, by its score on the tuning steps.
    """

    name: str
    worth_it: bool
    verdict: str
    best_fixed: str
    champion: str
    candidates: tuple[JudgedPolicy, ...]
    oracle_s: float
    bound_s: float


def judge(
    cases: TuningCases,
    finalists: Finalists,
    scores: Mapping[str, float],
    strategies: Sequence[Strategy],
    *,
    seeds: Sequence[int],
    seed: int,
) -> Judged:
    """Compare the finalists in sampled mode; `scores` are theirs on the tuning steps, which name the champion.

    Tuning is worth it where the champion's interval over the best fixed strategy lies below 1. The policy to take is
    the simplest that a bootstrap of the RL steps does not tell from the best one: of all where it is worth it, else of
    those not tuned. From few RL steps a bootstrap tells apart too readily, which here only favours the faster policy.
    """
    makespans = cases.makespans(finalists.policies, mode="sampled", seeds=seeds, oracle=strategies)
    oracle_s, bound_s = cases.mean_s(makespans.pop(ORACLE)), cases.bound_s(strategies)
    plain, fixed = makespans["none"], finalists.best_fixed
    rows = []
    for name, seconds in makespans.items():
        interval = cases.ratio(seconds, makespans[fixed], plain, seed=seed)
        makespan_s = cases.mean_s(seconds)
        rows.append(
            JudgedPolicy(
                name=name,
                kind=finalists.kind_of[name],
                **cases.granted(finalists.policies[name]),
                makespan_s=makespan_s,
                ratio=interval.estimate,
                ratio_low=finite(interval.low),
                ratio_high=finite(interval.high),
                regret=makespan_s / oracle_s - 1.0,
                regret_to_bound=makespan_s / bound_s - 1.0 if bound_s > 0 else None,
            )
        )
    by_name = {row.name: row for row in rows}
    eligible = [name for name in makespans if finalists.kind_of[name] in ORDER]
    tuned = [name for name in eligible if finalists.kind_of[name] in TUNED]
    champion = min(tuned, key=lambda n: scores[n]) if tuned else fixed
    high = by_name[champion].ratio_high
    worth_it = champion != fixed and high is not None and high < 1.0
    if not worth_it:
        eligible = [name for name in eligible if finalists.kind_of[name] not in TUNED]
    best = champion if worth_it else min(eligible, key=lambda n: scores[n])
    level = [n for n in eligible if _reaches(cases, makespans[n], makespans[best], plain, seed) or n == best]
    name = min(level, key=lambda n: (ORDER.index(finalists.kind_of[n]), scores[n]))
    return Judged(
        name=name,
        worth_it=worth_it,
        verdict=_verdict(by_name, champion, fixed, name, worth_it, "worst case" if cases.robust else "time"),
        best_fixed=fixed,
        champion=champion,
        candidates=tuple(sorted(rows, key=lambda row: row.makespan_s)),
        oracle_s=oracle_s,
        bound_s=bound_s,
    )


def _reaches(
    cases: TuningCases, seconds: Sequence[Floats], best: Sequence[Floats], plain: Sequence[Floats], seed: int
) -> bool:
    """Whether a policy may be as good as the best one; with a single pair there is no telling, so only if it is."""
    interval = cases.ratio(seconds, best, plain, seed=seed, paired=paired_interval)
    return (interval.estimate if math.isnan(interval.low) else interval.low) <= 1.0


def _verdict(
    rows: Mapping[str, JudgedPolicy], champion: str, fixed: str, choice: str, worth_it: bool, measure: str
) -> str:
    row = rows[champion]
    if champion == fixed:
        return f"there was nothing to tune; take {choice}"
    if row.ratio_low is None or row.ratio_high is None:
        return (
            f"one RL step to judge on gives no interval, so tuning is not shown to be worth it: the {measure} of "
            f"{champion} is {row.ratio:.3f} times that of {fixed} (simulated); take {choice}"
        )
    comparison = (
        f"on held-out RL steps the {measure} of {champion} is {row.ratio:.3f} [{row.ratio_low:.3f}, "
        f"{row.ratio_high:.3f}] times that of {fixed} (simulated)"
    )
    if not worth_it:
        return f"not worth it: {comparison}; take {choice}"
    return f"worth it: {comparison}" + ("" if choice == champion else f"; {choice} is simpler and within noise of it")
