"""How far off-policy estimates are off, measured against the simulator, which knows what every strategy would yield.

A policy that chooses at random is simulated and logged. For each logged state the cost and acceptance models give the
expected reward of every strategy, so the true mean reward of a target on exactly these states is known. Repeated over
seeds that gives bias, root mean square error and how often the intervals hold the truth.

Not in the truth: a response's last iteration may accept less than was drafted, as there is nothing left to generate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tltlab.acceptance.base import Acceptance
from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.planning.decisions import Logged, logged_decisions
from tltlab.planning.off_policy import estimate, folds_of
from tltlab.planning.targets import Chances, chances
from tltlab.policies.policy import Policy
from tltlab.policies.reward import Reward, RewardKind
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.simulate import simulate
from tltlab.state import DrafterState, StepOutcome
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorError:
    """One estimator on one target: over seeds, in units of the reward; `bias` and `rmse` are relative to the truth.

    `coverage` is the share of intervals that hold the truth, `level` what it should be; `interval` their mean width
    relative to the truth; `warned` the share of seeds with a warning.
    """

    target: str
    estimator: str
    truth: float
    bias: float
    rmse: float
    coverage: float
    interval: float
    warned: float
    num_seeds: int


def estimator_errors(
    trace: Trace,
    logger: Policy,
    targets: Mapping[str, Policy],
    *,
    reward: RewardKind = "relative",
    costs: CostModel | dict[str, Any] | str | Path | None = None,
    acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
    seeds: Sequence[int] = range(10),
    level: float = 0.95,
) -> list[EstimatorError]:
    """Simulate `logger` in sampled mode for each seed, and compare the estimates of each target with its truth.

    Raises ConfigError where acceptance differs between requests or is replayed: then a state's truth is not a number
    that the log's state determines.
    """
    everything = tuple(dict.fromkeys(s for p in (logger, *targets.values()) for s in p.strategies))
    rows_of: dict[tuple[str, str], list[tuple[float, float, float, float, bool]]] = {}
    for seed in seeds:
        result = simulate(
            trace, logger, costs=costs, acceptance=acceptance, mode="sampled", seed=seed, record_iterations=True,
        )  # fmt: skip
        log, kind = logged_decisions(result.trace, reward)
        expected = _ExpectedReward(everything, result.scenario.costs, result.scenario.acceptance, kind)
        folds = folds_of(log)
        for name, policy in targets.items():
            pi = chances(policy, log, folds)
            estimation = estimate(log, pi, folds, level=level, num_resamples=500, rng=np.random.default_rng([seed, 1]))
            truth = expected.mean(log, pi)
            for estimator, mean in estimation.estimates.items():
                row = (truth, mean.value, mean.low, mean.high, bool(estimation.warnings))
                rows_of.setdefault((name, estimator), []).append(row)
    return [_errors(target, name, rows) for (target, name), rows in rows_of.items()]


class _ExpectedReward:
    """What each strategy's reward is in a logged state, on average over luck and noise."""

    def __init__(
        self, strategies: Sequence[Strategy], costs: CostModel, acceptance: Acceptance | None, reward: Reward
    ) -> None:
        names = {s.drafter: DrafterState() for s in strategies if s.speculates}
        model = None if acceptance is None else acceptance.in_state(names)
        if model is not None and model.varies_by != "nothing":
            raise ConfigError(
                "the check needs an acceptance that is alike for all requests, as 'geometric:0.6' or a fit without "
                f"request curves, got {type(model).__name__}"
            )
        self._regimes = Regimes(strategies, costs, model)
        self._reward = reward
        # A reward divides by the time, and the mean of 1/noise is not 1.
        ratios = np.ones(1) if costs.noise is None else np.asarray(costs.noise.ratios)
        self._faster = float((1.0 / ratios).mean())

    def mean(self, log: Sequence[Logged], pi: Sequence[Chances]) -> float:
        """The target's mean expected reward over the decisions that were made at random."""
        values = [
            math.fsum(chance * self.reward(decision, strategy) for strategy, chance in of.items())
            for decision, of in zip(log, pi, strict=True)
            if decision.at_random
        ]
        return float(np.mean(values))

    def reward(self, decision: Logged, strategy: Strategy) -> float:
        batch = decision.state.batch
        regime = self._regimes.at(strategy, batch)
        elapsed_s = regime.fixed_s(batch) + regime.slope_s(batch) * decision.state.context_tokens
        outcome = StepOutcome(
            elapsed_s=elapsed_s,
            batch=batch,
            accepted=(regime.tokens - 1.0,) * batch if strategy.speculates else (),
        )
        value = self._reward(strategy, outcome)
        assert value is not None
        return value * self._faster


def _errors(target: str, name: str, rows: Sequence[tuple[float, float, float, float, bool]]) -> EstimatorError:
    truth, value, low, high, warned = np.array(rows, np.float64).T
    mean = float(truth.mean())
    return EstimatorError(
        target=target,
        estimator=name,
        truth=mean,
        bias=float((value - truth).mean()) / mean,
        rmse=float(np.sqrt(((value - truth) ** 2).mean())) / mean,
        coverage=float(((low <= truth) & (truth <= high)).mean()),
        interval=float((high - low).mean()) / mean,
        warned=float(warned.mean()),
        num_seeds=len(rows),
    )
