"""Elastic activation (TLT section 5): speculate only while few requests are left."""

from __future__ import annotations

from typing import Any, Literal, get_args

from tltlab.errors import ConfigError
from tltlab.state import Choice, StepState
from tltlab.strategy import NO_SPECULATION

from .selector import Selector, Wrapper, chosen

Count = Literal["running", "remaining"]
_OFF = Choice(NO_SPECULATION, learns=False)
_STAYS_OFF = Choice(NO_SPECULATION, learns=False, stays=True)


class ElasticActivation(Wrapper):
    """Wraps a selector: it is asked while at most `max_requests` are left, above that decoding is plain.

    `count` says what is counted: the `running` requests of this worker, or the `remaining` ones (running and waiting).
    After a switch, on or off, nothing switches again for `hold_iterations` choices, so a batch that flutters around
    the threshold does not; a new RL step starts afresh. While off, `inner` is not asked; outcomes of its earlier
    choices still reach it. TLT's default is 32 running requests. Its released code holds differently: the count
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
        super().__init__(inner)
        self.max_requests = max_requests
        self.count = count
        self.hold_iterations = hold_iterations
        self.strategies = tuple(dict.fromkeys((NO_SPECULATION, *inner.strategies)))
        self.memoryless = inner.memoryless and hold_iterations == 0
        self.on_ = False
        self.held_ = 0
        self.rl_step_: int | None = None

    def choose(self, state: StepState) -> Choice:
        few = (state.batch if self.count == "running" else state.remaining) <= self.max_requests
        if state.rl_step != self.rl_step_:
            self.rl_step_, self.on_, self.held_ = state.rl_step, few, self.hold_iterations
        elif few != self.on_ and self.held_ >= self.hold_iterations:
            self.on_, self.held_ = few, 0
        self.held_ = min(self.held_ + 1, self.hold_iterations)
        if self.on_:
            return chosen(self.inner, state)
        return _STAYS_OFF if not few and self.held_ == self.hold_iterations else _OFF

    def state_dict(self) -> dict[str, Any]:
        return {"on": self.on_, "held": self.held_, "rl_step": self.rl_step_, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.on_, self.held_, self.rl_step_ = state["on"], state["held"], state["rl_step"]
        self.inner.load_state_dict(state["inner"])
