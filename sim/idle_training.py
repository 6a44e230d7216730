"""Spot training in virtual time: the worker coordinator stepped by a rollout's simulation, and the training it gives.

Nothing here adds events to the simulation: training does not change the rollout, so the coordinator, the trainers and
their progress are updated at each event of the rollout.
"""

from tltlab.coordination.machine import (
    CoordinatorConfig,
    CoordinatorState,
    Event,
    RolloutEnded,
    RolloutStarted,
    TrainerReady,
    WorkerIdle,
    advance,
)
from tltlab.coordination.progress import Progress, SpotTraining, Trained
from tltlab.records import frozen
from tltlab.state import DrafterState


@frozen
class SpotSpan:
    """A row of `spans`: "spot_train" on a worker's lane, or "checkpoint" on the drafter's, the last of a period."""

    lane: str
    kind: str
    start_s: float
    end_s: float
    detail: str


@frozen
class SpotResult:
    """Training in the idle time of one rollout.

    `drafter` is what the next RL step finds: age 0 if this rollout updated it. Worker-seconds up to the rollout's end:
    `idle_worker_s` without requests, `trained_worker_s` of them in updates. `release_delay_s`: how long the RL step
    waited for trainers to yield after the rollout.
    """

    spans: tuple[SpotSpan, ...]
    trained: Trained
    drafter: DrafterState
    idle_worker_s: float
    trained_worker_s: float
    release_delay_s: float


class IdleUse:
    """Use of idle workers while others still run: none here. Methods are called at the virtual time of their event.

    A rollout begins; a worker has nothing left to do in this rollout; all workers are done.
    """

    def rollout_started(self, num_workers: int, now: float) -> None: ...
    def worker_idle(self, worker: int, now: float) -> None: ...
    def rollout_ended(self, now: float) -> None: ...


class SimulatedSpotTrainer(IdleUse):
    """Trains the drafter on idle workers; its updates and data last from rollout to rollout.

    Calls come in order of time, in seconds of the environment's clock. Every worker begins busy and is idle once, so a
    rollout has one training period at most, which ends when the last worker is idle. What an idle worker has generated
    are data.

    >>> spot = SimulatedSpotTrainer(SpotTraining(start_s=5.0))
    >>> spot.rollout_started(num_workers=2, now=0.0)
    >>> spot.worker_idle(0, 10.0)
    >>> spot.worker_idle(1, 42.0)
    >>> spot.rollout_ended(42.0)
    >>> spot.result.trained.updates  # 27 s at 29.6 samples/s, 8 an update
    99
    """

    def __init__(self, model: SpotTraining, config: CoordinatorConfig = CoordinatorConfig()):
        self.model = model
        self.config = config
        self.drafter = DrafterState()
        self._rollout = -1
        self._has_data = False
        self.result: SpotResult
        """Report of the last rollout."""

    def rollout_started(self, num_workers: int, now: float) -> None:
        """A rollout begins."""
        self._rollout += 1
        self._begin_s = self._now = now
        self._coordinator = CoordinatorState(config=self.config, rl_step=self._rollout - 1)
        self._idle_from_s: dict[int, float] = {}
        self._joined_s: dict[int, float] = {}
        self._progress = Progress()
        self._trained_s = self._release_delay_s = 0.0
        self._trained = Trained()
        self._spans: list[SpotSpan] = []
        self._has_data &= self.model.carried_share > 0
        for worker in range(num_workers):
            self._feed(TrainerReady(worker=worker))
        self._feed(RolloutStarted(rl_step=self._rollout))

    def worker_idle(self, worker: int, now: float) -> None:
        """The worker has neither running nor waiting requests."""
        self._train_until(now)
        self._idle_from_s[worker] = now
        # A worker without a share in the rollout is idle from the start and has finished nothing.
        self._has_data |= now > self._begin_s
        self._feed(WorkerIdle(worker=worker))

    def rollout_ended(self, now: float) -> None:
        """No request is left."""
        self._train_until(now)
        self._feed(RolloutEnded(rl_step=self._rollout))
        idle_worker_s = 0.0
        for _, idle_s in sorted(self._idle_from_s.items()):
            idle_worker_s += now - idle_s
        updates = self._trained.updates
        self.drafter = DrafterState(age=0 if updates else self.drafter.age + 1, updates=self.drafter.updates + updates)
        self.result = SpotResult(
            spans=tuple(sorted(self._spans, key=lambda span: (span.start_s, span.lane))),
            trained=self._trained,
            drafter=self.drafter,
            idle_worker_s=idle_worker_s,
            trained_worker_s=self._trained_s,
            release_delay_s=self._release_delay_s,
        )

    def _train_until(self, now: float) -> None:
        assert now >= self._now, f"time goes backwards: {now} after {self._now}"
        members, before = len(self._coordinator.members), self._progress
        if members:
            self._progress = self.model.advance(before, now - self._now, members, has_data=self._has_data)
            self._trained_s += (self._progress.trained_s - before.trained_s) * members
        self._now = now

    def _feed(self, event: Event) -> None:
        """Give an event to the coordinator, and have the training period open, regroup or end as it decides."""
        before = self._coordinator.members
        self._coordinator, _ = advance(self._coordinator, event, self._now)
        after = self._coordinator.members
        if before and not after:
            self._end_period(self._coordinator.term)
        elif after and not before:
            self._progress = Progress(setup_left_s=self.model.start_s)
        elif before != after:
            self._progress = self._progress.regrouped(self.model.join_s)
        for member in after:
            self._joined_s.setdefault(member, self._now)

    def _end_period(self, term: int) -> None:
        """Stop all members; one that has not yielded after the coordinator's `yield_timeout_s` is killed."""
        model, timeout_s = self.model, self.config.yield_timeout_s
        killed = model.yield_s > timeout_s
        end_s = self._now + min(model.yield_s, timeout_s)
        self._release_delay_s = end_s - self._now
        self._trained = model.killed(self._progress) if killed else model.stopped(self._progress)
        rows = [(f"worker {worker}", "spot_train", joined_s, end_s) for worker, joined_s in self._joined_s.items()]
        if not killed and self._trained.checkpoints:
            rows.append(("drafter", "checkpoint", end_s, end_s + model.checkpoint_s))
        self._spans = [
            SpotSpan(lane=lane, kind=kind, start_s=start_s, end_s=done_s, detail=f"term {term}")
            for lane, kind, start_s, done_s in rows
            if done_s > start_s
        ]
