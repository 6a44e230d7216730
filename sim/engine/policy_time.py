"""The share of a simulation's time that a policy takes, and a hint where it is large."""

import math
import time
from collections.abc import Callable
from typing import Any

from tltlab.console import progress
from tltlab.policies.driver import PolicyDriver, Rewarded
from tltlab.state import Choice, StepOutcome, StepState

HINT_S = 5.0
"""Seconds of a simulation after which a slow policy is reported."""
LEAST_SHARE = 0.5


class PolicyTime:
    """Seconds that the policy of a simulation takes; once they are most of `HINT_S` or more, one line says so."""

    def __init__(self, decision_block: int):
        self._block, self._began_s = decision_block, time.perf_counter()
        self._seconds, self._is_reported = 0.0, False

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the policy, and report it where that is due."""
        before_s = time.perf_counter()
        result = call(*args)
        now_s = time.perf_counter()
        self._seconds += now_s - before_s
        whole_s = now_s - self._began_s
        if whole_s >= HINT_S and not self._is_reported and (share := self._seconds / whole_s) >= LEAST_SHARE:
            self._is_reported = True
            # So many times fewer choices take as long as the rest.
            block = self._block * 2 ** math.ceil(math.log2(max(2.0, share / max(1.0 - share, 0.01))))
            progress(
                f"the policy takes {share:.0%} of the {whole_s:.0f} s so far: --decision-block {block} "
                f"(decision_block={block} in Python) asks it once in {block} iterations"
            )
        return result


class TimedDriver(PolicyDriver):
    """A driver of a policy whose time is measured."""

    def __init__(self, *args: Any, watch: PolicyTime, **options: Any):
        super().__init__(*args, **options)
        self._watch = watch

    def ask(self, state: StepState) -> Choice:
        choice: Choice = self._watch.timed(super().ask, state)
        return choice

    def _deliver(self, choice: Choice, outcome: StepOutcome, rewarded: Rewarded | None) -> None:
        self._watch.timed(super()._deliver, choice, outcome, rewarded)
