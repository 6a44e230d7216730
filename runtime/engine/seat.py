"""The policy's place beside an engine: the selector that is asked and told, and the budget that shares out.

`PolicyFile` is where the policy may come from again and again, while it serves.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tltlab
from tltlab.drafters.budget import DraftBudget, UniformBudget
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.replay import START, ReplayedDecisions
from tltlab.policies.selector import Selector
from tltlab.state import StepOutcome, StepState

from .ledger import Choice, Clock, Stopwatch

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a policy's file is looked at."""


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


class PolicyFile:
    """The file of the policy in force, for an engine that takes another one from it while requests run.

    A thread looks at it each `every_s` seconds and reads it once it has stood unchanged between two looks, so that half
    of a file is not read; `take` has it checked and put in force, between two iterations. What cannot be read or run is
    refused: a sentence in the log, `changes` counts it, and what is in force goes on.
    """

    def __init__(self, path: str | Path, in_force: Policy, *, every_s: float = LOOK_S) -> None:
        self.path = Path(path)
        self.changes: Counter[str] = Counter(taken=0, refused=0)
        self.waiting: Policy | None = None
        self._in_force = in_force
        self._last_stamp: tuple[int, ...] | None = None
        self._read_stamp: tuple[int, ...] | None = None
        self._end = threading.Event()
        threading.Thread(target=self._watch, args=(every_s,), name="tltlab-policy-file", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()

    def look(self) -> None:
        """Read the file if it is another one than was read last and was so at the last look."""
        before, self._last_stamp = self._last_stamp, self._stamp()
        if self._last_stamp != before or self._last_stamp == self._read_stamp:
            return
        self._read_stamp = self._last_stamp
        try:
            policy = load_policy(self.path)
        except Exception as error:  # of a class of the user's own, whatever it raises
            self._refuse(error)
        else:
            self.waiting = None if policy == self._in_force else policy

    def take(self, put_in_force: Callable[[Policy, int], None]) -> None:
        """Hand the policy that waits to `put_in_force`, with its number from 1; ConfigError there refuses it."""
        policy, self.waiting = self.waiting, None
        if policy is None:
            return
        try:
            put_in_force(policy, self.changes["taken"] + 1)
        except Exception as error:  # the same: its selector is built there
            self._refuse(error)
            return
        self._in_force = policy
        self.changes["taken"] += 1
        logger.warning("%s: its policy is in force now, a %s", self.path, policy.selector.kind)

    def _refuse(self, error: Exception) -> None:
        self.changes["refused"] += 1
        sentence = str(error) if isinstance(error, ConfigError) else what_was_raised(error)
        logger.error("%s is refused, and the policy in force goes on: %s", self.path, sentence)

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes when the file does; None where there is none."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _watch(self, every_s: float) -> None:
        while not self._end.wait(every_s):
            self.look()
