"""What a policy is tuned and judged on: RL steps of one or several traces, under costs that are right or off."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tltlab.arrays import Floats
from tltlab.costs.scaled import ScaledCosts
from tltlab.errors import ConfigError
from tltlab.policies.policy import load_policy
from tltlab.sim.scenario import PolicyLike, Scenario
from tltlab.sim.sensitivity import ScaledChances
from tltlab.sim.sweep import sweep
from tltlab.stats import Interval, paired_interval, student_margin
from tltlab.strategy import Strategy

from .oracle import OraclePolicy

ORACLE = "oracle"
ENOUGH_STEPS = 10
"""From fewer RL steps a bootstrap's interval is too narrow: of two steps it is just what lies between them."""
_RESAMPLES = 2000
_LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class TuningCase:
    """RL steps of the `trace`-th trace under one assumption about costs and acceptance."""

    name: str
    trace: int
    scenario: Scenario

    def off_by(self, error: float, drafters: tuple[str, ...]) -> list[TuningCase]:
        """The same steps with the costs of speculation and of plain decoding, and chances of these drafters, off.

        Each by this share, the costs either way in turn. Where both costs err alike nothing changes relative to plain
        decoding, so those cases are left out. Raises ConfigError where acceptance is replayed.
        """
        costs, known = self.scenario.costs, self.scenario.acceptance
        assert known is not None
        if known.varies_by == "position":
            raise ConfigError("a cost error needs an acceptance model, such as a fitted one or geometric:ALPHA")
        cases = []
        for how, dearer in (("cheaper", 1.0 - error), ("dearer", 1.0 + error)):
            off = ScaledCosts.around(costs, level=2.0 - dearer, speculative=dearer / (2.0 - dearer))
            for word, accepted in (("less", 1.0 - error), ("more", 1.0 + error)):
                scenario = replace(self.scenario, costs=off, acceptance=ScaledChances(known, drafters, accepted))
                name = f"{self.name}: speculation {how} than thought, {word} accepted"
                cases.append(TuningCase(name=name, trace=self.trace, scenario=scenario))
        return cases

    def batch_times(self) -> dict[int, tuple[float, float]]:
        """By batch size: plain iterations per RL step that workers spend at it, and their mean context."""
        times: dict[int, float] = defaultdict(float)
        contexts: dict[int, float] = defaultdict(float)
        fluid = replace(self.scenario, mode="fluid")
        for columns in (log.columns for r in fluid.rollouts(load_policy("none")) for log in r.logs):
            n, b = columns.num_iterations, columns.batch
            middle = columns.context_tokens + b * (n - 1) / 2
            for batch, count, context in zip(b.tolist(), n.tolist(), (n * middle).tolist(), strict=True):
                times[batch] += count
                contexts[batch] += context
        steps = len(self.scenario.steps)
        return {b: (times[b] / steps, contexts[b] / times[b]) for b in sorted(times)}


Makespans = Mapping[str, list[Floats]]
"""Seconds per policy, case and RL step."""


@dataclass(frozen=True, kw_only=True)
class TuningCases:
    """Cases that count together: their mean, or (`robust`) the worst of them relative to plain decoding."""

    cases: tuple[TuningCase, ...]
    robust: bool

    @property
    def objective(self) -> str:
        """The score in words."""
        if self.robust:
            return f"largest ratio to plain decoding over {len(self.cases)} cases, simulated"
        return "mean makespan of the RL steps, simulated"

    @property
    def nominal(self) -> tuple[TuningCase, ...]:
        """One case per trace, under the costs as they were given."""
        return tuple({case.trace: case for case in reversed(self.cases)}.values())[::-1]

    def makespans(
        self, policies: Mapping[str, PolicyLike], *, mode: str, seeds: Sequence[int], jobs: int = 1
    ) -> dict[str, list[Floats]]:
        """Simulate every policy in every case; the mean over seeds, which all policies share."""
        seconds: dict[str, list[Floats]] = {name: [] for name in policies}
        for case in self.cases:
            tables = [
                sweep(replace(case.scenario, mode=mode, seed=seed), policies, jobs=jobs)["makespan_s"].to_numpy()
                for seed in seeds
            ]
            each = np.mean(tables, axis=0).reshape(len(policies), -1)
            for name, row in zip(policies, each, strict=True):
                seconds[name].append(row)
        return seconds

    def oracle(self, strategies: Sequence[Strategy], *, mode: str, seeds: Sequence[int]) -> list[Floats]:
        """Makespans of the per-iteration oracle, which knows each case's costs."""
        seconds = []
        for case in self.cases:
            policy = {ORACLE: OraclePolicy(case.scenario, strategies)}
            seconds += TuningCases(cases=(case,), robust=False).makespans(policy, mode=mode, seeds=seeds)[ORACLE]
        return seconds

    def bound_s(self, strategies: Sequence[Strategy]) -> float:
        """The clairvoyant lower bound of a nominal RL step's makespan where every request gains what is expected.

        It is for costs without noise, and luck may undercut it; a bound that no luck can undercut says next to nothing.
        """
        bounds_s = [replace(case.scenario, mode="fluid").bounds_s(strategies) for case in self.nominal]
        return float(np.mean(np.concatenate(bounds_s)))

    def mean_s(self, seconds: Sequence[Floats]) -> float:
        """Seconds of a nominal RL step on average."""
        chosen = [row for case, row in zip(self.cases, seconds, strict=True) if case in self.nominal]
        return float(np.concatenate(chosen).mean())

    def score(self, seconds: Sequence[Floats], plain: Sequence[Floats]) -> float:
        """What tuning minimises."""
        if not self.robust:
            return float(np.concatenate(seconds).mean())
        return max(float(a.sum() / b.sum()) for a, b in zip(seconds, plain, strict=True))

    def ratio(
        self, seconds: Sequence[Floats], reference: Sequence[Floats], plain: Sequence[Floats], *, seed: int
    ) -> Interval:
        """Score of one policy over another's with its 95 % interval over the RL steps.

        From `ENOUGH_STEPS` RL steps on (robust: of each trace) as `resampled`. From fewer, Student's t for the
        logarithm of the ratio, its spread by the delta method; robust, with each policy's worst case held. One RL step
        gives no interval.
        """
        lengths = [len(row) for row in seconds]
        if (min(lengths) if self.robust else sum(lengths)) >= ENOUGH_STEPS:
            return self.resampled(seconds, reference, plain, seed=seed)
        parts: dict[int, Floats] = {}
        if self.robust:
            for sign, rows in ((1.0, seconds), (-1.0, reference)):
                worst = max(range(len(rows)), key=lambda i: float(rows[i].sum() / plain[i].sum()))
                trace = self.cases[worst].trace
                parts[trace] = parts.get(trace, np.zeros(1)) + sign * (_around(rows[worst]) - _around(plain[worst]))
        else:
            parts[0] = _around(np.concatenate(seconds)) - _around(np.concatenate(reference))
        estimate = self.score(seconds, plain) / self.score(reference, plain)
        fewest = min(map(len, parts.values()))
        if fewest == 1:
            return Interval(estimate=estimate, low=math.nan, high=math.nan, level=_LEVEL, method="none")
        spread = math.sqrt(sum(float(part.var(ddof=1)) / len(part) for part in parts.values()))
        factor = math.exp(student_margin(spread, fewest - 1, _LEVEL))
        return Interval(estimate=estimate, low=estimate / factor, high=estimate * factor, level=_LEVEL, method="t")

    def resampled(
        self, seconds: Sequence[Floats], reference: Sequence[Floats], plain: Sequence[Floats], *, seed: int
    ) -> Interval:
        """The ratio's bootstrap interval, however few the RL steps are.

        BCa of paired steps (`paired_interval`). Robust, each policy has its own worst case: steps are resampled within
        each trace, alike for all its cases and both policies, and the interval is that of percentiles.
        """
        rng = np.random.default_rng(seed)
        if not self.robust:
            return paired_interval(np.concatenate(seconds), np.concatenate(reference), level=_LEVEL, rng=rng)
        estimate = self.score(seconds, plain) / self.score(reference, plain)
        lengths = {case.trace: len(row) for case, row in zip(self.cases, seconds, strict=True)}
        if max(lengths.values()) == 1:
            return Interval(estimate=estimate, low=math.nan, high=math.nan, level=_LEVEL, method="none")
        chosen = {trace: rng.integers(n, size=(_RESAMPLES, n)) for trace, n in lengths.items()}
        at = [chosen[case.trace] for case in self.cases]
        base = [b[i].sum(axis=1) for b, i in zip(plain, at, strict=True)]
        first, second = (
            np.max([a[i].sum(axis=1) / b for a, i, b in zip(rows, at, base, strict=True)], axis=0)
            for rows in (seconds, reference)
        )
        tail = (1.0 - _LEVEL) / 2.0
        low, high = map(float, np.quantile(first / second, [tail, 1.0 - tail]))
        return Interval(estimate=estimate, low=low, high=high, level=_LEVEL, method="percentile")


def _around(seconds: Floats) -> Floats:
    """What each RL step adds to the logarithm of the mean."""
    deviations: Floats = seconds / seconds.mean() - 1.0
    return deviations
