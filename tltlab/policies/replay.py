"""The choices of a recorded rollout, made again: an adaptive run repeated bit by bit, for its clock cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tltlab.errors import ConfigError, RunError
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector

REPLAYED = ("rl_step", "iteration", "drafter", "draft_depth", "top_k", "tokens_to_verify", "bucket", "propensity")
"""The columns of `decisions` that say what was chosen when."""

Place = tuple[int, int]
"""An RL step and the number of an iteration of one worker in it."""

START: Place = (-1, 0)
"""Before the first."""


class ReplayedDecisions(Selector):
    """Chooses what one worker's rows of a trace's `decisions` say, and after their last RL step what `inner` does.

    A row names the iteration that a choice was in force in, which is the one after it was made; the first iteration of
    a rollout has none. Several rollouts of one RL step count on. `inner` is asked and told all the same, and learns
    from what was replayed; its answers are not used. Engines call `begin` before each rollout. Raises ConfigError where
    `inner` could not have made these choices, RunError in an iteration whose choice is not in the rows.

    >>> row = {"rl_step": 0, "iteration": 1, "drafter": "ngram", "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5}
    >>> replayed = ReplayedDecisions(FixedStrategy(Strategy.chain("ngram", 4)), [row])              # doctest: +SKIP
    """

    def __init__(self, inner: Selector, rows: Iterable[Mapping[str, Any]], *, worker: int = 0) -> None:
        self.inner = inner
        self.strategies = inner.strategies
        self.worker = worker
        self._rows: dict[Place, Mapping[str, Any]] = {(int(r["rl_step"]), int(r["iteration"])): r for r in rows}
        self._chosen = {place: _strategy(row) for place, row in self._rows.items()}
        self.last_rl_step = max((rl_step for rl_step, _ in self._rows), default=-1)
        foreign = set(self._chosen.values()) - {NO_SPECULATION, *self.strategies}
        if self.strategies and foreign:
            raise ConfigError(
                f"worker {worker}: the decisions to replay have {min(map(str, foreign))}, which the policy never "
                "chooses: replay with the policy that recorded them"
            )
        self.go_to(START)

    @property
    def place(self) -> Place:
        """The RL step that it is in, and how many iterations of it have run."""
        return self.rl_step_, self.iteration_

    def go_to(self, place: Place) -> None:
        """Go on from a place between two rollouts."""
        self.rl_step_, self.iteration_ = place
        self.unknown_ = False

    def begin(self, rl_step: int) -> None:
        """A rollout of `rl_step` begins, its first or another one."""
        if rl_step != self.rl_step_:
            self.rl_step_, self.iteration_ = rl_step, 0
        self.unknown_ = False

    def choose(self, state: StepState) -> Strategy:
        if state.rl_step != self.rl_step_:
            self.begin(state.rl_step)
        if self.unknown_:
            raise RunError(
                f"the decisions to replay have none for RL step {self.rl_step_}, worker {self.worker}, iteration "
                f"{self.iteration_}: this run does not do what the recorded one did"
            )
        self.iteration_ += 1
        chosen = self.inner.choose(state)
        self.propensity_, self.bucket_ = self.inner.propensity_, self.inner.bucket_
        if self.rl_step_ > self.last_rl_step:
            return chosen
        place = self.rl_step_, self.iteration_
        row = self._rows.get(place)
        # The last choice of a rollout is in force nowhere and is in no row.
        self.unknown_ = row is None
        if row is None:
            return NO_SPECULATION
        bucket, self.propensity_ = row.get("bucket"), float(row.get("propensity", 1.0))
        self.bucket_ = None if bucket is None or bucket != bucket else int(bucket)
        return self._chosen[place]

    def observe(self, strategy: Strategy, outcome: StepOutcome) -> None:
        self.inner.observe(strategy, outcome)

    def reward(self, strategy: Strategy, outcome: StepOutcome) -> float | None:
        return self.inner.reward(strategy, outcome)

    def state_dict(self) -> dict[str, Any]:
        """How far it has come, and what `inner` has learned."""
        return {"place": list(self.place), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rl_step, iteration = state["place"]
        self.go_to((rl_step, iteration))
        self.inner.load_state_dict(state["inner"])


def _strategy(row: Mapping[str, Any]) -> Strategy:
    return Strategy(str(row["drafter"]), int(row["draft_depth"]), int(row["top_k"]), int(row["tokens_to_verify"]))
