"""The ledger of one engine's iterations: which choice each one verified, how long it took, what it kept.

vLLM drafts at the end of iteration i what iteration i + 1 verifies. So the outcome of the choice made in iteration i is
what iteration i + 1 verified, and its time is `duration[i+1] - draft_duration[i+1] + draft_duration[i]`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from tltlab.drafters.base import Key
from tltlab.state import NO_CHOICE, Choice, StepOutcome
from tltlab.strategy import Strategy
from tltlab.traces.rows import Row, as_rows, columns, strategy_columns

Clock = Callable[[], float]


@dataclass(slots=True, kw_only=True)
class Scheduled:
    """What the scheduler put into an iteration; per request its id, and the tokens it verifies where it drafted.

    Once it is back, `graph` says what the model's pass ran in (`GRAPH_KINDS`) and with how many tokens, padding
    included; None where the engine does not tell.
    """

    request_ids: list[str]
    drafts: Mapping[str, Sequence[int]]
    waiting: int
    context_tokens: int
    prefill_tokens: int
    graph: tuple[str, int] | None = None


Tell = Callable[[Choice, StepOutcome, "Iteration"], object]
"""Delivers the outcome of a choice, and writes the reward that was learned from it into the iteration."""


@dataclass(slots=True, eq=False)
class Iteration:
    """An iteration in flight or over, and the choice that it verifies; `decided` where a policy made that choice."""

    number: int
    start_s: float
    batch: int
    waiting: int
    context_tokens: int
    prefill_tokens: int
    verified: Choice
    decided: bool
    draft_s_before: float | None
    next_depth: int = 0
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    num_generated: int = 0
    draft_s: float | None = 0.0
    late_s: float = 0.0
    duration_s: float = 0.0
    reward: float | None = None
    sampled: bool = False
    graph: tuple[str, int] | None = None

    @property
    def outcome(self) -> StepOutcome:
        """The outcome of the choice: its own drafting counts, that for the next iteration does not."""
        drafting_s = 0.0 if self.draft_s is None else (self.draft_s_before or 0.0) - self.draft_s
        speculates = self.verified.strategy.speculates
        return StepOutcome(
            elapsed_s=self.duration_s + drafting_s,
            batch=self.batch,
            drafted=self.drafted if speculates else (),
            accepted=self.accepted if speculates else (),
            had_prefill=self.prefill_tokens > 0,
        )

    def rewarded(self, reward: float | None) -> None:
        """Take the reward of the choice that this iteration verified."""
        self.reward = reward


class Stopwatch:
    """Seconds spent inside it in all: `with stopwatch: ...`. It is not entered again while it runs."""

    __slots__ = ("_clock", "_entered", "seconds")

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self._clock = clock

    def __enter__(self) -> None:
        self._entered = self._clock()

    def __exit__(self, *exception: object) -> None:
        self.seconds += self._clock() - self._entered


class Ledger:
    """Writes down iterations as an engine runs them, and tells each choice's outcome once its iteration is over.

    Per iteration: `start`, `schedule`, `choose` where somebody chooses, `verified`, `sampled`, and `drafted` where
    drafts are made beside the scheduler. An iteration lasts from its start to the next one's, the last before a pause
    to its own end; text that drafters take in late does not count. With `overlapped` (asynchronous scheduling)
    durations run from output to output, and drafting time is unknown.

    `begin` opens a rollout and `end` closes it; outside of rollouts outcomes are told and no rows are kept. `over` is
    called with each iteration that has ended. Times in rows are seconds since `origin`, the moment of `begin`.
    `verified` takes O(batch), everything else O(1), and a rollout holds O(batch) per iteration that verified drafts.
    """

    def __init__(
        self,
        tell: Tell,
        *,
        worker: int = 0,
        overlapped: bool = False,
        clock: Clock = time.perf_counter,
        over: Callable[[Iteration], object] = lambda _: None,
    ) -> None:
        self.worker = worker
        self.overlapped = overlapped
        self.clock = clock
        self._tell = tell
        self._on_end = over
        self.clear()
        self._zeros: tuple[int, ...] = ()
        self._in_flight: deque[Iteration] = deque()
        self.begin(0)
        self.is_open = False

    def begin(self, rl_step: int) -> None:
        """Open a rollout: no rows, iteration 0, and the clock at 0. A choice in force stays so."""
        self.rl_step = rl_step
        self.is_open = True
        self.first_token_s: dict[Key, float] = {}
        self.origin = self._busy_until_s = self._last_end_s = self.clock()
        self._iterations: list[Row] = []
        self._decisions: list[Row] = []
        self._ended: list[Iteration] = []
        self._number = 0
        # Overlapped, an iteration of requests that have ended may still be in flight: it is of no rollout.
        self._stale = len(self._in_flight)
        self._last: Iteration | None = None
        self._draft_s: float | None = 0.0

    def end(self) -> None:
        """Close the rollout; its last iteration ends now if it has not yet."""
        self._close(self.clock())
        self.is_open = False

    def start(self) -> None:
        """An iteration is about to be put together; the one before is over."""
        self._start_s = self.clock()
        self._close(self._start_s)

    def schedule(self, work: Scheduled) -> Strategy:
        """The iteration is put together; the strategy whose drafts it verifies. It will draft nothing unless chosen."""
        verified = self.in_force
        batch, context_tokens, prefill_tokens = len(work.request_ids), work.context_tokens, work.prefill_tokens
        self._last = Iteration(
            self._number, self._start_s, batch, work.waiting, context_tokens, prefill_tokens, verified, self._decided,
            self._draft_s,
        )  # fmt: skip
        self._in_flight.append(self._last)
        self._number += 1
        self._draft_s = None if self.overlapped else 0.0
        self.clear()
        return verified.strategy

    def choose(self, choice: Choice, *, decided: bool = True) -> None:
        """Note what the iteration just scheduled drafts at its end and the next one verifies, `decided` by a policy."""
        assert self._last is not None
        self.in_force, self._decided = choice, decided
        self._last.next_depth = choice.strategy.draft_depth

    def first_token(self, key: Key) -> None:
        """The first token of the response `key` is here."""
        if self.is_open:
            self.first_token_s[key] = self.clock() - self.origin

    def verified(self, work: Scheduled, counts: Sequence[int]) -> Iteration:
        """The oldest iteration in flight is back: `counts` are the tokens each request got, drafts kept included."""
        iteration = self._in_flight.popleft()
        if work.drafts:
            iteration.drafted = drafted = list(map(len, map(work.drafts.get, work.request_ids, repeat(()))))
            iteration.accepted = [count - 1 if n and count else 0 for count, n in zip(counts, drafted, strict=True)]
        else:
            # Iterations without drafts share their zeros: a rollout keeps all of its iterations until it ends.
            if len(self._zeros) != iteration.batch:
                self._zeros = (0,) * iteration.batch
            iteration.drafted = iteration.accepted = self._zeros
        iteration.num_generated = sum(counts)
        iteration.graph = work.graph
        return iteration

    def sampled(self, iteration: Iteration) -> None:
        """What came of the `iteration` that is back has been taken in; overlapped, it is over."""
        iteration.sampled = True
        self._busy_until_s = self.clock()
        if not self.overlapped:
            return
        iteration.start_s = max(iteration.start_s, self._last_end_s)
        iteration.draft_s = None
        if self._stale:
            self._stale -= 1
        else:
            self._finish(iteration, self._busy_until_s)

    def drafted(self, since_s: float, learned_s: float, late_s: float = 0.0) -> None:
        """The next iteration's drafts were made beside the scheduler since `since_s`, and in workers in `learned_s`.

        Of the former `late_s` went into text that drafters had not been shown when it came: no choice pays for it.
        """
        self._busy_until_s = self.clock()
        self._draft_s = self._busy_until_s - since_s - late_s + learned_s
        if self._last is not None and not self.overlapped:
            self._last.draft_s, self._last.late_s = self._draft_s, late_s

    def interrupted(self, seconds: float) -> None:
        """The engine did something else for so long since the last iteration's output, which pays nothing for it."""
        if self._last is not None and not self.overlapped:
            self._last.late_s += seconds

    def pause(self) -> None:
        """Nothing is left to run: the last iteration ended with its output or its drafts, and no choice is in force."""
        self._close(self._busy_until_s)
        self.clear()

    def clear(self) -> None:
        """Leave no choice in force: the next iteration verifies nothing."""
        self.in_force, self._decided = NO_CHOICE, False

    def _close(self, now: float) -> None:
        """The iteration scheduled last is over `now`, unless it was closed before or is not back."""
        iteration, self._last = self._last, None
        if iteration is not None and iteration.sampled and not self.overlapped:
            self._finish(iteration, now)

    def _finish(self, iteration: Iteration, now: float) -> None:
        iteration.duration_s = now - iteration.start_s - iteration.late_s
        self._last_end_s = now
        if self.is_open:
            self._ended.append(iteration)
        if iteration.decided and iteration.verified.learns:
            self._tell(iteration.verified, iteration.outcome, iteration)
        self._on_end(iteration)

    def take(self) -> EndedIterations:
        """The iterations that are over and whose rows nobody has asked for; they are the ledger's no more."""
        iterations, self._ended = self._ended, []
        return EndedIterations(self.rl_step, self.worker, self.origin, iterations)

    @property
    def num_over(self) -> int:
        """How many iterations the next `take` gives."""
        return len(self._ended)

    @property
    def iterations(self) -> list[Row]:
        """The rollout's rows of `iterations.parquet` so far."""
        self._make_rows()
        return self._iterations

    @property
    def decisions(self) -> list[Row]:
        """The rollout's rows of `decisions.parquet` so far: those whose outcome is known."""
        self._make_rows()
        return self._decisions

    def _make_rows(self) -> None:
        # Rows are made after the rollout: making them between forward passes costs several times as much, because the
        # caches are cold.
        iterations, decisions = self.take().rows()
        self._iterations += iterations
        self._decisions += decisions


@dataclass(frozen=True, slots=True)
class EndedIterations:
    """Iterations that are over, of the rollout of `rl_step` that began at `origin`."""

    rl_step: int
    worker: int
    origin: float
    passed: Sequence[Iteration]

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Their rows of `iterations.parquet`, and of `decisions.parquet` where somebody chose."""
        passed, chosen = self.passed, [it for it in self.passed if it.decided]
        graphs = [it.graph or (None, None) for it in passed]
        iterations = self._rows(
            "iterations",
            passed,
            t_start=[it.start_s - self.origin for it in passed],
            duration=[it.duration_s for it in passed],
            draft_duration=[it.draft_s for it in passed],
            batch=[it.batch for it in passed],
            num_waiting=[it.waiting for it in passed],
            context_tokens=[it.context_tokens for it in passed],
            prefill_tokens=[it.prefill_tokens for it in passed],
            num_drafted=[sum(it.drafted) for it in passed],
            num_accepted=[sum(it.accepted) for it in passed],
            num_generated=[it.num_generated for it in passed],
            accepted_per_request=[list(it.accepted) if it.verified.strategy.speculates else None for it in passed],
            next_draft_depth=[it.next_depth for it in passed],
            graph=[kind for kind, _ in graphs],
            graph_tokens=[tokens for _, tokens in graphs],
        )
        decisions = self._rows(
            "decisions",
            chosen,
            bucket=[it.verified.bucket for it in chosen],
            propensity=[it.verified.propensity for it in chosen],
            reward=[it.reward for it in chosen],
        )
        return iterations, decisions

    def _rows(self, table: str, passed: Sequence[Iteration], **values: list[Any]) -> list[Row]:
        place = {"rl_step": self.rl_step, "worker": self.worker, "iteration": [it.number for it in passed]}
        strategies = strategy_columns([it.verified.strategy for it in passed])
        return as_rows(columns(table, **place, **strategies, **values))
