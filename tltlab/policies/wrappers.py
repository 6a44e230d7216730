"""Selectors around another one: elastic activation (TLT section 5), and the choices of a recording made again."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError, RunError
from tltlab.records import Fields, Json
from tltlab.state import NO_CHOICE, Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .selector import Selector, chosen

Count = Literal["running", "remaining"]
_OFF = Choice(NO_SPECULATION, learns=False)


class Wrapper(Selector):
    """A selector around another one, `inner`, which learns from the choices that it made."""

    def __init__(self, inner: Selector):
        self.inner = inner
        self.strategies = inner.strategies
        self.memoryless = inner.memoryless
        self.needs = inner.needs

    def drafts_with(self, drafters: Drafters) -> None:
        self.inner.drafts_with(drafters)

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        self.inner.observe(choice, outcome)

    def reward(self, choice: Choice, outcome: StepOutcome) -> float | None:
        return self.inner.reward(choice, outcome)


class ElasticActivation(Wrapper):
    """Wraps a selector: it is asked while at most `max_requests` are left, above that decoding is plain.

    `count` selects the requests counted: the `running` ones of this worker, or the `remaining` (running and waiting).
    After a switch, on or off, nothing switches again for `hold_iterations` choices, so a batch that flutters around
    the threshold does not; a new RL step starts afresh. While off, `inner` is not asked; outcomes of its earlier
    choices still reach it. While no switch is held back, plain decoding stays, and so do choices of `inner` that do.

    TLT's default is 32 running requests. Its released code holds differently: the count must stay low for 10 iterations
    before speculation comes on, which then stays on until the rollout ends.
    """

    state_names = ("on_", "held_", "rl_step_")

    def __init__(self, inner: Selector, max_requests: int = 32, count: Count = "running", hold_iterations: int = 10):
        if max_requests < 0 or hold_iterations < 0:
            raise ConfigError(
                f"activation: max_requests and hold_iterations must be at least 0, "
                f"got {max_requests} and {hold_iterations}"
            )
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
        # While a switch is held, each choice counts.
        settled = few == self.on_ and self.held_ == self.hold_iterations
        if self.on_:
            choice = chosen(self.inner, state)
            return choice if settled or not choice.stays else replace(choice, stays=False, least_batch=None)
        if not settled:
            return _OFF
        return Choice(NO_SPECULATION, learns=False, stays=True, least_batch=self.max_requests + 1)

    def state_dict(self) -> Json:
        return super().state_dict() | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(state["inner"])


REPLAYED = ("rl_step", "iteration", "drafter", "draft_depth", "top_k", "tokens_to_verify", "bucket", "propensity")
"""Columns of `decisions` that identify a choice and its iteration."""

Place = tuple[int, int]
"""An RL step and the number of an iteration of one worker in it."""

START: Place = (-1, 0)
"""Before the first."""


class ReplayedDecisions(Wrapper):
    """Repeats the choices in one worker's rows of a trace's `decisions`; after their last RL step `inner` chooses.

    A row names the iteration that a choice was in force in, which is the one after it was made; the first iteration of
    a rollout has none. Several rollouts of one RL step count on. `inner` is asked all the same and learns from what was
    replayed; its answers are not used. Engines call `begin` before each rollout. Raises ConfigError where
    `inner` could not have made these choices, RunError in an iteration whose choice is not in the rows.

    >>> row = {"rl_step": 0, "iteration": 1, "drafter": "ngram", "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5}
    >>> replayed = ReplayedDecisions(FixedStrategy(Strategy.chain("ngram", 4)), [row])              # doctest: +SKIP
    """

    def __init__(self, inner: Selector, rows: Iterable[Fields], *, worker: int = 0):
        super().__init__(inner)
        self.memoryless = False
        self.worker = worker
        self._choices: dict[Place, Choice] = {(int(r["rl_step"]), int(r["iteration"])): _choice(r) for r in rows}
        self.last_rl_step = max((rl_step for rl_step, _ in self._choices), default=-1)
        foreign = {choice.strategy for choice in self._choices.values()} - {NO_SPECULATION, *self.strategies}
        if self.strategies and foreign:
            raise ConfigError(
                f"worker {worker}: the decisions to replay have {min(map(str, foreign))}, which the policy never "
                "chooses: replay with the policy that recorded them"
            )
        self.strategies = tuple(dict.fromkeys((*inner.strategies, NO_SPECULATION)))
        self.seek(START)

    @property
    def place(self) -> Place:
        """The RL step that it is in, and how many iterations of it have run."""
        return self.rl_step_, self.iteration_

    def seek(self, place: Place) -> None:
        """Go on from a place between two rollouts."""
        self.rl_step_, self.iteration_ = place
        self.unknown_ = False

    def begin(self, rl_step: int) -> None:
        """A rollout of `rl_step` begins, its first or another one."""
        if rl_step != self.rl_step_:
            self.rl_step_, self.iteration_ = rl_step, 0
        self.unknown_ = False

    def choose(self, state: StepState) -> Choice:
        if state.rl_step != self.rl_step_:
            self.begin(state.rl_step)
        if self.unknown_:
            raise RunError(
                f"the decisions to replay have none for RL step {self.rl_step_}, worker {self.worker}, iteration "
                f"{self.iteration_}: this run does not do what the recorded one did"
            )
        self.iteration_ += 1
        own = chosen(self.inner, state)
        if self.rl_step_ > self.last_rl_step:
            return own
        replayed = self._choices.get((self.rl_step_, self.iteration_))
        # The last choice of a rollout is never verified and is in no row.
        self.unknown_ = replayed is None
        return NO_CHOICE if replayed is None else replace(replayed, learns=own.learns)


def _choice(row: Fields) -> Choice:
    strategy = Strategy(str(row["drafter"]), int(row["draft_depth"]), int(row["top_k"]), int(row["tokens_to_verify"]))
    bucket = row.get("bucket")
    number = None if bucket is None or bucket != bucket else int(bucket)
    return Choice(strategy, float(row.get("propensity", 1.0)), number)
