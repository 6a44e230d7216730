"""Tracker of one engine's iterations: the choice that each one verified, its duration, and its accepted tokens.

vLLM drafts at the end of iteration i, and iteration i + 1 verifies these drafts. The outcome of the choice made in
iteration i therefore comes from iteration i + 1; its time is `duration[i+1] - draft_duration[i+1] + draft_duration[i]`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add
from typing import Any

import pyarrow as pa

from tltlab.state import NO_CHOICE, Choice, StepOutcome
from tltlab.strategy import Strategy
from tltlab.traces.schema import TABLES, strategy_columns

Clock = Callable[[], float]


NEWEST = 64
"""Number of newest iterations from which tokens that a client did not get are subtracted; they are recorded late."""

Notify = Callable[[Choice, StepOutcome, "Iteration"], object]
"""Delivers the outcome of a choice, and writes its reward into the iteration."""


@dataclass(slots=True, eq=False, kw_only=True)
class Iteration:
    """An iteration of an engine, and the choice that it verifies; `decided` if a policy made that choice.

    The scheduler gives its batch: request ids, by id the draft tokens to verify, and counts. With its output comes
    `graph`: kind (`GRAPH_KINDS`) and tokens, padding included, of the model's forward pass; None where the engine does
    not report it. `drafted` and `accepted` tokens are in the order of the requests. `drafters` made late drafts, by
    request id, for which there were `places`.

    The batch is what the scheduler knew: with an iteration in flight it may have requests that end there. Of their
    tokens there `context_tokens` has one each, until all are known.
    """

    request_ids: list[str]
    drafts: Mapping[str, Sequence[int]]
    waiting: int
    context_tokens: int
    prefill_tokens: int
    graph: tuple[str, int] | None = None
    number: int = 0
    start_s: float = 0.0
    verified: Choice = NO_CHOICE
    decided: bool = False
    draft_s_before: float | None = 0.0
    next_depth: int = 0
    drafters: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    num_generated: int = 0
    draft_s: float | None = 0.0
    late_s: float = 0.0
    duration_s: float = 0.0
    reward: float | None = None
    sampled: bool = False

    @property
    def batch(self) -> int:
        return len(self.request_ids)

    @property
    def outcome(self) -> StepOutcome:
        """Outcome of the choice; its time includes its own drafting, not that for the next iteration."""
        drafting_s = 0.0 if self.draft_s is None else (self.draft_s_before or 0.0) - self.draft_s
        speculates = self.verified.strategy.speculates
        return StepOutcome(
            elapsed_s=self.duration_s + drafting_s,
            batch=self.batch,
            drafted=self.drafted if speculates else (),
            accepted=self.accepted if speculates else (),
            had_prefill=self.prefill_tokens > 0,
        )

    def common(self, other: Iteration, counts: Sequence[int]) -> int:
        """Sum of `counts`, one of each request here, over requests that the `other` has too."""
        if self.request_ids is other.request_ids:
            return sum(counts)
        theirs = set(other.request_ids)
        return sum(count for name, count in zip(self.request_ids, counts, strict=True) if name in theirs)

    def rewarded(self, reward: float | None) -> None:
        """Set the reward of the choice that this iteration verified."""
        self.reward = reward


class SampledTokens:
    """Sampled tokens by request. While the batch stays the same they are added up without a look at any request."""

    def __init__(self) -> None:
        self._request_ids: Sequence[str] = ()
        self._sums: Sequence[int] = ()
        self._drained: list[tuple[str, int]] = []
        self._newest: deque[tuple[Iteration, Sequence[int]]] = deque(maxlen=NEWEST)

    def add(self, iteration: Iteration, counts: Sequence[int]) -> None:
        """Count the tokens of an iteration that has landed, in the order of its requests."""
        self._newest.append((iteration, counts))
        request_ids = iteration.request_ids
        if request_ids == self._request_ids:
            self._sums = list(map(add, self._sums, counts))
            return
        self._drained += zip(self._request_ids, self._sums, strict=True)
        self._request_ids, self._sums = request_ids, counts

    def drain(self) -> list[tuple[str, int]]:
        """Return and clear the tokens by request id; an id may occur several times."""
        drained = [*self._drained, *zip(self._request_ids, self._sums, strict=True)]
        self._drained, self._request_ids, self._sums = [], (), ()
        return drained

    def subtract(self, request_id: str, surplus: int) -> None:
        """Subtract the last tokens of a request, which its client did not get, from the iterations that made them."""
        for iteration, counts in reversed(self._newest):
            if surplus <= 0:
                return
            if request_id in iteration.request_ids:
                taken = min(counts[iteration.request_ids.index(request_id)], surplus)
                iteration.num_generated -= taken
                surplus -= taken


class Stopwatch:
    """Total seconds spent in `with stopwatch:` blocks, which must not be nested."""

    __slots__ = ("_clock", "_entered", "seconds")

    def __init__(self, clock: Clock):
        self.seconds = 0.0
        self._clock = clock

    def __enter__(self) -> None:
        self._entered = self._clock()

    def __exit__(self, *exception: object) -> None:
        self.seconds += self._clock() - self._entered


class IterationTracker:
    """Records iterations as an engine runs them, and notifies the policy of each choice's outcome.

    Calls per iteration: `start`, `schedule`, `choose` if there is a choice, `verified`, `sampled`, and `drafted` if
    drafts are made next to the scheduler. Those scheduled and not yet `verified` are `in_flight`, the oldest first; all
    that have `ended` in this rollout are kept until they are drained. An iteration lasts until the next one starts;
    `late_s` of a drafter's feeding does not count. With `overlapped` (asynchronous scheduling) durations run from
    output to output, and drafting time is unknown.

    Where the engine waits (`end_iteration`, `pause`) the last iteration ends at its own output or drafts.
    `num_generated` counts tokens that clients got: sampled tokens and accepted drafts, but none after a response's end
    (`Control`).

    `num_scheduled` iterations of this rollout were scheduled. `begin` opens a rollout and `end` closes it; outside of
    rollouts outcomes are delivered and no rows are kept. Times in rows are seconds since `origin`, the time of `begin`.
    `verified` takes O(batch), everything else O(1); a rollout holds
    O(batch) per iteration that verified drafts.
    """

    def __init__(
        self,
        notify: Notify,
        *,
        worker: int = 0,
        overlapped: bool = False,
        clock: Clock = time.perf_counter,
    ):
        self.worker = worker
        self.overlapped = overlapped
        self.clock = clock
        self._notify = notify
        self.clear()
        self._zeros: tuple[int, ...] = ()
        self.in_flight: deque[Iteration] = deque()
        self.begin(0)
        self.is_open = False

    def begin(self, rl_step: int) -> None:
        """Open a rollout with no rows, iteration 0 and time 0. The active choice stays."""
        self.rl_step = rl_step
        self.is_open = True
        self.origin = self._busy_until_s = self._last_end_s = self.clock()
        self.ended: list[Iteration] = []
        self.num_scheduled = len(self.in_flight)
        for number, iteration in enumerate(self.in_flight):
            iteration.number = number
        self._stale = 0
        self._last: Iteration | None = None
        self._draft_s: float | None = 0.0

    def end(self) -> None:
        """Close the rollout; its last iteration ends now if it has not yet."""
        self._close(self.clock())
        self.is_open = False

    def drop_in_flight(self) -> None:
        """Count no iteration in flight, of requests that have ended: its output may have waited for new ones."""
        self.num_scheduled -= len(self.in_flight) - self._stale
        self._stale = len(self.in_flight)

    @property
    def drops_next(self) -> bool:
        """True if the oldest iteration in flight belongs to no rollout."""
        return self.overlapped and self._stale > 0

    def start(self) -> None:
        """Start an iteration, which ends the previous one."""
        self._start_s = self.clock()
        self._close(self._start_s)

    def schedule(self, work: Iteration) -> Strategy:
        """Record the iteration's batch; return the strategy that it verifies. Without `choose` it drafts nothing."""
        work.number, work.start_s = self.num_scheduled, self._start_s
        work.verified, work.decided, work.draft_s_before = self.in_force, self._decided, self._draft_s
        work.places = work.drafts
        for before in self.in_flight:
            if before.places:
                # vLLM counts drafts in flight as kept.
                places = [len(before.places.get(name, ())) for name in before.request_ids]
                work.context_tokens -= before.common(work, places)
        self._last = work
        self.in_flight.append(work)
        self.num_scheduled += 1
        self._draft_s = None if self.overlapped else 0.0
        self.clear()
        return work.verified.strategy

    def choose(self, choice: Choice, *, decided: bool = True) -> None:
        """Set the choice that the scheduled iteration drafts at its end and the next one verifies."""
        assert self._last is not None
        self.in_force, self._decided = choice, decided
        self._last.next_depth = choice.strategy.draft_depth

    def verified(self, counts: Sequence[int]) -> Iteration:
        """Complete the oldest iteration in flight: `counts` are each request's new tokens, accepted drafts included."""
        iteration = self.in_flight.popleft()
        if iteration.drafts:
            iteration.drafted = drafted = list(map(len, map(iteration.drafts.get, iteration.request_ids, repeat(()))))
            iteration.accepted = [count - 1 if n and count else 0 for count, n in zip(counts, drafted, strict=True)]
            for later in self.in_flight:
                later.context_tokens += iteration.common(later, iteration.accepted)
        else:
            # Iterations without drafts share their zeros, since a rollout keeps all of its iterations until it ends.
            if len(self._zeros) != iteration.batch:
                self._zeros = (0,) * iteration.batch
            iteration.drafted = iteration.accepted = self._zeros
        iteration.num_generated = sum(counts)
        return iteration

    def sampled(self, iteration: Iteration) -> None:
        """Mark the output of `iteration` as processed; with overlapped scheduling this ends the iteration."""
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
        """Record drafting for the next iteration: next to the scheduler since `since_s`, in workers for `learned_s`.

        `late_s` of it fed drafters text of earlier iterations, and is charged to no choice.
        """
        self._busy_until_s = self.clock()
        self._draft_s = self._busy_until_s - since_s - late_s + learned_s
        if self._last is not None and not self.overlapped:
            self._last.draft_s, self._last.late_s = self._draft_s, late_s

    def interrupted(self, seconds: float) -> None:
        """Exclude `seconds` of other work since the last output from the iteration's duration."""
        if self._last is not None and not self.overlapped:
            self._last.late_s += seconds

    def end_iteration(self) -> None:
        """End the last iteration at its output or drafts; one without output continues. The choice stays active."""
        if self._last is not None and self._last.sampled:
            self._close(self._busy_until_s)

    def pause(self) -> None:
        """End the last iteration as `end_iteration` does, with no request left, and clear the active choice."""
        self.end_iteration()
        self.clear()

    def clear(self) -> None:
        """Clear the active choice: the next iteration verifies nothing."""
        self.in_force, self._decided = NO_CHOICE, False

    def _close(self, now: float) -> None:
        """End the iteration scheduled last, unless it has ended or its output is missing."""
        iteration, self._last = self._last, None
        if iteration is not None and iteration.sampled and not self.overlapped:
            self._finish(iteration, now)

    def _finish(self, iteration: Iteration, now: float) -> None:
        iteration.duration_s = now - iteration.start_s - iteration.late_s
        self._last_end_s = now
        if self.is_open:
            self.ended.append(iteration)
        if iteration.decided and iteration.verified.learns:
            self._notify(iteration.verified, iteration.outcome, iteration)

    def drain(self, keep: int = 0) -> EndedIterations:
        """Return and clear the ended iterations of the rollout, all but the `keep` newest."""
        cut = max(len(self.ended) - keep, 0)
        iterations, self.ended = self.ended[:cut], self.ended[cut:]
        return EndedIterations(self.rl_step, self.worker, self.origin, iterations)


@dataclass(frozen=True, slots=True)
class EndedIterations:
    """Ended iterations of the rollout of `rl_step` that began at `origin`.

    Their tables are made after the rollout, or in another thread: between forward passes, with cold caches, they would
    cost several times as much.
    """

    rl_step: int
    worker: int
    origin: float
    ended: Sequence[Iteration]

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the rows of `iterations.parquet`, and for choices of a policy the rows of `decisions.parquet`."""
        ended, chosen = self.ended, [it for it in self.ended if it.decided]
        graphs = [it.graph or (None, None) for it in ended]
        iterations = self._table(
            "iterations",
            ended,
            t_start=[it.start_s - self.origin for it in ended],
            duration=[it.duration_s for it in ended],
            draft_duration=[it.draft_s for it in ended],
            batch=[it.batch for it in ended],
            num_waiting=[it.waiting for it in ended],
            context_tokens=[it.context_tokens for it in ended],
            prefill_tokens=[it.prefill_tokens for it in ended],
            num_drafted=[sum(it.drafted) for it in ended],
            num_accepted=[sum(it.accepted) for it in ended],
            num_generated=[it.num_generated for it in ended],
            accepted_per_request=[it.accepted if it.verified.strategy.speculates else None for it in ended],
            next_draft_depth=[it.next_depth for it in ended],
            graph=[kind for kind, _ in graphs],
            graph_tokens=[tokens for _, tokens in graphs],
        )
        decisions = self._table(
            "decisions",
            chosen,
            bucket=[it.verified.bucket for it in chosen],
            propensity=[it.verified.propensity for it in chosen],
            reward=[it.reward for it in chosen],
        )
        return iterations, decisions

    def _table(self, name: str, ended: Sequence[Iteration], **values: list[Any]) -> pa.Table:
        num = len(ended)
        place: dict[str, list[Any]] = {"rl_step": [self.rl_step] * num, "worker": [self.worker] * num}
        place["iteration"] = [it.number for it in ended]
        known = {**place, **strategy_columns([it.verified.strategy for it in ended]), **values}
        return pa.table(
            {field.name: pa.array(known.get(field.name, [None] * num), field.type) for field in TABLES[name]}
        )
