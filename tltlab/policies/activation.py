"""Elastic activation (TLT section 5): speculate only while few requests are left."""

from __future__ import annotations

from typing import Any, Literal, get_args

from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector

Count = Literal["running", "remaining"]


class ElasticActivation(Selector):
    """Wraps a selector: it is asked while at most `max_requests` are left, above that decoding is plain.

    `count` says what is counted: the `running` requests of this worker, or the `remaining` ones (running and waiting).
    After a switch, on or off, nothing switches again for `hold_iterations` choices, so a batch that flutters around
    the threshold does not; a new RL step starts afresh. While off, `inner` neither chooses nor learns, the propensity
    is 1 and there is no bucket. TLT's default is 32 running requests. Its released code holds differently: the count
    must stay low for 10 iterations before speculation comes on, which then stays on until the rollout ends.
    """

    def __init__(
        self, inner: Selector, max_requests: int = 32, count: Count = "running", hold_iterations: int = 10
    ) -> None:
        if max_requests < 0 or hold_iterations < 0:
            raise ConfigError(
                f"activation: max_requests and hold_iterations must be at least 0, "
                f"got {max_requests} and {hold_iterations}"
            )
        if count not in get_args(Count):
            raise ConfigError(f"activation: count must be 'running' or 'remaining', got {count!r}")
        self.inner = inner
        self.max_requests = max_requests
        self.count = count
        self.hold_iterations = hold_iterations
        self.strategies = tuple(dict.fromkeys((NO_SPECULATION, *inner.strategies)))
        self.memoryless = inner.memoryless and hold_iterations == 0
        self.on_ = False
        self.held_ = 0
        self.rl_step_: int | None = None

    def choose(self, state: StepState) -> Strategy:
        few = (state.batch if self.count == "running" else state.remaining) <= self.max_requests
        if state.rl_step != self.rl_step_:
            self.rl_step_, self.on_, self.held_ = state.rl_step, few, self.hold_iterations
        elif few != self.on_ and self.held_ >= self.hold_iterations:
            self.on_, self.held_ = few, 0
        self.held_ = min(self.held_ + 1, self.hold_iterations)
        self.steady_ = not self.on_ and self.held_ == self.hold_iterations
        if not self.on_:
            self.propensity_, self.bucket_ = 1.0, None
            return NO_SPECULATION
        chosen = self.inner.choose(state)
        self.propensity_, self.bucket_ = self.inner.propensity_, self.inner.bucket_
        return chosen

    def drafts_with(self, drafters: Drafters) -> None:
        self.inner.drafts_with(drafters)

    def observe(self, strategy: Strategy, outcome: StepOutcome) -> None:
        if self.learns_from(strategy):
            self.inner.observe(strategy, outcome)

    def reward(self, strategy: Strategy, outcome: StepOutcome) -> float | None:
        return self.inner.reward(strategy, outcome) if self.learns_from(strategy) else None

    def learns_from(self, strategy: Strategy) -> bool:
        # An engine may report an iteration after the next choice: just after a switch it need not be one of inner's.
        return self.on_ and strategy in self.inner.strategies

    def state_dict(self) -> dict[str, Any]:
        return {"on": self.on_, "held": self.held_, "rl_step": self.rl_step_, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.on_, self.held_, self.rl_step_ = state["on"], state["held"], state["rl_step"]
        self.inner.load_state_dict(state["inner"])
