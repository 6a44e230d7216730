"""Cases for tuning and judging a policy: RL steps of one or several traces, under costs that are right or off."""

from __future__ import annotations

import math
import pickle
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from tltlab.acceptance.base import Scaled
from tltlab.arrays import Floats
from tltlab.costs.scaled import ScaledCosts
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy, load_policy
from tltlab.sim.study.jobs import ALONE_S, side_by_side
from tltlab.sim.study.sample import spread
from tltlab.sim.scenario import Scenario
from tltlab.stats import Interval, paired_ratio
from tltlab.strategy import Strategy

from .oracle import oracle_policy

ORACLE = "per-iteration oracle"
LEVEL = 1e-3
"""Policies whose scores differ by less than this share need no more seeds."""
_PLAIN = {"none": load_policy("none")}


@dataclass(kw_only=True)
class Processes:
    """The processes of a tuning: `jobs` of them (None: one per core), from when it has worked for `ALONE_S` on."""

    jobs: int | None = 1
    worked_s: float = 0.0

    def run(self, tasks: Sequence[Callable[[], Floats]]) -> list[Floats]:
        """Results in the order of the tasks."""
        began = time.perf_counter()
        with warnings.catch_warnings():
            # joblib replaces a process whose memory has grown by 300 MB, as long rollouts do; no task is lost.
            warnings.filterwarnings("ignore", "A worker stopped while", UserWarning)
            results = list(side_by_side(tasks, jobs=self.jobs, running=self.worked_s > ALONE_S))
        self.worked_s += time.perf_counter() - began
        return results


class _Once:
    """A scenario that a process unpickles once, however many of its tasks have it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    @cached_property
    def _pickled(self) -> bytes:
        from joblib.externals.loky.backend.reduction import dumps

        return bytes(dumps(self.scenario))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._pickled,)


@lru_cache(maxsize=16)
def _received(pickled: bytes) -> _Once:
    return _Once(pickle.loads(pickled))


def _makespans(once: _Once, policy: Policy, mode: str, seed: int, delay: int | None) -> Floats:
    scenario = replace(once.scenario, mode=mode, seed=seed)
    return np.array([rollout.makespan_s for rollout in scenario.each_rollout(policy, delay=delay)])


@dataclass(frozen=True, kw_only=True)
class TuningCase:
    """RL steps of the `trace`-th trace under one assumption about costs and acceptance."""

    name: str
    trace: int
    scenario: Scenario

    @cached_property
    def once(self) -> _Once:
        return _Once(self.scenario)

    def some(self, num: int) -> TuningCase:
        """The case with so many of its RL steps, spread over them."""
        at = spread(range(len(self.scenario.steps)), num)
        steps, queues = tuple(self.scenario.steps[i] for i in at), tuple(self.scenario.queues[i] for i in at)
        return replace(self, scenario=replace(self.scenario, steps=steps, queues=queues))

    def perturbed(self, error: float, drafters: tuple[str, ...]) -> list[TuningCase]:
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
            off = ScaledCosts.wrapping(costs, level=2.0 - dearer, speculative=dearer / (2.0 - dearer))
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
        for columns, _ in (rollout.columns() for rollout in fluid.each_rollout(load_policy("none"))):
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
    processes: Processes = field(default_factory=Processes, compare=False)

    @property
    def objective(self) -> str:
        if self.robust:
            return f"largest ratio to plain decoding over {len(self.cases)} cases, simulated"
        return "mean makespan of the RL steps, simulated"

    @property
    def nominal(self) -> tuple[TuningCase, ...]:
        """One case per trace, under the costs as they were given."""
        return tuple({case.trace: case for case in reversed(self.cases)}.values())[::-1]

    def some(self, share: float, least: int) -> TuningCases:
        """This share of each case's RL steps, `least` or more, spread over them."""
        chosen = [case.some(max(least, math.ceil(share * len(case.scenario.steps)))) for case in self.cases]
        return replace(self, cases=tuple(chosen))

    def granted(self, policy: Policy) -> dict[str, Any]:
        """The policy's `drafters` and the `acceptance` of each in words: `Scenario.granted` of all traces."""
        rows = [case.scenario.granted(policy.strategies) for case in self.nominal]
        texts = {name: dict.fromkeys(row["acceptance"][name] for row in rows) for name in rows[0]["drafters"]}
        return {"drafters": rows[0]["drafters"], "acceptance": {name: " / ".join(text) for name, text in texts.items()}}

    def makespans(
        self, policies: Mapping[str, Policy], *, mode: str, seeds: Sequence[int], oracle: Sequence[Strategy] = ()
    ) -> dict[str, list[Floats]]:
        """Simulate every policy in every case; the mean over seeds, which all policies share.

        With strategies of an `oracle` also `ORACLE`, which knows each case's costs and whose choices hold at once.
        """
        runs: list[tuple[str, TuningCase, Policy, int | None]] = []
        for case in self.cases:
            # The last ones learn and take longest: they are begun first.
            runs += [(name, case, policies[name], None) for name in reversed(list(policies))]
            if oracle:
                runs.insert(0, (ORACLE, case, oracle_policy(case.scenario, oracle), 0))
        tasks = [
            partial(_makespans, case.once, policy, mode, seed, delay)
            for _, case, policy, delay in runs
            for seed in seeds
        ]
        each = self.processes.run(tasks)
        seconds: dict[str, list[Floats]] = {name: [] for name in policies}
        for at, (name, *_) in enumerate(runs):
            seconds.setdefault(name, []).append(np.mean(each[at * len(seeds) : (at + 1) * len(seeds)], axis=0))
        return seconds

    def race(self, policies: Mapping[str, Policy], *, seeds: Sequence[int], seed: int) -> dict[str, float]:
        """Scores of policies in sampled mode, relative to the best one's, over as many of the `seeds` as that takes.

        After each seed, policies whose interval over the leader lies above 1 are dropped. The race ends when the others
        are `LEVEL` with the leader. A dropped policy is compared with the leader's runs under the same seeds.
        """
        if not policies:
            return {}
        runs: dict[str, list[list[Floats]]] = defaultdict(list)
        running, leader = list(policies), ""

        def mean(name: str, count: int) -> list[Floats]:
            return [np.mean(rows, axis=0) for rows in zip(*runs[name][:count], strict=True)]

        for count, each in enumerate(seeds, 1):
            chosen = _PLAIN | {name: policies[name] for name in running}
            for name, rows in self.makespans(chosen, mode="sampled", seeds=[each]).items():
                runs[name].append(rows)
            plain = mean("none", count)
            leader = min(running, key=lambda name: self.score(mean(name, count), plain))
            over = {
                name: self.ratio(mean(name, count), mean(leader, count), plain, seed=seed)
                for name in running
                if name != leader
            }
            running = [name for name in running if name == leader or not over[name].low > 1.0]
            if all(over[name].high <= 1.0 + LEVEL for name in running if name != leader):
                break
        return {
            name: self.score(mean(name, n), mean("none", n)) / self.score(mean(leader, n), mean("none", n))
            for name in policies
            for n in [len(runs[name])]
        }

    def bound_s(self, strategies: Sequence[Strategy]) -> float:
        """The clairvoyant lower bound of a nominal RL step's makespan where every request gains what is expected.

        It is for costs without noise, and a sampled rollout may undercut it by chance; a bound that no sample can
        undercut would be too loose to be of use.
        """
        bounds_s = [replace(case.scenario, mode="fluid").bounds_s(strategies) for case in self.nominal]
        return float(np.mean(np.concatenate(bounds_s)))

    def mean_s(self, seconds: Sequence[Floats]) -> float:
        """Seconds of a nominal RL step on average."""
        chosen = [row for case, row in zip(self.cases, seconds, strict=True) if case in self.nominal]
        return float(np.concatenate(chosen).mean())

    def score(self, seconds: Sequence[Floats], plain: Sequence[Floats]) -> float:
        """Objective that tuning minimises."""
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
