"""What a policy is tuned and judged on: RL steps of one or several traces, under costs that are right or off."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tltlab.acceptance.base import Scaled
from tltlab.arrays import Floats
from tltlab.costs.scaled import ScaledCosts
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy, load_policy
from tltlab.sim.comparison.sweep import sweep
from tltlab.sim.scenario import Scenario
from tltlab.stats import Interval, paired_ratio
from tltlab.strategy import Strategy

from .oracle import oracle_policy


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
                scenario = replace(self.scenario, costs=off, acceptance=Scaled(known, drafters, accepted))
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

    def granted(self, policy: Policy) -> dict[str, Any]:
        """The policy's `drafters` and the `acceptance` of each in words: `Scenario.granted` of all traces."""
        rows = [case.scenario.granted(policy.strategies) for case in self.nominal]
        texts = {name: dict.fromkeys(row["acceptance"][name] for row in rows) for name in rows[0]["drafters"]}
        return {"drafters": rows[0]["drafters"], "acceptance": {name: " / ".join(text) for name, text in texts.items()}}

    def makespans(
        self, policies: Mapping[str, Policy], *, mode: str, seeds: Sequence[int], jobs: int = 1
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
        """Makespans of the per-iteration oracle, which knows each case's costs and whose choices hold at once."""
        seconds: list[Floats] = []
        for case in self.cases:
            policy = oracle_policy(case.scenario, strategies)
            seeded = (replace(case.scenario, mode=mode, seed=seed).rollouts(policy, delay=0) for seed in seeds)
            seconds.append(np.mean([[rollout.makespan_s for rollout in rollouts] for rollouts in seeded], axis=0))
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
        self,
        seconds: Sequence[Floats],
        reference: Sequence[Floats],
        plain: Sequence[Floats],
        *,
        seed: int,
        paired: Callable[..., Interval] = paired_ratio,
    ) -> Interval:
        """Score of one policy over another's with its 95 % interval over the RL steps, by `paired`.

        Robust, each policy has its own worst case. With both in the first one's the ratio would be no smaller, with
        both in the second one's no larger, so it lies within the outer ends of these two intervals. One RL step gives
        no interval.
        """
        rng = np.random.default_rng(seed)
        if not self.robust:
            return paired(np.concatenate(seconds), np.concatenate(reference), rng=rng)
        estimate = self.score(seconds, plain) / self.score(reference, plain)
        own, other = (
            max(range(len(rows)), key=lambda i: float(rows[i].sum() / plain[i].sum())) for rows in (seconds, reference)
        )
        above, below = (paired(seconds[i], reference[i], rng=rng) for i in (own, other))
        if "none" in (above.method, below.method):
            return replace(above, estimate=estimate, low=math.nan, high=math.nan, method="none")
        return replace(above, estimate=estimate, low=below.low)
