"""The learned drafter of a GRPO run, between the trainers next to the rollout workers and the engines that draft.

Rollouts are correct without it: a failure becomes an event of the run, and the drafter in service stays the last good
one. The trainers are processes of their own, and the coordinator gives them orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import threading
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tltlab.coordination.canary import Verdict, check_chances
from tltlab.coordination.machine import (
    CoordinatorState,
    Event,
    Kill,
    Released,
    RolloutEnded,
    RolloutStarted,
    Tick,
    Train,
    TrainerFreed,
    TrainerGone,
    TrainerReady,
    WorkerIdle,
    WorkerState,
    advance,
    wakeup_s,
)
from tltlab.coordination.schedule import Attempt, TrainingSchedule, tokens_per_draft
from tltlab.errors import ConfigError, one_line
from tltlab.files import new_folder
from tltlab.policies.policy import Policy
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.engine.drafter_pool import DrafterPool, DrafterReport
from tltlab.runtime.engine.graphs import parts_of
from tltlab.runtime.ray.actors import error_of, get, runtime_env
from tltlab.runtime.ray.scratch import scratch_folder
from tltlab.runtime.recipe.drafter import DrafterConfig
from tltlab.runtime.recipe.engines import drafters_of
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.memory import ProcessMemory
from tltlab.runtime.run.state import RunEvents
from tltlab.state import DrafterState

from .group import LOOPBACK, RendezvousServer
from .heads.head import host_copies
from .heads.kinds import new_head
from .heads.layouts import load_head
from .training import TrainingPeriod, pooled
from .worker import SpotTrainer, TrainerPlacement, TrainerReport

MOST_LETTERS = 85
"""Most characters of a folder for sockets, whose addresses have at most 107."""

MOST_RESTARTS = 3
"""Restarts of a worker's trainer in one run."""

PING_S = 1.0
"""Seconds between checks of a trainer that trains."""

LATE_S = 30.0
"""Seconds that the coordinator's thread may be late before the run gives it up."""

ANSWER_S = 30.0
"""Most seconds for a trainer's answer, between rollouts, before it counts as hanging and is killed."""

SLOW_DISK = 20e6
"""Bytes a second that trainers write together in the worst case."""

CLOSE_S = 5.0
"""Most seconds for trainers to end by themselves: a checkpoint may be under way."""

LOST = "its process ended: its work is unknown"

_DEAD_S = 1.0

Machines = Sequence[tuple[str, Mapping[str, str]]]
_Trainer: Any = ray.remote(concurrency_groups={"train": 1, "orders": 1})(SpotTrainer)

WEIGHTS = "drafter.safetensors"
TRAINING = "drafter_training.safetensors"

Rows = dict[str, list[Json]]


class NoDrafting:
    """In place of a `DrafterRun` where a run trains no drafter: its methods do nothing."""

    head = ""

    def rows(self, rl_step: int, **_: Any) -> Rows:
        return {}

    def memory(self) -> list[ProcessMemory]:
        return []

    def state_dict(self, folder: Path) -> Json:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        if state:
            raise ConfigError(f"{folder} is of a run that trains a drafter, and this recipe has no [drafter]")

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *_, **__: None


class DrafterRun:
    """The drafter of a recipe's `[drafter]`; its heads and checkpoints go below `out`.

    It is called from one thread in the order of an RL step, `start` to `close`. `head` is the folder of the weights
    that engines load when they start.

    `served` is the drafter in service, `watch` the canaries' verdicts on it, `training` trains the next one, by the
    `schedule`. `drafts`: True if the policy that the run begins with ever drafts with it.
    """

    def __init__(self, config: DrafterConfig, recipe: Recipe, out: Path, events: RunEvents):
        self.config, self.recipe, self.events = config, recipe, events
        self.out = Path(out).resolve()
        self.head: Path = self.out / "initial"
        self.drafts = True
        self.schedule = TrainingSchedule(config.schedule, pretrained=config.pretrained)
        self.served = ServedDrafter()
        self.watch = CanaryWatch(config.name, events)
        self._training: IdleWorkerTraining | None = None
        self._sockets: Path | None = None
        self._data: Path | None = None
        self._annotating: dict[int, Any] = {}
        self._rows: Rows = {}

    @property
    def training(self) -> IdleWorkerTraining:
        assert self._training is not None, "it has not started"
        return self._training

    def prepare(self) -> None:
        """Create the files that engines read when they start."""
        self._sockets = scratch_folder("d")
        if len(str(self._sockets)) > MOST_LETTERS:
            raise ConfigError(f"{self._sockets} is too long for a socket's address: set TMPDIR to a shorter folder")
        checkpoint, model = self.config.checkpoint, self.recipe.model
        if checkpoint is None:
            head = new_head(model, self.config.loss.method, self.recipe.seed)
        else:
            # Engines get the layout that vLLM loads, independent of the checkpoint's.
            head = load_head(checkpoint, target=model)
        head.save(self.head)
        if not self.drafts:
            name = self.config.name
            self.events.note(f"{self.recipe.rollout.chosen_by} never drafts with {name!r}: it is trained and not used")

    def feed(self, worker: int) -> str:
        """Return the address to which the engine of a worker sends its responses."""
        return f"ipc://{self._sockets}/feed-{worker}"

    def start(self, workers: Sequence[Any], frozen: Callable[[], Any], ask: Callable[..., list[Any]]) -> None:
        """Start the trainers, once engines and the policy's trainer run; engines get the drafter in service, if any.

        An item of `workers` is replaced when its worker is restarted; `rejoin` follows. `frozen()` is a reference to a
        `FrozenTarget`. `ask(method, ...)` calls every worker, and repeats the call on one that fails in it.
        """
        self._workers, self._frozen, self._ask_engines = workers, frozen, ask
        self._start_training()
        self._serve(ask)

    def _start_training(self) -> None:
        self._stop_training()
        machines = self._ask_engines("place")
        driver = ray.get_runtime_context().get_node_id()
        of_ray = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        addresses = machine_addresses([node for node, _ in machines], driver, of_ray)
        self._training = IdleWorkerTraining(self, machines, driver, addresses)
        self.training.begin(self._frozen(), self._data)

    def _stop_training(self) -> None:
        if self._training is not None:
            self._training.close()

    def rejoin(self, worker: int) -> None:
        """Give the engine of the restarted worker `worker` the drafter in service."""
        if self._training is not None:
            handle = self._workers[worker]
            self._serve(lambda method, *args: get(getattr(handle, method).remote(*args)))

    def _serve(self, ask: Callable[..., Any]) -> None:
        """Make new engines, which `ask` calls, draft with the drafter in service, under the canary's watch."""
        ask("ask_engine", "guard_drafter", self.config.canary)
        served = self.served
        if served.weights is not None:
            ask("update_draft_weights", ray.put(served.weights), list(served.predicted), served.updates)

    def rollout_starts(self, rl_step: int) -> None:
        """Begin the rollout of `rl_step`: idle workers may train from now on, if the schedule permits it."""
        trusted = self.watch.look(self._ask_engines("ask_engine", "drafter_report"))
        served = self.served
        age = rl_step - served.published
        decision = self.schedule.decide(rl_step, DrafterState(age=age, updates=served.updates), trusted=trusted)
        self.events.record(f"{'training' if decision.train else 'no training'}: {decision.reason}")
        self._in_service = {"drafter_version": served.swaps, "drafter_age": age, "drafter_updates": served.updates}
        self.training.rollout_starts(rl_step, train=decision.train)

    def worker_idle(self, worker: int) -> None:
        """Note that a worker has no request of this rollout left; from any thread."""
        self.training.worker_idle(worker)

    def rollout_ends(self, rl_step: int) -> None:
        """End the rollout: on return no trainer trains on a worker's device."""
        self.training.rollout_ends(rl_step)

    def annotate(self) -> None:
        """Begin to compute the acceptance of drafters of several ages on the rollout that has ended."""
        self._annotating = self.training.ask("annotate")

    def publish(self, rl_step: int) -> None:
        """Make engines draft with the newest good weights from now on: the policy has changed; `rl_step` is next.

        Engines are awake, and still have the policy's previous weights.
        """
        annotated = self.training.collect(self._annotating)
        reports: dict[int, TrainerReport] = self.training.answers("report", self.schedule.config.kind == "gated")
        rows = self.training.rows(rl_step - 1, reports)
        self._rows = {"acceptance": [row for answer in annotated.values() for row in answer], "spot_training": rows}
        self.watch.rollout_ended(self._ask_engines("ask_engine", "drafter_report"))
        most = max((report.updates for report in reports.values()), default=0)
        if most > self.served.updates:
            # All of these have the same drafter.
            furthest = {worker: report for worker, report in reports.items() if report.updates == most}
            predicted = pooled(report.predicted for report in furthest.values())
            newest = {row["worker"]: row for row in rows if row["worker"] in furthest and row["updates"]}
            for row in newest.values():
                row["accept"] = predicted or None
            self._swap(rl_step, furthest, predicted)

    def _swap(self, rl_step: int, reports: Mapping[int, TrainerReport], predicted: list[float]) -> None:
        """Load the drafter that the trainers of these reports have into the engines, and into all other trainers."""
        worker = min(reports)
        updates = reports[worker].updates
        try:
            check_chances(predicted)
        except ConfigError as error:
            self.events.note(f"the drafter that worker {worker} trained does not go into service: {error}")
            return
        if self.schedule.config.kind == "gated" and not self._passes_gate(rl_step - 1, list(reports.values())):
            return
        state = self.training.ask("state", workers=[worker])
        weights = self.training.answers("weights", workers=[worker]).get(worker)
        if weights is None or not self.training.collect(state):
            return
        self._ask_engines("update_draft_weights", ray.put(weights), predicted, updates)
        self.schedule.trained(rl_step - 1, updates - self.served.updates)
        self.served = ServedDrafter(
            updates=updates,
            swaps=self.served.swaps + 1,
            published=rl_step,
            predicted=predicted,
            weights=weights,
            training=state[worker],
        )
        self.training.publish(self.served)

    def _passes_gate(self, rl_step: int, reports: Sequence[TrainerReport]) -> bool:
        """Return True if the drafter goes into service after the rollout of `rl_step`, by its trainers' reports.

        It is judged on that rollout's responses to held-out prompts; without one it waits, and the next RL step's
        decide, whether it is trained further or not. A rejected drafter is judged again when it has been.
        """
        trained = [row for row in self._rows["spot_training"] if row["updates"]]
        attempt = self.schedule.attempts[-1] if self.schedule.attempts else None
        if trained:
            attempt = Attempt(rl_step=rl_step, delay_s=max(row["yield_s"] or 0.0 for row in trained))
        if attempt is None or attempt.candidate is not None:
            return False
        candidate, served = pooled(r.candidate for r in reports), pooled(r.served for r in reports)
        if candidate:
            lengths = tokens_per_draft(candidate), tokens_per_draft(served)
            attempt = replace(attempt, candidate=lengths[0], served=lengths[1])
        self.schedule.attempted(attempt)
        passes = self.schedule.serves(attempt)
        if attempt.candidate is None or attempt.served is None:
            reason = "no response to a held-out prompt, one in eight, measures it yet: those of the next RL step decide"
        else:
            reason = f"{attempt.candidate:.3f} tokens per draft on held-out prompts, {attempt.served:.3f} before"
        self.events.record(
            f"the drafter trained in RL step {attempt.rl_step} {'serves' if passes else 'does not serve'}: {reason}"
        )
        return passes

    def target_moved(self) -> None:
        """Note that the engines have the policy's new weights."""
        self.training.set_target(self._frozen())

    def rewind(self, rl_step: int, state: Mapping[str, Any], folder: Path | None) -> None:
        """Restore the drafter of `rl_step`: the run repeats it and later RL steps.

        `state` is the result of `state_dict` at that time, and `folder` the folder of its tensors. A run that is back
        at its start has no folder, and `state` is from before `start`. Engines have restored their learned state
        already.
        """
        self._stop_training()
        updates = self.served.updates
        self._restore(state, folder)
        self._annotating, self._rows = {}, {}
        # Reloading the same weights would clear their acceptance record.
        served = self.served
        if served.updates != updates:
            weights = load_head(self.head).serving_weights() if served.weights is None else served.weights
            self._ask_engines("update_draft_weights", ray.put(weights), list(served.predicted), served.updates)
        self._start_training()

    def rows(self, rl_step: int, *, rollout_s: float = 0.0, tokens: int = 0) -> Rows:
        """Return rows for the trace's tables of the RL step that has just ended; of `steps` only some columns.

        Its rollout took `rollout_s` seconds, its wait for trainers included, for `tokens` tokens.
        """
        length, drafts = self.watch.accept_length, self.watch.drafts
        self.schedule.rollout_done(rl_step, length, drafts=drafts, rollout_s=rollout_s, tokens=tokens)
        rows, self._rows = self._rows, {}
        return rows | {"steps": [self._in_service]}

    def memory(self) -> list[ProcessMemory]:
        """Return the memory of the processes that train the drafter."""
        return list(self.training.answers("memory").values())

    def summary(self) -> Json:
        """Return the drafter's part of the run's summary."""
        return {"name": self.config.name, "updates": self.served.updates, "swaps": self.served.swaps}

    def save(self) -> None:
        """Write the drafter to `drafter/final`, as a head's folder."""
        head = load_head(self.head)
        if self.served.weights is not None:
            head.load_state_dict(self.served.weights)
        with new_folder(self.out / "final") as folder:
            head.save(folder)

    def state_dict(self, folder: Path) -> Json:
        """Return the drafter in service, and all training state and data.

        State of the drafter: weights, AdamW's moments and counters, the RL step since which it serves, the training
        schedule and the canaries' verdicts. Every live trainer has its own file: buffer, held-out sequences, random
        state. Older drafters are not kept; the trace has their acceptance.
        """
        if self._training is not None:
            self._training.save_data(folder)
        parts = self.served.state_dict(folder) | self.watch.state_dict()
        return {"name": self.config.name, "schedule": self.schedule.state_dict(), **parts}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Continue from the result of `state_dict`, before `start`. ConfigError where it is of another kind of run."""
        if state.get("name") != self.config.name:
            raise ConfigError(
                f"{folder} is of a run with {state.get('name') or 'no'} drafter, and this recipe trains "
                f"{self.config.name!r}"
            )
        self._restore(state, folder)

    def _restore(self, state: Fields, folder: Path | None) -> None:
        """Restore the result of `state_dict`; trainers started from now on use its data."""
        self.served = ServedDrafter.from_state_dict(state, folder)
        self.watch.load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        self._data = folder and folder.resolve()

    def close(self) -> None:
        """End the trainers; safe to call at any time."""
        self._stop_training()
        for partial in self.out.glob("worker-*/.state.*"):
            shutil.rmtree(partial, ignore_errors=True)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)


Drafting = DrafterRun | NoDrafting


def drafter_of(recipe: Recipe, policy: Policy, out: Path, events: RunEvents) -> Drafting:
    """Return the drafter that a recipe trains. ConfigError where that cannot be run."""
    config = recipe.drafter
    if config is None:
        return NoDrafting()
    if config.checkpoint is not None:
        head = load_head(config.checkpoint, target=recipe.model)
        if head.method != config.loss.method:
            raise ConfigError(
                f"{config.checkpoint} is an {head.method} head, and drafter.loss trains one of method "
                f"{config.loss.method}"
            )
    run = DrafterRun(config, recipe, out / "drafter", events)
    specs = drafters_of(recipe, policy, run.head)
    DrafterPool(specs, recipe.rollout.max_draft_depth)
    run.drafts = any(s.speculates and config.name in parts_of(specs, s.drafter) for s in policy.strategies)
    return run


@dataclass(slots=True, kw_only=True)
class _TrainerProcess:
    """A trainer that starts, or runs: `run` completes when it has ended.

    `period` is the newest term for which it was called to train, `killed` the reason where it was killed.
    """

    actor: Any
    run: Any = None
    pid: int = 0
    period: int = 0
    killed: str = ""


class IdleWorkerTraining:
    """One `SpotTrainer` per worker, on its machine and devices, and their coordinator, until `close`.

    `machines` are the workers', as (node, environment), by Ray's names as `driver`, the driver's; `addresses` are all
    machines'. Trainers require growing RL steps: a run that goes back begins with a new object.

    The coordinator is the state machine of `tltlab.coordination`, in the event loop of one thread. A trainer that is
    ordered to train is called (`SpotTrainer.train`), and its device is free when the call returns or its process has
    ended. A failed trainer is restarted, `MOST_RESTARTS` times, with the current `target` and `served`, the drafter in
    service; its training data is lost.

    The rollout never waits for a trainer: `rollout_ends` returns at most `yield_timeout_s` after the call, plus the
    time to kill one.
    """

    def __init__(self, run: DrafterRun, machines: Machines, driver: str, addresses: Mapping[str, str]):
        self.config, self.events = run.config, run.events
        self.target: Any = None
        self.served = run.served
        self._machines = machines
        self._meeting = RendezvousServer(addresses[driver])
        self._places = [
            TrainerPlacement(
                worker=worker,
                feed=run.feed(worker),
                folder=run.out / f"worker-{worker}",
                rendezvous=self._meeting.address,
                host=addresses[node],
                head=run.head,
                seed=run.recipe.seed,
                max_depth=run.recipe.rollout.max_draft_depth,
                temperature=run.recipe.rollout.temperature,
            )
            for worker, (node, _) in enumerate(machines)
        ]
        self._rl_step, self._began = -1, time.perf_counter()
        self._trains = False
        self._lost: list[tuple[int, int, float]] = []
        self._processes: dict[int, _TrainerProcess] = {}
        self._deaths = dict.fromkeys(range(len(machines)), 0)
        self._state = CoordinatorState(
            config=run.config.coordinator, workers=dict.fromkeys(range(len(machines)), WorkerState())
        )
        self._released = threading.Event()
        self._failure: BaseException | None = None
        self._lock, self._closed = threading.Lock(), False
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="tltlab-coordinator")

    def begin(self, target: Any, data: Path | None = None) -> None:
        """Start all trainers from `served`, with data in a checkpoint's folder. Raises the error of one that cannot.

        Checkpoints of earlier trainers in their folders are removed: they belong to another course of the run.
        """
        self.target = target
        self._thread.start()
        begun: list[Future[None]] = [Future() for _ in self._machines]
        for worker, future in enumerate(begun):
            asyncio.run_coroutine_threadsafe(self._live(worker, {"anew": True, "data": data}, future), self._loop)
        for future in begun:
            future.result()

    def rollout_starts(self, rl_step: int, *, train: bool) -> None:
        """Begin a rollout, and with `train` let workers that run out of requests train from now on."""
        self._rl_step, self._began = rl_step, time.perf_counter()
        # Tasks are referenced here alone.
        self._lost, self._tasks = [], []
        self.ask("begin", rl_step)
        self._trains = train and not self._closed
        if self._trains:
            self._notify(RolloutStarted(rl_step=rl_step))

    def worker_idle(self, worker: int) -> None:
        """Note that a worker has no requests left; from any thread."""
        if self._trains:
            self._notify(WorkerIdle(worker=worker))

    def rollout_ends(self, rl_step: int) -> None:
        """End training: on return no trainer trains. Where the coordinator has failed, it ends for good."""
        if not self._trains:
            return
        self._trains = False
        self._released.clear()
        self._notify(RolloutEnded(rl_step=rl_step))
        released = self._released.wait(self.config.coordinator.yield_timeout_s + LATE_S)
        if self._failure is not None or not released:
            why = "it does not answer" if self._failure is None else repr(self._failure)
            if not self._closed:
                self.events.note(
                    f"the drafter's coordinator failed ({why}): no drafter is trained any more in this run"
                )
                self.close()

    def publish(self, served: ServedDrafter) -> None:
        """Make all trainers, later ones too, continue from the drafter in service."""
        self.served = served
        self.answers("publish", served.training, served.published)

    def set_target(self, target: Any) -> None:
        """Give all trainers the embedding and LM head of the policy's new weights."""
        self.target = target
        self.answers("set_target", target)

    def rows(self, rl_step: int, reports: Mapping[int, TrainerReport]) -> list[Json]:
        """Return the rows of `spot_training` of the ended rollout, those of trainers that failed in it too."""
        rows = [row for report in reports.values() for row in report.rows]
        for worker, term, died_s in self._lost:
            lost = TrainingPeriod(rl_step=rl_step, term=term, began=died_s, ended="killed", detail=LOST)
            rows.append(lost.row(worker, 0.0, died_s))
        self._lost = []
        for row in rows:
            if row["ended"] == "failed":
                self.events.note(f"drafter training on worker {row['worker']} failed: {row['detail']}")
        for worker, report in reports.items():
            for failure in report.failures:
                self.events.note(f"a checkpoint of the drafter on worker {worker} failed: {failure}")
        return rows

    def ask(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> dict[int, Any]:
        """Call a method of every running trainer, or of those of `workers`; return the calls, for `collect`."""
        return {
            worker: getattr(process.actor, method).remote(*args)
            for worker, process in self._running().items()
            if workers is None or worker in workers
        }

    def collect(self, calls: Mapping[int, Any], *, work_s: float = 0.0) -> dict[int, Any]:
        """Return the answers. Trainers that failed or hang are left out; errors are noted, hanging ones killed.

        A trainer hangs when it has not answered in `ANSWER_S` plus the time of its work, `work_s`.
        """
        answers = {}
        timeout_s = ANSWER_S + work_s
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        for worker, call in calls.items():
            if call not in done:
                self._kill(worker, f"it did not answer in {timeout_s:.3g} s")
                continue
            try:
                answers[worker] = ray.get(call)
            except RayTaskError as error:
                self.events.note(f"the drafter's trainer of worker {worker}: {_sentence(error)}", worker=worker)
            except RayError:
                continue
        return answers

    def answers(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> dict[int, Any]:
        """Call `ask`, then `collect`."""
        return self.collect(self.ask(method, *args, workers=workers))

    def save_data(self, folder: Path) -> None:
        """Make each trainer write its data into a checkpoint's folder; one that fails leaves nothing there."""
        work_s = sum(self.answers("data_bytes").values()) / SLOW_DISK
        self.collect(self.ask("save_data", folder.resolve()), work_s=work_s)
        # Trainers that have not finished are dead by now.
        for partial in folder.glob(".data-*"):
            shutil.rmtree(partial)

    def close(self) -> None:
        """End all trainers for good; may be called again."""
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, {}
        running = [process for process in processes.values() if process.run is not None]
        for process in running:
            process.actor.close.remote()
        ended: list[Any] = []
        try:
            if running:
                ended, _ = ray.wait([process.run for process in running], num_returns=len(running), timeout=CLOSE_S)
        finally:
            for worker, process in processes.items():
                if process.run in ended:
                    ray.kill(process.actor)
                else:
                    self._end(worker, process)
            # A call after Ray's end would start Ray again, and one during Ray's end may crash this process. The
            # thread's longest call confirms a kill.
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(self.config.coordinator.yield_timeout_s + LATE_S)
            self._meeting.close()

    def _running(self) -> dict[int, _TrainerProcess]:
        return {worker: process for worker, process in self._processes.copy().items() if process.run is not None}

    # ---- the event loop's thread ----

    def _serve(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    def _notify(self, event: Event) -> None:
        """Tell the coordinator, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, event)

    def _tell(self, event: Event) -> None:
        try:
            self._advance(event)
        except Exception as error:  # `rollout_ends` then ends training: nothing else frees the devices
            self._failure = error
            self._released.set()

    def _advance(self, event: Event) -> None:
        self._state, commands = advance(self._state, event, time.perf_counter())
        for command in commands:
            process = None if isinstance(command, Released) else self._processes.get(command.worker)
            match command:
                case Released():
                    self._released.set()
                case Kill():
                    self._note_lost(command.worker)
                    self._kill(command.worker, f"it did not yield within {self._state.config.yield_timeout_s:g} s")
                case Train() if process is not None and process.period != command.term:
                    process.period = command.term
                    self._tasks.append(self._loop.create_task(self._train(process, command)))
                case _ if process is not None:
                    process.actor.order.remote(command)
        if self._timer is not None:
            self._timer.cancel()
        due_s = wakeup_s(self._state) - time.perf_counter()
        self._timer = self._loop.call_later(max(due_s, 0.0), self._tell, Tick()) if due_s < math.inf else None

    async def _train(self, process: _TrainerProcess, order: Train) -> None:
        """Have a trainer train from `order` on until its device is free; kill one that does not answer meanwhile."""
        period = self._loop.create_task(_succeeds(process.actor.train.remote(order)))
        gone_after_s = self.config.coordinator.gone_after_s
        while gone_after_s is not None and not period.done():
            ping = self._loop.create_task(_succeeds(process.actor.ping.remote()))
            answered, _ = await asyncio.wait((period, ping), timeout=gone_after_s, return_when=FIRST_COMPLETED)
            if not answered:
                self._kill(order.worker, f"it did not answer for {gone_after_s:g} s")
            await asyncio.wait((period,), timeout=PING_S)
        # The end of its process is `_live`'s.
        if await period and self._processes.get(order.worker) is process:
            self._tell(TrainerFreed(worker=order.worker))

    async def _live(self, worker: int, arguments: Fields, begun: Future[None]) -> None:
        """Start a trainer with `arguments`, and again when it has failed, with them until it has started.

        `begun` completes when the first one has started, or its process has ended; with the error of one that raised.
        """
        while True:
            with self._lock:
                if self._closed:
                    return
                process = self._processes[worker] = self._new(worker)
            try:
                process.pid = await process.actor.start.remote(
                    self.target, self.served.training, self.served.published, **arguments
                )
                arguments = {}
                process.run = process.actor.run.remote()
                process.actor.begin.remote(self._rl_step, time.perf_counter() - self._began)
                self._tell(TrainerReady(worker=worker))
                if not begun.done():
                    begun.set_result(None)
                await process.run
                why = "it ended"
            except Exception as error:
                why = _sentence(error)
                if not begun.done():
                    if isinstance(error, RayTaskError) or not isinstance(error, RayError):
                        begun.set_exception(error_of(error))
                        return
                    begun.set_result(None)
            with self._lock:
                if self._closed:
                    return
                del self._processes[worker]
            self._end(worker, process)
            if self._state.workers[worker].holds:
                self._note_lost(worker)
            self._tell(TrainerGone(worker=worker))
            self._deaths[worker] += 1
            restarts = self._deaths[worker] <= MOST_RESTARTS
            self.events.note(
                f"the drafter's trainer of worker {worker} failed ({process.killed or why}); "
                f"it is {'' if restarts else 'not '}restarted",
                worker=worker,
            )
            if not restarts:
                return

    def _new(self, worker: int) -> _TrainerProcess:
        node, env = self._machines[worker]
        actor = _Trainer.options(
            num_cpus=0,
            # `run` occupies one thread.
            max_concurrency=8,
            runtime_env=runtime_env({**env, "OMP_NUM_THREADS": str(self.config.threads)}),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self._places[worker], self.config)
        return _TrainerProcess(actor=actor)

    def _note_lost(self, worker: int) -> None:
        self._lost.append((worker, self._state.term, time.perf_counter() - self._began))

    def _kill(self, worker: int, why: str) -> None:
        """Kill a trainer, from any thread; return when it is dead. It is restarted."""
        process = self._processes.get(worker)
        if process is not None:
            process.killed = why
            self._end(worker, process)

    def _end(self, worker: int, process: _TrainerProcess) -> None:
        ray.kill(process.actor)
        if not process.pid:
            return
        # Ray asks a process to end before it kills it: a stopped one would hold its device for seconds.
        node = self._machines[worker][0]
        if node == ray.get_runtime_context().get_node_id():
            _kill(process.pid)
            return
        kill = ray.remote(num_cpus=0)(_kill).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        timeout_s = self.config.coordinator.yield_timeout_s
        try:
            ray.get(kill.remote(process.pid), timeout=timeout_s)
        except (RayError, GetTimeoutError):
            self.events.note(
                f"the drafter's trainer of worker {worker} was killed, and its machine did not confirm that within "
                f"{timeout_s:g} s",
                worker=worker,
            )


async def _succeeds(call: Any) -> bool:
    """Wait for a call's end; return False where its process has ended."""
    try:
        await call
    except RayTaskError:
        return True
    except RayError:
        return False
    return True


def _kill(pid: int) -> None:
    """Kill a process, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + _DEAD_S
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.005)


def _sentence(error: Exception) -> str:
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {one_line(error.cause)[:200]}"
    return one_line(str(error).split("\n")[0])[:200]


def machine_addresses(nodes: Sequence[str], driver: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses of the trainers' machines `nodes` and the `driver`'s; loopback if all is one machine.

    All machines by Ray's names; `addresses` are Ray's.
    """
    if set(nodes) <= {driver}:
        return {driver: LOOPBACK}
    return {node: addresses[node] for node in {*nodes, driver}}


@frozen
class ServedDrafter:
    """The drafter that engines use since RL step `published`, after `updates` updates and `swaps` swaps of weights.

    `weights` are by the names that vLLM loads, and `training` is a reference to the state that trainers continue from,
    both None for the head that the run began with. `predicted`: the acceptance rate by draft position.
    """

    updates: int = 0
    swaps: int = 0
    published: int = 0
    predicted: Sequence[float] = ()
    weights: Mapping[str, Tensor] | None = None
    training: Any = None

    def state_dict(self, folder: Path) -> Json:
        """Return all but tensors, as JSON types; tensors go into two files in `folder`, which is made."""
        if self.weights is not None:
            folder.mkdir(exist_ok=True)
            for name, tensors in ((WEIGHTS, self.weights), (TRAINING, get(self.training))):
                save_file(host_copies(tensors), folder / name)
        return {
            "updates": self.updates,
            "swaps": self.swaps,
            "published": self.published,
            "predicted": list(self.predicted),
            "in_service": self.weights is not None,
        }

    @classmethod
    def from_state_dict(cls, state: Fields, folder: Path | None) -> ServedDrafter:
        """Restore the drafter of `state`. ConfigError where its files are missing or damaged."""
        numbers = {name: state[name] for name in ("updates", "swaps", "published", "predicted")}
        if not state["in_service"]:
            return cls(**numbers)
        assert folder is not None
        try:
            weights, training = load_file(folder / WEIGHTS), load_file(folder / TRAINING)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder} does not hold the checkpoint's drafter: {one_line(error)[:200]}") from error
        return cls(**numbers, weights=weights, training=ray.put(training))


class CanaryWatch:
    """The canaries of a run's engines for the drafter `name`: each verdict reported once, and its acceptance."""

    def __init__(self, name: str, events: RunEvents):
        self.name, self.events = name, events
        self.accept_length: float | None = None
        """Tokens per draft in the last rollout, the bonus token included, and the number of its drafts."""
        self.drafts = 0
        self._verdicts: dict[int, tuple[Verdict, ...]] = {}
        self._counts: dict[int, tuple[int, int, int]] = {}

    def look(self, reports: Sequence[DrafterReport]) -> bool:
        """Report new verdicts in the reports of all workers; return True if all of them trust the drafter."""
        for worker, report in enumerate(reports):
            for verdict in report.verdicts:
                if verdict not in self._verdicts.get(worker, ()):
                    report_verdict = self.events.record if verdict.kind == "fine" else self.events.note
                    report_verdict(f"worker {worker}: {verdict.sentence}", worker=worker, verdict=asdict(verdict))
            self._verdicts[worker] = report.verdicts
        return all(report.trusted for report in reports)

    def rollout_ended(self, reports: Sequence[DrafterReport]) -> None:
        """Process the reports, and compute the acceptance of the rollout that has just ended."""
        self.look(reports)
        drafts = kept = 0
        for worker, report in enumerate(reports):
            positions = report.positions.get(self.name)
            counts = (report.updates, sum(positions.drafted[:1]), sum(positions.kept)) if positions else (0, 0, 0)
            earlier = self._counts.get(worker, (0, 0, 0))
            # A restarted engine counts from 0.
            base = earlier if earlier[0] == counts[0] and earlier[1] <= counts[1] else (counts[0], 0, 0)
            drafts, kept = drafts + counts[1] - base[1], kept + counts[2] - base[2]
            self._counts[worker] = counts
        self.accept_length, self.drafts = (1 + kept / drafts if drafts else None), drafts

    def state_dict(self) -> Json:
        return {
            "seen": {str(worker): list(counts) for worker, counts in self._counts.items()},
            "verdicts": {str(worker): [asdict(v) for v in verdicts] for worker, verdicts in self._verdicts.items()},
        }

    def load_state_dict(self, state: Fields) -> None:
        """Continue from the result of `state_dict`, after JSON, with no rollout ended yet."""
        self._counts = {int(worker): (n[0], n[1], n[2]) for worker, n in state["seen"].items()}
        self._verdicts = {int(worker): tuple(map(Verdict.from_row, rows)) for worker, rows in state["verdicts"].items()}
        self.accept_length, self.drafts = None, 0
