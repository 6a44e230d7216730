"""Cases for tuning and judging a policy, RL steps of one or several traces; and the per-iteration oracle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tltlab.acceptance.base import Acceptance
from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.selector import Selector
from tltlab.policies.specs import CustomSpec, FixedSpec
from tltlab.records import Json, frozen
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.band import InputErrors
from tltlab.sim.study.sample import spread
from tltlab.sim.study.study import Cell, Study
from tltlab.state import StepState
from tltlab.stats import Interval, paired_ratio
from tltlab.strategy import NO_SPECULATION, Strategy, drafters_of
from tltlab.traces.trace import Trace

BUCKET_TOKENS = 512
"""Width of the bins of a request's context, tokens."""


class ExpectedIteration:
    """Seconds and tokens that an iteration of a strategy is expected to take and to bring, at a batch and a context.

    Acceptance by context is taken at the batch's mean context. Where acceptance differs between requests otherwise or
    is replayed, tokens are the mean of a simulation under that strategy alone; a learned drafter is taken as fresh as
    it is at first.
    """

    def __init__(self, scenario: Scenario, strategies: Sequence[Strategy]):
        self.strategies = tuple(dict.fromkeys((NO_SPECULATION, *strategies)))
        model = None if scenario.acceptance is None else scenario.acceptance.in_state({})
        self._model = None if model is None else model.within(scenario.longest_context_tokens)
        self._regimes = Regimes(self.strategies, scenario.costs, self._model, scenario.registry)
        self._means: dict[Strategy, float] = {}
        self._at_context: dict[int, Acceptance] = {}
        if self._model is None or self._model.at_context(0.0).varies_by != "nothing":
            self._means = {s: _mean_tokens(scenario, s) for s in self.strategies if s.speculates}

    def tokens(self, strategy: Strategy, batch: int, context_tokens: float) -> float:
        """Tokens of one request in one iteration, the bonus token included; `context_tokens` sums over the batch."""
        if (mean := self._means.get(strategy)) is not None:
            return mean
        if self._model is None or self._model.varies_by == "nothing" or not strategy.speculates:
            return self._regimes.at(strategy, batch).tokens
        at = round(context_tokens / batch / BUCKET_TOKENS)
        if at not in self._at_context:
            self._at_context[at] = self._model.at_context(float(at * BUCKET_TOKENS))
        return self._at_context[at].at(batch).tokens_per_iteration(strategy)

    def seconds_per_token(self, strategy: Strategy, batch: int, context_tokens: float) -> float:
        """Seconds of an iteration for each token that a request gains in it; `context_tokens` sums over the batch."""
        cost = self._regimes.at(strategy, batch).cost
        return cost.seconds(batch, context_tokens) / self.tokens(strategy, batch, context_tokens)


class Oracle(Selector):
    """Chooses at every iteration the strategy with the least expected seconds per token, by `ExpectedIteration`.

    It knows the true costs and acceptance, batch and context, but not the random numbers to come. Regret is measured
    against the oracle where the clairvoyant bound is too loose. It ignores the effect of an iteration on later ones;
    for one worker whose strategies gain alike at every batch, that loses nothing.
    """

    def __init__(self, expected: ExpectedIteration):
        self.strategies = expected.strategies
        self._expected = expected

    def choose(self, state: StepState) -> Strategy:
        batch, context = state.batch, state.context_tokens
        return min(self.strategies, key=lambda s: self._expected.seconds_per_token(s, batch, context))


def oracle_policy(scenario: Scenario, strategies: Sequence[Strategy]) -> Policy:
    """The oracle as a policy of the simulator; it has no file, since no run knows the truth.

    >>> scenario.rollouts(oracle_policy(scenario, strategies))  # doctest: +SKIP
    """
    if scenario.acceptance is None and drafters_of(strategies):
        raise ConfigError("the oracle needs an acceptance model to know what speculation brings")
    expected = ExpectedIteration(scenario, strategies)
    return Policy(selector=CustomSpec.holding(lambda: Oracle(expected)))


def _mean_tokens(scenario: Scenario, strategy: Strategy) -> float:
    policy = Policy(selector=FixedSpec(strategy=strategy))
    result, _ = Cell(name=str(strategy), policy=policy, scenario=scenario).simulate()
    return max(1.0, result.mean_accept_length or 1.0)


ORACLE = "per-iteration oracle"


def batch_times(scenario: Scenario) -> dict[int, tuple[float, float]]:
    """By batch size: plain iterations per RL step that workers spend at it, and their mean context."""
    times: dict[int, float] = defaultdict(float)
    contexts: dict[int, float] = defaultdict(float)
    fluid = replace(scenario, mode="fluid")
    for columns, _ in (rollout.columns() for rollout in fluid.each_rollout(load_policy("none"))):
        n, b = columns.num_iterations, columns.batch
        middle = columns.context_tokens + b * (n - 1) / 2
        for batch, count, context in zip(b.tolist(), n.tolist(), (n * middle).tolist(), strict=True):
            times[batch] += count
            contexts[batch] += context
    steps = len(scenario.steps)
    return {b: (times[b] / steps, contexts[b] / times[b]) for b in sorted(times)}


@frozen
class TuningCases:
    """RL steps of one or several traces, a scenario for each trace, that count together by their mean.

    `recorded` if the traces have the acceptance.
    """

    scenarios: tuple[Scenario, ...]
    traces: Sequence[Trace] = ()
    recorded: bool = False
    jobs: int | None = 1

    def errors(self, strategies: Sequence[Strategy]) -> list[InputErrors]:
        """Errors of the inputs of each trace's scenario, where these strategies run."""
        pairs = zip(self.scenarios, self.traces, strict=True)
        return [InputErrors.of(scenario, strategies, trace, recorded=self.recorded) for scenario, trace in pairs]

    def half(self) -> TuningCases:
        """Half of each trace's RL steps, two or more, spread over them."""
        chosen = []
        for each in self.scenarios:
            at = spread(range(len(each.steps)), max(2, math.ceil(len(each.steps) / 2)))
            steps = tuple(each.steps[i] for i in at)
            chosen.append(replace(each, steps=steps, queues=tuple(each.queues[i] for i in at)))
        return replace(self, scenarios=tuple(chosen))

    def granted(self, policy: Policy) -> Json:
        """The policy's `drafters` and the `acceptance` of each in words: `Scenario.granted` of all traces."""
        rows = [scenario.granted(policy.strategies) for scenario in self.scenarios]
        texts = {name: dict.fromkeys(row["acceptance"][name] for row in rows) for name in rows[0]["drafters"]}
        return {"drafters": rows[0]["drafters"], "acceptance": {name: " / ".join(text) for name, text in texts.items()}}

    def makespans(
        self, policies: Mapping[str, Policy], *, mode: str, seeds: Sequence[int], oracle: Sequence[Strategy] = ()
    ) -> dict[str, list[Floats]]:
        """Simulate every policy on every trace; the mean over seeds, which all policies share.

        With strategies of an `oracle` also `ORACLE`, which knows each trace's costs and whose choices hold at once.
        """
        cells = []
        for at, each in enumerate(self.scenarios):
            for seed in seeds:
                scenario = replace(each, mode=mode, seed=seed)
                of_case = [Cell(name=n, policy=p, scenario=scenario, axes={"case": at}) for n, p in policies.items()]
                if oracle:
                    of_case.insert(0, replace(of_case[0], name=ORACLE, policy=oracle_policy(each, oracle), delay=0))
                cells += of_case
        each_seed: dict[tuple[str, int], list[Floats]] = defaultdict(list)
        for cell, seconds in zip(cells, Study(cells=cells, jobs=self.jobs).makespans(), strict=True):
            each_seed[cell.name, cell.axes["case"]].append(seconds)
        names = [*policies, *([ORACLE] if oracle else [])]
        return {name: [np.mean(each_seed[name, at], axis=0) for at in range(len(self.scenarios))] for name in names}

    def scores(self, policies: Mapping[str, Policy], *, seeds: Sequence[int]) -> dict[str, float]:
        """Mean seconds of an RL step under each policy in sampled mode."""
        return {name: mean_s(rows) for name, rows in self.makespans(policies, mode="sampled", seeds=seeds).items()}

    def bounds_s(self, policy: Policy) -> Floats | None:
        """Return `Scenario.bounds_of` each RL step; None under a per-request budget."""
        bounds = [scenario.bounds_of(policy) for scenario in self.scenarios]
        known = [bound for bound in bounds if bound is not None]
        return np.concatenate(known, axis=1) if len(known) == len(bounds) else None


def mean_s(seconds: Sequence[Floats]) -> float:
    """Seconds of an RL step on average: the objective that tuning minimises."""
    return float(np.concatenate(seconds).mean())


def ratio(
    seconds: Sequence[Floats],
    reference: Sequence[Floats],
    *,
    seed: int,
    paired: Callable[..., Interval] = paired_ratio,
) -> Interval:
    """Time of one policy over another's with its 95 % interval over the RL steps, by `paired`; one gives none."""
    return paired(np.concatenate(seconds), np.concatenate(reference), rng=seed)
