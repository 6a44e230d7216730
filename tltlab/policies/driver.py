"""The only caller of a policy, in the simulator's worker and in an engine's control alike."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from tltlab.drafters.budget import DraftBudget, UniformBudget, shares_of
from tltlab.errors import ConfigError
from tltlab.records import Fields, Json
from tltlab.state import NO_CHOICE, Choice, RequestState, StepOutcome, StepState
from tltlab.strategy import Strategy

from .selector import WHOLE_TOKENS, Selector, as_choice
from .wrappers import START, ReplayedDecisions

Rewarded = Callable[[float | None], object]
"""Receives the reward of an outcome when the policy learns from it."""

NEEDS = frozenset({WHOLE_TOKENS})
"""All that a policy may declare in `needs`."""


class PolicyDriver:
    """Asks a policy before each iteration and delivers the outcomes of its choices, late and in order.

    Order of the calls in a rollout, where c_i is the choice made as iteration i begins and verified by iteration i + 1:

        begin   ask c_0   [iteration 0: nothing drafted]
                ask c_1   [iteration 1 verifies c_0]   tell c_0
                ask c_2   [iteration 2 verifies c_1]   tell c_1   ...

    So c_1 is always chosen before the outcome of c_0 is known. A caller that applies a choice at once, to a block of
    iterations, sets `delay` to the number of further choices that precede the delivery of each outcome.

    `ask` returns the last choice again, without a call, where that `stays`, as a memoryless policy's does. An
    outcome reaches the selector that made the choice: after `take`, outcomes of the selector before are dropped.
    A driver without a selector chooses nothing and shares out evenly.
    """

    def __init__(
        self, selector: Selector | None = None, budget: DraftBudget | None = None, *, worker: int = 0, delay: int = 0
    ):
        self.worker = worker
        self.delay = delay
        self._replay_place = START
        self.take(selector, budget)

    def take(self, selector: Selector | None, budget: DraftBudget | None = None) -> None:
        """Choose by `selector` and share out by `budget`, by default evenly, from now on."""
        self.selector = selector
        self.budget = budget or UniformBudget()
        self._listed = frozenset(() if selector is None else selector.strategies)
        # The last answer and the choice that it means: policies give the same one many times.
        self._answer: Strategy | Choice = NO_CHOICE
        self._meant = NO_CHOICE
        self.forget()

    def forget(self) -> None:
        """Drop choices whose outcomes have not come: nothing will verify what they drafted."""
        self._in_flight: deque[Choice] = deque()
        self._undelivered: deque[tuple[int, Choice, StepOutcome, Rewarded | None]] = deque()
        self._last: tuple[int, int, int, Choice] | None = None
        self._num_asked = 0

    def begin(self, rl_step: int) -> None:
        """A rollout of `rl_step` begins; requests that run already, and their drafts, continue."""
        self._last = None
        if isinstance(self.selector, ReplayedDecisions):
            self.selector.begin(rl_step)

    def again(self, batch: int, waiting: int, rl_step: int) -> Choice | None:
        """Repeat the last choice where the policy would, which saves building a state; None elsewhere."""
        last = self._last
        if last is None or last[0] != batch or last[1] != waiting or last[2] != rl_step:
            return None
        return self._made(last[3])

    def ask(self, state: StepState) -> Choice:
        """Choose what the next iteration verifies. ConfigError for a strategy that the policy does not list."""
        if self._last is not None and (choice := self.again(state.batch, state.waiting, state.rl_step)) is not None:
            return choice
        selector = self.selector
        assert selector is not None
        answer = selector.choose(state)
        if answer is not self._answer:
            choice = as_choice(selector, answer)
            if choice.strategy not in self._listed:
                listed = ", ".join(map(str, selector.strategies))
                raise ConfigError(f"the policy chose {choice.strategy}, which is not among its strategies: {listed}")
            self._answer, self._meant = answer, choice
        choice = self._meant
        self._last = (state.batch, state.waiting, state.rl_step, choice) if choice.stays else None
        return self._made(choice)

    def _made(self, choice: Choice) -> Choice:
        if choice.learns:
            self._in_flight.append(choice)
        if self.delay:
            self._num_asked += 1
            while self._undelivered and self._undelivered[0][0] <= self._num_asked:
                self._deliver(*self._undelivered.popleft()[1:])
        return choice

    @property
    def holds_back(self) -> bool:
        """True if outcomes wait for further choices before they are delivered."""
        return bool(self._undelivered)

    def tell(self, choice: Choice, outcome: StepOutcome, rewarded: Rewarded | None = None) -> None:
        """Deliver the outcome of a choice; `rewarded` receives its reward. An unknown choice is ignored."""
        if not any(other is choice for other in self._in_flight):
            return
        # Outcomes of those before it never came.
        while self._in_flight.popleft() is not choice:
            pass
        if self.delay:
            self._undelivered.append((self._num_asked + self.delay, choice, outcome, rewarded))
        else:
            self._deliver(choice, outcome, rewarded)

    def deliver(self) -> None:
        """Deliver outcomes that are held back."""
        while self._undelivered:
            self._deliver(*self._undelivered.popleft()[1:])

    def idle(self) -> None:
        """Nothing is left to run: outcomes held back are delivered, and choices in flight have no meaning."""
        self.deliver()
        self.forget()

    def _deliver(self, choice: Choice, outcome: StepOutcome, rewarded: Rewarded | None) -> None:
        selector = self.selector
        assert selector is not None
        if rewarded is not None:
            rewarded(selector.reward(choice, outcome))
        selector.observe(choice, outcome)

    def shares(self, state: StepState, strategy: Strategy) -> list[int]:
        """Tokens to draft for each request of `state`, by the budget. ConfigError for shares that do not fit."""
        return shares_of(self.budget, state, strategy)

    def finished(self, request: RequestState, *, drafted: int, accepted: int) -> None:
        """Let the budget learn from a request that has ended, with its tokens drafted and accepted."""
        self.budget.finished(request, drafted=drafted, accepted=accepted)

    def replay(self, rows: Iterable[Fields]) -> None:
        """Make the choices of these rows of `decisions` again, and after their last RL step choose by the policy."""
        inner = self.selector.inner if isinstance(self.selector, ReplayedDecisions) else self.selector
        if inner is None:
            raise ConfigError("decisions are replayed under the policy that made them, and none is set")
        self.take(ReplayedDecisions(inner, rows, worker=self.worker), self.budget)
        self._go_to(self._replay_place)

    def state_dict(self) -> Json:
        """Return the learned state of policy and budget, and the position of a replay."""
        selector, replayed = self.selector, self._replay_place
        if isinstance(selector, ReplayedDecisions):
            replayed, selector = selector.place, selector.inner
        return {
            "selector": selector.state_dict() if selector is not None else {},
            "replayed": list(replayed),
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: Json) -> None:
        """Go back to what `state_dict` gave. A replay, now or to come, continues where it was."""
        self.forget()
        rl_step, iteration = state["replayed"]
        self._go_to((rl_step, iteration))
        selector = self.selector.inner if isinstance(self.selector, ReplayedDecisions) else self.selector
        if selector is not None:
            selector.load_state_dict(state["selector"])
        self.budget.load_state_dict(state["budget"])

    def _go_to(self, place: tuple[int, int]) -> None:
        self._replay_place = place
        if isinstance(self.selector, ReplayedDecisions):
            self.selector.seek(place)


def refuse_needs(selector: Selector, lacks: Mapping[str, str] = {}) -> None:
    """ConfigError where a policy has a need that its caller lacks, or that does not exist; `lacks` has the reasons."""
    for need in sorted(selector.needs):
        if need not in NEEDS:
            raise ConfigError(f"policy {type(selector).__name__} needs {need!r}; needs are {', '.join(sorted(NEEDS))}")
        if need in lacks:
            raise ConfigError(f"policy {type(selector).__name__} needs {need}: {lacks[need]}")
