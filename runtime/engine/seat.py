"""The policy's place beside an engine: the selector that is asked and told, and the budget that shares out."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tltlab
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError, RunError
from tltlab.policies.replay import START, ReplayedDecisions
from tltlab.policies.selector import Selector
from tltlab.state import StepOutcome, StepState

from .ledger import Choice, Clock, Stopwatch


class PolicyFailed(RunError):
    """The policy raised in mid-rollout, and is asked no more: a rollout of another policy would be taken for its."""


def what_was_raised(error: Exception) -> str:
    """Its name, what it says, and the innermost file and line that is not ours and in no library, if there is one.

    For messages about errors that end nothing; it raises none itself, whatever the error is like.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(tltlab.__file__).parent)
    foreign = [at for at in frames if not at.filename.startswith(package) and "site-packages" not in at.filename]
    location = "".join(f" ({at.filename}, line {at.lineno})" for at in (foreign or frames)[-1:])
    try:
        text = str(error)
    except Exception:
        text = "it cannot be shown"
    return f"{type(error).__name__}: {text}{location}"


class Seat:
    """The policy's place: the selector that is asked and told, the budget that shares out, or none of either.

    `deciding` runs while the policy chooses, shares out or learns. A selector that is memoryless, or whose last choice
    is steady, is asked once for each change of what it looks at; who learns nothing is told nothing.
    """

    def __init__(self, *, worker: int, clock: Clock) -> None:
        self.selector: Selector | None = None
        self.budget: DraftBudget = UniformBudget()
        self.deciding = Stopwatch(clock)
        self._worker = worker
        self._replay_place: tuple[int, int] = START
        self._last_answer: tuple[int, int, int, Choice] | None = None

    def take(self, selector: Selector | None, budget: DraftBudget | None) -> None:
        """Choose by `selector` and share out by `budget`, by default evenly, from now on."""
        self.selector = selector
        self.budget = budget or UniformBudget()
        self._last_answer = None

    def answer(self, batch: int, waiting: int, rl_step: int) -> Choice | None:
        """What the selector chose last, where it would choose that again."""
        last = self._last_answer
        if last is None or last[0] != batch or last[1] != waiting or last[2] != rl_step:
            return None
        return last[3]

    def ask(self, state: StepState) -> Choice:
        """The selector's choice for `state`."""
        selector = self.selector
        assert selector is not None
        strategy = selector.choose(state)
        learns = not selector.memoryless or type(selector).reward is not Selector.reward
        choice = Choice(strategy, selector, selector.bucket_, selector.propensity_, learns)
        again = selector.memoryless or selector.steady_
        self._last_answer = (state.batch, state.waiting, state.rl_step, choice) if again else None
        return choice

    def tell(self, choice: Choice, outcome: StepOutcome) -> float | None:
        """Have the selector that made `choice`, in force or not any more, learn its outcome; the reward it learns."""
        assert choice.selector is not None
        with self.deciding:
            reward = choice.selector.reward(choice.strategy, outcome)
            choice.selector.observe(choice.strategy, outcome)
        return reward

    def replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the choices of these rows of `decisions` again, and after their last RL step choose by the policy."""
        inner = self.selector.inner if isinstance(self.selector, ReplayedDecisions) else self.selector
        if inner is None:
            raise ConfigError("decisions are replayed under the policy that made them, and none is set")
        self.selector = ReplayedDecisions(inner, rows, worker=self._worker)
        self._last_answer = None
        self.selector.go_to(self._replay_place)

    def begin(self, rl_step: int) -> None:
        """A rollout of `rl_step` begins."""
        self._last_answer = None
        if isinstance(self.selector, ReplayedDecisions):
            self.selector.begin(rl_step)

    def state_dict(self) -> dict[str, Any]:
        """What policy and budget have learned, and how far a replay has come."""
        selector, replayed = self.selector, self._replay_place
        if isinstance(selector, ReplayedDecisions):
            replayed, selector = selector.place, selector.inner
        return {
            "selector": selector.state_dict() if selector is not None else {},
            "replayed": list(replayed),
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave. A replay, now or to come, goes on where it was."""
        self._last_answer = None
        rl_step, iteration = state["replayed"]
        self._replay_place = rl_step, iteration
        selector = self.selector
        if isinstance(selector, ReplayedDecisions):
            selector.go_to(self._replay_place)
            selector = selector.inner
        if selector is not None:
            selector.load_state_dict(state["selector"])
        self.budget.load_state_dict(state["budget"])
