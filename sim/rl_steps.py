"""Whole RL steps: simulated rollouts and stage costs put on GPUs that share the work, or that split it.

Generation and training are two processes. A bounded store carries the responses from one to the other; the weights go
back while the engines are between two rollouts. Rollout k waits for the update of RL step k - 1 - `max_staleness`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd
import simpy

from tltlab.arrays import Floats
from tltlab.costs.stages import STAGES, StageCosts, served_s
from tltlab.errors import ConfigError
from tltlab.planning.dispatch import stage_left
from tltlab.records import Json, frozen
from tltlab.sim.engine.record import SimulatedRollout
from tltlab.traces.schema import TABLES, span
from tltlab.traces.trace import Trace

from .simulate import SimResult


@frozen
class Pools:
    """GPUs that generate and GPUs that train; `shared` where they are the same."""

    rollout_gpus: int
    train_gpus: int
    shared: bool

    @property
    def num_gpus(self) -> int:
        return self.rollout_gpus if self.shared else self.rollout_gpus + self.train_gpus


@frozen
class Colocated:
    """All GPUs roll out, then compute log-probs, train and sync in turn, as in VeRL and TLT."""

    gpus_per_worker: int = 1

    name = "colocated"
    max_staleness = 0

    def pools(self, num_workers: int, stages: StageCosts) -> Pools:
        num_gpus = num_workers * self.gpus_per_worker
        if stages.num_gpus not in (None, num_gpus):
            raise ConfigError(
                f"the stage costs are for {stages.num_gpus} GPUs, but {num_workers} workers of {self.gpus_per_worker} "
                f"are {num_gpus}: take stage costs for {num_gpus} GPUs or other workers"
            )
        return Pools(rollout_gpus=num_gpus, train_gpus=num_gpus, shared=True)


@frozen
class Separate:
    """Engines and trainer on separate GPUs, as in Open-R1.

    With `max_staleness` 0 one side waits for the other; with 1 the next rollout runs during training, on weights one
    update old, with more rollouts run ahead of training where it is the slower side for a while. `train_gpus` defaults
    to what the stage costs are for, else to as many as generate.
    """

    gpus_per_worker: int = 1
    train_gpus: int | None = None
    max_staleness: int = 0

    name = "separate"

    def pools(self, num_workers: int, stages: StageCosts) -> Pools:
        rollout_gpus = num_workers * self.gpus_per_worker
        train_gpus = self.train_gpus or stages.num_gpus or rollout_gpus
        if stages.num_gpus not in (None, train_gpus):
            raise ConfigError(
                f"the stage costs are for {stages.num_gpus} GPUs, but {train_gpus} train: take stage costs for "
                f"{train_gpus} GPUs or train_gpus = {stages.num_gpus}"
            )
        return Pools(rollout_gpus=rollout_gpus, train_gpus=train_gpus, shared=False)


Topology = Colocated | Separate
"""GPUs that do what, and how many updates the weights of a rollout may lag behind."""


@frozen
class RunResult:
    """A simulated run of whole RL steps.

    `steps`: updates_behind (of its rollout's weights), rl_step, t_start (start of its rollout), the five stages'
    seconds (sync_s with an engine's sleep and wake), `step_s` from the end of the RL step before to its own end,
    `latency_s` from t_start to its own end, policy_version. An RL step ends when its weights are in the engines; step_s
    adds up to the run. `spans`: those of the trainer, and of workers outside rollouts, as in a trace. `busy_gpu_s`
    are the GPU-seconds in which a GPU of a worker or of the trainer works. `step_s` is the mean of a long run that
    goes through these RL steps again and again: a pipeline fills and empties once, however long the run.
    """

    topology: Topology
    num_gpus: int
    steps: pd.DataFrame
    busy_gpu_s: float
    simulated: SimResult
    step_s: float
    make_spans: Callable[[], pd.DataFrame]

    @property
    def run_s(self) -> float:
        """Seconds from the first rollout's start to the last sync's end."""
        return float(self.steps["step_s"].sum())

    @property
    def updates_behind(self) -> float:
        """Updates that the weights of a rollout lag behind those it is trained with, mean over the RL steps."""
        return float(self.steps["updates_behind"].mean())

    @property
    def rollout_share(self) -> float | None:
        """Seconds of rollout per second of a long run; None for one of no time."""
        return float(self.steps["rollout_s"].mean()) / self.step_s if self.step_s > 0 else None

    @property
    def idle_gpu_fraction(self) -> float | None:
        """Idle GPU-seconds per GPU-second of a long run; None for one of no time."""
        held_s = self.num_gpus * len(self.steps) * self.step_s
        return max(0.0, 1.0 - self.busy_gpu_s / held_s) if held_s > 0 else None

    @cached_property
    def spans(self) -> pd.DataFrame:
        """Spans of the trainer, and of workers outside rollouts."""
        return self.make_spans()

    @cached_property
    def trace(self) -> Trace:
        """The simulation's trace with the stages in its steps and spans, to draw or to write."""
        trace = self.simulated.trace
        table = trace.steps
        assert table is not None
        columns = ["t_start", "rollout_s", *STAGES, "policy_version"]
        steps = table.drop(columns=columns).merge(self.steps[["rl_step", *columns]], on="rl_step")
        version = self.steps.set_index("rl_step")["policy_version"]
        workload = trace.workload
        spans = [frame for frame in (trace.spans, self.spans) if frame is not None and len(frame)]
        staleness = f", staleness up to {self.topology.max_staleness}" if self.topology.max_staleness else ""
        notes = f"{trace.manifest.notes or 'simulated'}; {self.topology.name}, {self.num_gpus} GPUs{staleness}"
        return trace.replace(
            manifest=trace.manifest.model_copy(update={"notes": notes}),
            steps=steps,
            spans=pd.concat(spans, ignore_index=True).sort_values("rl_step", kind="stable") if spans else None,
            workload=workload.assign(policy_version=workload["rl_step"].map(version)),
        )


def run_steps(
    result: SimResult,
    stages: StageCosts,
    *,
    topology: Topology = Colocated(),
    num_updates: int = 1,
    fused: bool = False,
    streamed: bool = False,
) -> RunResult:
    """Make whole RL steps of a simulation's rollouts; the topology defaults to `Colocated()`.

    The RL steps of `result` follow each other. `fused`: GPUs that are done with a rollout compute log-probs of what has
    ended (`stage_left`). `streamed`: a trainer on separate GPUs takes each group once its last sample is graded
    (StreamRL, arXiv 2504.15930). The time is proportional to the group's tokens; the optimizer's share follows at the
    end. Grading is then part of the trainer's waiting. Training takes `num_updates` optimizer steps on each. Responses
    without a reward count as trained. Raises ConfigError for no RL step, an RL step without responses or workers, a
    stage of unknown cost, stage costs for another number of GPUs, and streaming where all GPUs generate.
    """
    rollouts = list(result.rollouts)
    if not rollouts:
        raise ConfigError("no RL step to run: the simulation has no rollout")
    num_workers = len(rollouts[0].worker_end_s)
    if num_workers < 1:
        raise ConfigError("the rollouts have no workers: simulate at least one")
    pools = topology.pools(num_workers, stages)
    if streamed and pools.shared:
        raise ConfigError("streamed training needs GPUs that do not generate: take the topology separate")
    times = [_times(rollout, stages, pools.shared, num_updates, fused, streamed) for rollout in rollouts]
    pipeline = _Pipeline(times, topology.max_staleness)
    steps = _steps(rollouts, times, pipeline)
    return RunResult(
        topology=topology,
        num_gpus=pools.num_gpus,
        steps=steps,
        busy_gpu_s=_busy_gpu_s(rollouts, steps, pools),
        simulated=result,
        step_s=_step_s(times, topology.max_staleness, pipeline),
        make_spans=partial(_spans, pipeline, steps, num_workers, pools.shared),
    )


def summary(result: RunResult) -> Json:
    """The keys that stages add to `tltlab simulate --json`; seconds are means over the RL steps."""
    return {
        "step_s": result.step_s,
        "rollout_share": result.rollout_share,
        "stages": {name: float(result.steps[name].mean()) for name in ("rollout_s", *STAGES)},
        "topology": result.topology.name,
        "updates_behind": result.updates_behind,
        "num_gpus": result.num_gpus,
        "idle_gpu_fraction": result.idle_gpu_fraction,
    }


@frozen
class _Groups:
    """Groups that a trainer takes during the rollout: when each is graded, since its start, and what training it takes.

    `fixed_s` comes behind the last.
    """

    graded_s: Floats
    work_s: Floats
    fixed_s: float

    @classmethod
    def of(cls, rollout: SimulatedRollout, stages: StageCosts, train_s: float, fixed_s: float) -> _Groups:
        rows, reward = rollout.requests.rows, stages.reward
        assert reward is not None
        lengths = rows["response_tokens"].to_numpy(np.int64)
        graded_s = reward.base_s + served_s(rollout.finish_s, reward.each_s(lengths))
        group, names = pd.factorize(rows["prompt_id"])
        last_s = np.zeros(len(names))
        np.maximum.at(last_s, group, graded_s)
        tokens = np.bincount(group, weights=lengths + rows["prompt_tokens"].to_numpy(np.int64))
        return cls(graded_s=last_s, work_s=(train_s - fixed_s) * tokens / tokens.sum(), fixed_s=fixed_s)

    def busy_s(self, free_s: float) -> list[tuple[float, float]]:
        """The times in which a trainer that is free from `free_s` on works, in order."""
        ends = np.sort(served_s(self.graded_s, self.work_s, free_s))
        order = np.argsort(self.graded_s, kind="stable")
        busy: list[tuple[float, float]] = []
        for end, work in zip(ends.tolist(), self.work_s[order].tolist(), strict=True):
            if busy and end - work <= busy[-1][1] + _SAME_TIME_S:
                busy[-1] = (busy[-1][0], end)
            else:
                busy.append((end - work, end))
        return [*busy[:-1], (busy[-1][0], busy[-1][1] + self.fixed_s)]


_SAME_TIME_S = 1e-9


@frozen
class _StageTimes:
    """Seconds of an RL step's parts; `sleep_s` and `wake_s` lie before and behind what the trainer does."""

    rollout_s: float
    sleep_s: float
    reward_s: float
    inference_s: float
    train_s: float
    sync_s: float
    wake_s: float
    groups: _Groups | None = None


def _times(
    rollout: SimulatedRollout, stages: StageCosts, shared: bool, num_updates: int, fused: bool, streamed: bool
) -> _StageTimes:
    if stages.inference is None or stages.reward is None or stages.train is None or stages.sync is None:
        missing = [name for name in ("inference", "reward", "train", "sync") if getattr(stages, name) is None]
        raise ConfigError(f"the stage costs do not know {', '.join(missing)}: add what it takes, {{}} for nothing")
    work = rollout.requests.work(num_updates)
    inference_s = stages.inference.seconds(work)
    if fused:
        tokens = rollout.requests.response_tokens
        inference_s = stage_left(rollout.finish_s.tolist(), tokens, rollout.worker_end_s, inference_s)
    train_s, groups = stages.train.seconds(work), None
    if streamed:
        fixed_s = stages.inference.base_s + stages.train.base_s + stages.train.per_update_s * num_updates
        groups = _Groups.of(rollout, stages, inference_s + train_s, fixed_s)
    grading_s = stages.reward.seconds(rollout.finish_s, np.asarray(rollout.requests.response_tokens, np.int64))
    return _StageTimes(
        rollout_s=float(rollout.makespan_s),
        sleep_s=stages.sleep_s + (rollout.spot.release_delay_s if rollout.spot else 0.0) if shared else 0.0,
        reward_s=0.0 if streamed else grading_s,
        inference_s=inference_s,
        train_s=train_s,
        sync_s=stages.sync.seconds(),
        wake_s=stages.wake_s if shared else 0.0,
        groups=groups,
    )


@frozen
class _Interval:
    """Something that one RL step does; `start_s` and `end_s` since the start of the run."""

    step: int
    kind: str
    start_s: float
    end_s: float
    detail: str | None = None


class _Pipeline:
    """Generation and training of a run in virtual time: what each did when, in order."""

    def __init__(self, times: Sequence[_StageTimes], max_staleness: int):
        self.times = times
        self.max_staleness = max_staleness
        self.rollouts: list[_Interval] = []
        self.training: list[_Interval] = []
        self.syncs: list[_Interval] = []
        self.done_s: list[float] = []
        self.version_of: list[int] = []
        """How many updates were in the weights of each rollout."""
        self._env = simpy.Environment()
        self._engines = simpy.Resource(self._env, capacity=1)
        self._batches = simpy.Store(self._env, capacity=max(1, max_staleness))
        self._starts = [self._env.event() for _ in times]
        self._sync_ends = [self._env.event() for _ in times]
        self._env.process(self._generator())
        self._env.process(self._trainer())
        self._env.run()

    def _generator(self) -> Generator[Any, Any, None]:
        for k, t in enumerate(self.times):
            if (needed := k - 1 - self.max_staleness) >= 0:
                yield self._sync_ends[needed]
            with self._engines.request() as turn:
                yield turn
                self.version_of.append(len(self.done_s))
                self._starts[k].succeed(self._env.now)
                yield from self._spend(self.rollouts, k, "rollout", t.rollout_s)
            yield self._batches.put(k)

    def _trainer(self) -> Generator[Any, Any, None]:
        for k, t in enumerate(self.times):
            if t.groups is not None:
                yield from self._stream(k, t.groups)
            else:
                yield self._batches.get()
                yield from self._spend(self.training, k, "weight_sync", t.sleep_s, "engine sleeps")
                yield from self._spend(self.training, k, "reward", t.reward_s)
                yield from self._spend(self.training, k, "inference", t.inference_s)
                yield from self._spend(self.training, k, "train", t.train_s)
            with self._engines.request() as turn:
                yield turn
                yield from self._spend(self.syncs, k, "weight_sync", t.sync_s)
                yield from self._spend(self.syncs, k, "weight_sync", t.wake_s, "engine wakes")
            self.done_s.append(float(self._env.now))
            self._sync_ends[k].succeed()

    def _stream(self, k: int, groups: _Groups) -> Generator[Any, Any, None]:
        """Train on the groups of rollout k as they come, the last at its end."""
        began_s = yield self._starts[k]
        for start_s, end_s in groups.busy_s(self._env.now - began_s):
            yield self._env.timeout(max(0.0, began_s + start_s - self._env.now))
            yield from self._spend(self.training, k, "train", end_s - start_s, "streamed")
        yield self._batches.get()

    def _spend(
        self, into: list[_Interval], k: int, kind: str, seconds: float, detail: str | None = None
    ) -> Generator[Any, Any, None]:
        start = float(self._env.now)
        yield self._env.timeout(seconds)
        into.append(_Interval(step=k, kind=kind, start_s=start, end_s=float(self._env.now), detail=detail))


def _step_s(times: Sequence[_StageTimes], max_staleness: int, pipeline: _Pipeline) -> float:
    """Mean seconds of an RL step over a lap through `times` among others; without staleness all laps are alike."""
    n = len(times)
    if max_staleness == 0:
        return pipeline.done_s[-1] / n
    margin = -(-_FILL_STEPS * (max_staleness + 1) // n)
    done_s = _Pipeline([*times] * (2 * margin + 1), max_staleness).done_s
    return (done_s[n * (margin + 1) - 1] - done_s[n * margin - 1]) / n


_FILL_STEPS = 8
"""RL steps, per rollout that may be under way, in which a pipeline has filled and in which it empties."""


def _steps(rollouts: Sequence[SimulatedRollout], times: Sequence[_StageTimes], pipeline: _Pipeline) -> pd.DataFrame:
    start = np.array([r.start_s for r in pipeline.rollouts])
    done = np.array(pipeline.done_s)
    return pd.DataFrame(
        {
            "rl_step": [r.requests.rl_step for r in rollouts],
            "t_start": start,
            "rollout_s": [t.rollout_s for t in times],
            "inference_s": [t.inference_s for t in times],
            "reward_s": [t.reward_s for t in times],
            "train_s": [t.train_s for t in times],
            "sync_s": [t.sleep_s + t.sync_s + t.wake_s for t in times],
            "step_s": np.diff(done, prepend=0.0),
            "latency_s": done - start,
            "policy_version": [rollouts[v].requests.policy_version for v in pipeline.version_of],
            "updates_behind": np.arange(len(rollouts)) - np.array(pipeline.version_of),
        }
    )


def _spans(pipeline: _Pipeline, steps: pd.DataFrame, num_workers: int, shared: bool) -> pd.DataFrame:
    trainer = sorted([*pipeline.training, *pipeline.syncs], key=_when)
    lanes = {"trainer": trainer}
    if not shared:
        engines = sorted([*pipeline.rollouts, *pipeline.syncs], key=_when)
        outside = [i for i in _with_gaps(engines, after=True, until_s=pipeline.done_s[-1]) if i.kind != "rollout"]
        lanes = {f"worker {w}": outside for w in range(num_workers)}
        lanes["trainer"] = list(_with_gaps(trainer, after=False, until_s=pipeline.done_s[-1]))
    rl_step, t_start = steps["rl_step"].tolist(), steps["t_start"].tolist()
    rows = []
    for lane, intervals in lanes.items():
        for i in intervals:
            if (duration := i.end_s - i.start_s) > 0:
                start_s = i.start_s - t_start[i.step]
                rows.append(span(rl_step[i.step], lane, i.kind, start_s, duration, detail=i.detail))
    return pd.DataFrame(rows, columns=TABLES["spans"].names).sort_values("rl_step", kind="stable", ignore_index=True)


_when = attrgetter("start_s", "end_s")


def _with_gaps(intervals: Sequence[_Interval], *, after: bool, until_s: float) -> Iterator[_Interval]:
    """Intervals with "idle" between them: of the rollout's RL step before the gap (`after`), else of the next one's."""
    end_s, step = 0.0, intervals[0].step
    for interval in intervals:
        if not after:
            step = interval.step
        if interval.start_s > end_s:
            yield _Interval(step=step, kind="idle", start_s=end_s, end_s=interval.start_s)
        yield interval
        end_s = interval.end_s
        if interval.kind == "rollout":
            step = interval.step
    if until_s > end_s:
        yield _Interval(step=step, kind="idle", start_s=end_s, end_s=until_s)


def _busy_gpu_s(rollouts: Sequence[SimulatedRollout], steps: pd.DataFrame, pools: Pools) -> float:
    """GPU-seconds of all but bubbles, grading, and the time in which one side's GPUs wait for the other."""
    per_worker = pools.rollout_gpus / len(rollouts[0].worker_end_s)
    bubble_s = sum(r.makespan_s - end for r in rollouts for end in r.worker_end_s) * per_worker
    total = {name: float(steps[name].sum()) for name in ("rollout_s", *STAGES)}
    generating = pools.rollout_gpus * total["rollout_s"] - bubble_s
    training = pools.train_gpus * total["inference_s"], pools.train_gpus * total["train_s"]
    return float(generating + training[0] + training[1] + pools.num_gpus * total["sync_s"])
