"""A memoryless policy as arrays over the batch size: what it chooses with nothing waiting, what that costs and yields.

Such a policy depends on nothing but batch and waiting, so it is asked once for each of these, and for all workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tltlab.errors import ConfigError
from tltlab.policies.selector import Selector
from tltlab.state import StepState
from tltlab.strategy import Strategy

from .log import Floats
from .regime import Regime, Regimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy chose, and the bucket and propensity it gave."""

    strategy: Strategy
    bucket: int | None
    propensity: float


class Plan:
    """The choices of a memoryless selector, remembered; index 0 of the arrays is unused."""

    def __init__(self, selector: Selector, regimes: Regimes) -> None:
        self._selector = selector
        self._known = regimes
        self._choices: dict[tuple[int, int], Choice] = {}
        self._regime_at: list[Regime] = []
        self._choice_at: list[Choice] = []
        self.tokens: Floats = np.zeros(1)
        self.fixed_s: Floats = np.zeros(1)
        self.slope_s: Floats = np.zeros(1)
        self.speculates: Floats = np.zeros(1)

    def choose(self, batch: int, waiting: int, rl_step: int) -> Choice:
        """What the selector chooses at this batch and queue."""
        found = self._choices.get((batch, waiting))
        if found is None:
            selector = self._selector
            strategy = selector.choose(StepState(rl_step=rl_step, batch=batch, waiting=waiting))
            check_known(strategy, self._known)
            found = Choice(strategy=strategy, bucket=selector.bucket_, propensity=selector.propensity_)
            self._choices[batch, waiting] = found
        return found

    def regime(self, batch: int) -> Regime:
        """The regime at a batch that `up_to` has reached."""
        return self._regime_at[batch - 1]

    def choice(self, batch: int) -> Choice:
        """The choice at a batch that `up_to` has reached."""
        return self._choice_at[batch - 1]

    def up_to(self, batch: int, rl_step: int) -> Plan:
        """Itself, with arrays that reach `batch`."""
        if batch > len(self._regime_at):
            sizes = range(len(self._regime_at) + 1, batch + 1)
            choices = [self.choose(size, 0, rl_step) for size in sizes]
            regimes = [self._known.at(c.strategy, size) for c, size in zip(choices, sizes, strict=True)]
            pairs = list(zip(regimes, sizes, strict=True))
            self._choice_at += choices
            self._regime_at += regimes
            self.tokens = np.append(self.tokens, [r.tokens for r in regimes])
            self.fixed_s = np.append(self.fixed_s, [r.fixed_s(size) for r, size in pairs])
            self.slope_s = np.append(self.slope_s, [r.slope_s(size) for r, size in pairs])
            self.speculates = np.append(self.speculates, [r.strategy.speculates for r in regimes])
        return self


def check_known(strategy: Strategy, regimes: Regimes) -> None:
    """ConfigError when a policy chose a strategy that it did not list."""
    if strategy not in regimes.strategies:
        known = ", ".join(map(str, regimes.strategies))
        raise ConfigError(f"the policy chose {strategy}, which is not among its strategies: {known}")
