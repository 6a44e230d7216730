"""Spot training in virtual time: the worker coordinator stepped by a rollout's simulation, and what it comes to.

Nothing here adds events to the simulation: training does not change the rollout beside it, so the coordinator, the
trainers and their progress are brought up to date whenever the rollout has something to say.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tltlab.coordination.machine import CoordinatorConfig, CoordinatorState, Period, advance, wakeup_s
from tltlab.coordination.messages import (
    Event,
    Released,
    RolloutEnded,
    RolloutStarted,
    StopTraining,
    Tick,
    Train,
    WorkerGone,
    WorkerReport,
)
from tltlab.coordination.progress import Progress, SpotTraining, Trained
from tltlab.errors import ConfigError
from tltlab.state import DrafterState


class Clock(Protocol):
    """What `attach` needs of a `simpy.Environment`."""

    @property
    def now(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSpan:
    """A row of `spans`: "spot_train" on a worker's lane, or "checkpoint" on the drafter's."""

    lane: str
    kind: str
    start_s: float
    end_s: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotResult:
    """What the idle time of one rollout came to.

    `trained` sums over the rollout's `num_periods`; `drafter` is what the next RL step finds: age 0 if this rollout
    updated it. Worker-seconds up to the rollout's end: `idle_worker_s` without requests, `held_worker_s` of them in a
    training group (set-up, checkpoints and waiting included), `trained_worker_s` of them in updates. `data_wait_s` is
    a group's, not its workers'. `interference_s` per worker: how long the rollout, or what comes after it, waited for
    this worker's trainer to yield; `release_delay_s` the same for the RL step, from the end of the rollout on.
    """

    spans: tuple[SpotSpan, ...] = ()
    trained: Trained = field(default_factory=Trained)
    drafter: DrafterState = field(default_factory=DrafterState)
    num_periods: int = 0
    idle_worker_s: float = 0.0
    held_worker_s: float = 0.0
    trained_worker_s: float = 0.0
    data_wait_s: float = 0.0
    interference_s: tuple[float, ...] = ()
    release_delay_s: float = 0.0

    @property
    def used_share(self) -> float:
        """Share of the idle worker-seconds that went into updates; 0 where nobody was idle."""
        return self.trained_worker_s / self.idle_worker_s if self.idle_worker_s > 0 else 0.0


@dataclass(slots=True)
class _Worker:
    """A simulated worker at the other end of the coordinator's messages; `free_s`: when its trainer is out."""

    busy: bool = True
    seq: int = 0
    acked: int = 0
    term: int | None = None
    since_s: float = 0.0
    leaving: bool = False
    free_s: float = math.inf
    idle_from_s: float | None = None


class SimulatedSpotTrainer:
    """Trains the drafter on idle workers; an `engine.IdleUse` whose updates and data last from rollout to rollout.

    Calls come in order of time, in seconds of the environment's clock; every worker begins busy. `responses_finished`
    tells the data's size, which only `max_epochs` needs: without it an idle worker's responses are data of any size.

    >>> from types import SimpleNamespace
    >>> spot = SimulatedSpotTrainer(SpotTraining(start_s=5.0))
    >>> spot.attach(SimpleNamespace(now=0.0), num_workers=2)
    >>> spot.worker_idle(0, 10.0)
    >>> spot.worker_idle(1, 42.0)
    >>> spot.rollout_ended(42.0)
    >>> spot.result.trained.updates  # 27 s at 29.6 samples/s, 8 an update
    99
    """

    def __init__(self, model: SpotTraining | None = None, config: CoordinatorConfig | None = None) -> None:
        self.model = model or SpotTraining()
        # Simulated messages are never lost, and simulated workers have no heartbeat.
        self.config = (config or CoordinatorConfig()).model_copy(update={"resend_s": math.inf, "gone_after_s": None})
        self.drafter = DrafterState()
        self._rollout = -1
        self._has_data = False
        self._lengths: list[float] = []
        self._result: SpotResult | None = None

    @property
    def result(self) -> SpotResult:
        """Of the rollout that ended last."""
        assert self._result is not None, "no rollout has ended yet"
        return self._result

    def attach(self, env: Clock, num_workers: int) -> None:
        """A rollout begins at `env.now`."""
        self._rollout += 1
        self._begin_s = self._now = float(env.now)
        self._state = CoordinatorState(config=self.config, rl_step=self._rollout - 1)
        self._workers = [_Worker() for _ in range(num_workers)]
        self._leaving: list[tuple[float, int, int]] = []
        self._progress = Progress()
        self._yield_s = 0.0
        self._member_died = False
        self._data_tokens = self.model.carried_tokens(self._lengths)
        self._has_data &= self.model.carried_share > 0
        self._lengths = []
        self._trained = Trained()
        self._num_periods, self._opened_s = 0, self._now
        self._idle_s = self._held_s = self._trained_s = self._waited_s = 0.0
        self._interference_s = [0.0] * num_workers
        self._released_s = math.inf
        self._spans: list[SpotSpan] = []
        self._checkpoints_s: list[float] = []
        self._feed(RolloutStarted(rl_step=self._rollout))
        for worker in range(num_workers):
            self._feed(self._report(worker))

    def responses_finished(self, response_tokens: Sequence[float], now: float) -> None:
        """Responses of these lengths have finished: data to train on, the longest of them in the next rollout too."""
        self._catch_up(now)
        self._lengths.extend(response_tokens)
        self._data_tokens += float(sum(response_tokens))
        self._has_data |= self._data_tokens > 0

    def worker_idle(self, worker: int, now: float) -> None:
        """The worker has neither running nor waiting requests."""
        self._catch_up(now)
        state = self._workers[worker]
        state.busy, state.idle_from_s = False, now
        # A worker without a share in the rollout is idle from the start and has finished nothing.
        self._has_data |= now > self._begin_s
        self._feed(self._report(worker))

    def worker_busy(self, worker: int, now: float) -> float:
        """The worker has requests again; returns the seconds before its device is free for them."""
        self._catch_up(now)
        self._end_idle(self._workers[worker])
        self._workers[worker].busy = True
        self._feed(self._report(worker))
        return self._wait_for(worker)

    def worker_gone(self, worker: int, now: float) -> None:
        """The worker's process ended, and a group that it was in with it; its next report brings it back."""
        self._catch_up(now)
        self._end_idle(self._workers[worker])
        self._end_hold(self._workers[worker])
        self._let_go(worker)
        self._member_died = self._state.period is not None and worker in self._state.period.members
        self._feed(WorkerGone(worker=worker))
        self._member_died = False

    def rollout_ended(self, now: float) -> None:
        """No request is left. Raises ConfigError where `max_epochs` is set and nobody told the responses' lengths."""
        self._catch_up(now)
        for worker in self._workers:
            self._end_idle(worker)
        self._feed(RolloutEnded(rl_step=self._rollout))
        for index, worker in enumerate(self._workers):
            if not worker.busy:
                self._wait_for(index)
        while math.isinf(self._released_s):
            self._catch_up(min(self._leaving[0][0], wakeup_s(self._state)))
        if self.model.max_epochs is not None and self._has_data and self._data_tokens <= 0:
            raise ConfigError("max_epochs limits training by the data, but no lengths of finished responses were given")
        updates = self._trained.updates
        self.drafter = DrafterState(age=0 if updates else self.drafter.age + 1, updates=self.drafter.updates + updates)
        self._result = SpotResult(
            spans=tuple(sorted(self._spans, key=lambda span: (span.start_s, span.lane))),
            trained=self._trained,
            drafter=self.drafter,
            num_periods=self._num_periods,
            idle_worker_s=self._idle_s,
            held_worker_s=self._held_s,
            trained_worker_s=self._trained_s,
            data_wait_s=self._waited_s,
            interference_s=tuple(self._interference_s),
            release_delay_s=self._released_s - now,
        )

    def _catch_up(self, now: float) -> None:
        """Let everything happen that is due by `now`."""
        while self._leaving:
            free_s, index, term = self._leaving[0]
            kill_s = wakeup_s(self._state)
            if min(free_s, kill_s) > now:
                break
            self._integrate(min(free_s, kill_s))
            if free_s > kill_s:
                self._feed(Tick())
                continue
            heapq.heappop(self._leaving)
            if self._workers[index].term == term:
                self._let_go(index)
                self._feed(self._report(index))
        self._integrate(now)

    def _integrate(self, now: float) -> None:
        assert now >= self._now, f"time goes backwards: {now} after {self._now}"
        period, before = self._state.period, self._progress
        if period is not None:
            members = len(period.members)
            self._progress, begun = self.model.advance(before, now - self._now, members, self._updates_allowed())
            self._checkpoints_s += [self._now + offset for offset in begun]
            self._trained_s += (self._progress.trained_s - before.trained_s) * members
            self._waited_s += self._progress.waited_s - before.waited_s
        self._now = now

    def _updates_allowed(self) -> float:
        """By the data, less what earlier periods of this rollout used of them."""
        if self.model.max_epochs is None:
            return math.inf if self._has_data else 0.0
        return self.model.max_updates(self._data_tokens) - self._trained.updates - self._trained.updates_lost

    def _report(self, index: int) -> WorkerReport:
        worker = self._workers[index]
        worker.seq += 1
        return WorkerReport(
            worker=index, seq=worker.seq, rl_step=self._rollout, busy=worker.busy, term=worker.term, acked=worker.acked
        )

    def _feed(self, event: Event) -> None:
        """Give an event to the coordinator and carry out what it commands, answers included."""
        events = deque([event])
        while events:
            before = self._state.period
            self._state, commands = advance(self._state, events.popleft(), self._now)
            self._follow(before, self._state.period)
            for command in commands:
                if isinstance(command, Released):
                    self._released_s = self._now
                    continue
                worker = self._workers[command.worker]
                worker.acked = command.seq
                if isinstance(command, Train):
                    # Not answered at once: any later report acknowledges it.
                    if worker.term is None:
                        worker.term, worker.since_s, worker.leaving = command.term, self._now, False
                    continue
                self._end_hold(worker)
                if isinstance(command, StopTraining) and worker.term is not None and self._yield_s > 0:
                    worker.free_s = self._now + self._yield_s
                    heapq.heappush(self._leaving, (worker.free_s, command.worker, worker.term))
                else:
                    self._let_go(command.worker)
                    events.append(self._report(command.worker))

    def _follow(self, before: Period | None, after: Period | None) -> None:
        """Keep the group's books: a period that opened, ended or has other members now."""
        same_term = before is not None and after is not None and before.term == after.term
        if before is not None and before != after:
            self._yield_s = self.model.yield_delay_s(self._progress, len(before.members))
            if same_term:
                self._progress = self._progress.regrouped(self.model.join_s)
            else:
                self._end_period(before.term)
        if after is not None and not same_term:
            self._progress = Progress(setup_left_s=self.model.start_s)
            self._opened_s = self._now

    def _end_period(self, term: int) -> None:
        model, progress, now = self.model, self._progress, self._now
        killed = self._member_died or self._yield_s > self.config.yield_timeout_s
        outcome = model.killed(progress) if killed else model.stopped(progress)
        self._trained += outcome
        self._num_periods += now > self._opened_s
        end_s = now + (0.0 if self._member_died else min(self._yield_s, self.config.yield_timeout_s))
        spans = [(start_s, start_s + model.checkpoint_s) for start_s in self._checkpoints_s]
        if killed:
            spans = [(start_s, min(done_s, end_s)) for start_s, done_s in spans]
        elif len(spans) < outcome.checkpoints:
            spans.append((end_s, end_s + model.checkpoint_s))
        detail = f"term {term}"
        self._spans += [
            SpotSpan(lane="drafter", kind="checkpoint", start_s=start_s, end_s=done_s, detail=detail)
            for start_s, done_s in spans
            if done_s > start_s
        ]
        self._checkpoints_s = []

    def _let_go(self, index: int) -> None:
        """The worker's device is free of training."""
        worker = self._workers[index]
        if worker.term is not None and self._now > worker.since_s:
            span = SpotSpan(
                lane=f"worker {index}",
                kind="spot_train",
                start_s=worker.since_s,
                end_s=self._now,
                detail=f"term {worker.term}",
            )
            self._spans.append(span)
        worker.term = None

    def _end_idle(self, worker: _Worker) -> None:
        if worker.idle_from_s is not None:
            self._idle_s += self._now - worker.idle_from_s
        worker.idle_from_s = None

    def _end_hold(self, worker: _Worker) -> None:
        """Its time as a member is over, though it may take a while to leave."""
        if worker.term is not None and not worker.leaving:
            self._held_s += self._now - worker.since_s
        worker.leaving = True

    def _wait_for(self, index: int) -> float:
        worker = self._workers[index]
        if worker.term is None:
            return 0.0
        wait_s = min(worker.free_s, self._state.workers[index].stop_by_s) - self._now
        self._interference_s[index] += wait_s
        return wait_s
