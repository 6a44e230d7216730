"""The drafter's trainers as processes next to the rollout workers, and the coordinator that gives them orders."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tltlab.errors import ConfigError, RunError, one_line
from tltlab.runtime.coordinator.keys import ClientKeys, make_keys
from tltlab.runtime.coordinator.server import CoordinatorServer
from tltlab.runtime.ray.actors import get, runtime_env
from tltlab.runtime.recipe.drafter import DrafterConfig
from tltlab.runtime.run.state import RunEvents

from .group import LOOPBACK, RendezvousServer
from .service import ServedDrafter
from .training import TrainingPeriod
from .worker import SpotTrainer, TrainerPlacement

MOST_RESTARTS = 3
"""Restarts of a worker's trainer in one run."""

WATCH_S = 0.25

ANSWER_S = 30.0
"""Most seconds for a trainer's answer, between rollouts, before it counts as hanging and is killed."""

SLOW_DISK = 20e6
"""Bytes a second that trainers write together in the worst case."""

CLOSE_S = 5.0
"""Most seconds for trainers to end by themselves: a checkpoint may be under way."""

LOST = "its process ended: its work is unknown"

_DEAD_S = 1.0

Machines = Sequence[tuple[str, Mapping[str, str]]]
_Trainer: Any = ray.remote(SpotTrainer)


@dataclass(slots=True, kw_only=True)
class _TrainerProcess:
    """A trainer that starts (`ready` completes with its process id) or runs (`run` completes when it has ended).

    `arguments` are those of its `start`, and of its replacement's if it fails before it runs.
    """

    actor: Any
    ready: Any
    arguments: Mapping[str, Any]
    run: Any = None
    pid: int = 0
    killed: str = ""


class _EarlyExit(RunError):
    """A trainer's process ended before it started."""


class TrainerProcesses:
    """One `SpotTrainer` per place, on the machine and devices of its worker: `machines`, as (node, environment).

    A failed trainer is noticed within `WATCH_S`: `on_death(worker)` is called, then it is restarted, `MOST_RESTARTS`
    times, with the current `target` and `served`, the drafter in service. Its training data is lost.
    """

    def __init__(
        self,
        places: Sequence[TrainerPlacement],
        machines: Machines,
        config: DrafterConfig,
        events: RunEvents,
        on_death: Callable[[int], None],
    ) -> None:
        self.config, self.events = config, events
        self.target: Any = None
        self.served = ServedDrafter()
        self._places, self._machines, self._on_death = places, machines, on_death
        self._deaths = dict.fromkeys(range(len(places)), 0)
        self._processes: dict[int, _TrainerProcess] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="tltlab-trainer-watch")

    def begin(self, target: Any, data: Path | None = None) -> None:
        """Start all trainers, with their data in a checkpoint's folder. Raises the error of one that cannot start.

        Checkpoints of earlier trainers in their folders are removed: they belong to another course of the run.
        """
        self.target = target
        arguments = {"anew": True, "data": data}
        self._processes = {worker: self._new(worker, arguments) for worker in range(len(self._places))}
        for process in self._processes.values():
            # The watcher handles trainers that failed meanwhile.
            with contextlib.suppress(_EarlyExit):
                process.pid, process.run = get(process.ready, died=_EarlyExit), process.actor.run.remote()
        self._watcher.start()

    def pids(self) -> dict[int, int]:
        """Return the ids of running processes, by worker."""
        with self._lock:
            return {worker: process.pid for worker, process in self._processes.items() if process.run is not None}

    def ask(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> dict[int, Any]:
        """Call a method of every running trainer, or of those of `workers`; return the calls, for `collect`."""
        with self._lock:
            return {
                worker: getattr(process.actor, method).remote(*args)
                for worker, process in self._processes.items()
                if process.run is not None and (workers is None or worker in workers)
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
                self.kill(worker, f"it did not answer in {timeout_s:.3g} s")
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

    def kill(self, worker: int, why: str) -> None:
        """Kill a trainer; return when it is dead. It is restarted."""
        with self._lock:
            process = self._processes.get(worker)
            if process is not None:
                process.killed = why
        if process is not None:
            self._end(worker, process)

    def close(self) -> None:
        """End all trainers for good; may be called again."""
        self._closed.set()
        # Calls after Ray's end would start Ray again.
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join(CLOSE_S)
        with self._lock:
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

    def _new(self, worker: int, arguments: Mapping[str, Any]) -> _TrainerProcess:
        node, env = self._machines[worker]
        actor = _Trainer.options(
            num_cpus=0,
            # `run` occupies one thread.
            max_concurrency=8,
            runtime_env=runtime_env({**env, "OMP_NUM_THREADS": str(self.config.threads)}),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self._places[worker], self.config)
        ready = actor.start.remote(self.target, self.served.training, self.served.published, **arguments)
        return _TrainerProcess(actor=actor, ready=ready, arguments=arguments)

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

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            with self._lock:
                waited = {process.run or process.ready: worker for worker, process in self._processes.items()}
            done, _ = ray.wait(list(waited), num_returns=len(waited), timeout=0) if waited else ([], [])
            for call in done:
                self._handle(waited[call], call)

    def _handle(self, worker: int, call: Any) -> None:
        with self._lock:
            process = self._processes.get(worker)
            if self._closed.is_set() or process is None or call not in (process.ready, process.run):
                return
            try:
                answer = ray.get(call)
                if process.run is None:
                    process.pid, process.run = answer, process.actor.run.remote()
                    return
                why = "it ended"
            except RayError as error:
                why = _sentence(error)
            del self._processes[worker]
        self._end(worker, process)
        self._on_death(worker)
        self._deaths[worker] += 1
        restarts = self._deaths[worker] <= MOST_RESTARTS
        self.events.note(
            f"the drafter's trainer of worker {worker} failed ({process.killed or why}); "
            f"it is {'' if restarts else 'not '}restarted",
            worker=worker,
        )
        with self._lock:
            if restarts and not self._closed.is_set():
                self._processes[worker] = self._new(worker, {} if process.run is not None else process.arguments)


def _kill(pid: int) -> None:
    """Kill a process, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + _DEAD_S
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.005)


def _sentence(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {one_line(error.cause)[:200]}"
    return one_line(str(error).split("\n")[0])[:200]


class IdleWorkerTraining:
    """One coordinator and a trainer per worker, whose machines and devices are `machines`, until `close`.

    `driver` is the driver's machine, by Ray's name, and `addresses` are all machines'. `place(worker, coordinator,
    rendezvous, host, keys)` returns a trainer's placement. Coordinator and trainers require growing RL steps: a run
    that goes back begins with a new object.
    """

    def __init__(
        self,
        config: DrafterConfig,
        endpoint: str,
        machines: Machines,
        driver: str,
        addresses: Mapping[str, str],
        place: Callable[[int, str, str, str, ClientKeys | None], TrainerPlacement],
        events: RunEvents,
    ) -> None:
        self.config, self.events = config, events
        self.num_workers = len(machines)
        # Also on this machine: any process with access to the socket folder could otherwise act as a worker.
        keys_of_server, keys = make_keys(self.num_workers)
        self._meeting = RendezvousServer(*_host_and_port(config.rendezvous or f"{addresses[driver]}:0"))
        self._training_step: int | None = None
        self._began = time.perf_counter()
        self._lost: list[tuple[int, int, float]] = []
        self.server: CoordinatorServer | None = CoordinatorServer(
            config.coordinator, endpoint, self.num_workers, self._kill, keys_of_server
        )
        places = [
            place(worker, self.server.endpoint, self._meeting.address, addresses[node], keys[worker])
            for worker, (node, _) in enumerate(machines)
        ]
        self.processes = TrainerProcesses(places, machines, config, events, self._note_death)

    def begin(self, target: Any, served: ServedDrafter, data: Path | None) -> None:
        """Start the trainers, from the drafter in service and with their data in a checkpoint's folder."""
        self.processes.served = served
        self.processes.begin(target, data)

    def rollout_starts(self, rl_step: int) -> None:
        """Let workers that run out of requests train from now on."""
        self._training_step, self._began, self._lost = rl_step, time.perf_counter(), []
        self._notify(lambda server: server.rollout_started(rl_step))

    def rollout_ends(self, rl_step: int) -> None:
        """End training: on return no trainer trains."""
        if self._training_step is not None:
            self._training_step = None
            self._notify(lambda server: server.rollout_ended(rl_step))

    def publish(self, served: ServedDrafter) -> None:
        """Make all trainers, later ones too, continue from the drafter in service."""
        self.processes.served = served
        self.processes.answers("publish", served.training, served.published)

    def set_target(self, target: Any) -> None:
        """Give all trainers the embedding and LM head of the policy's new weights."""
        self.processes.target = target
        self.processes.answers("set_target", target)

    def rows(self, rl_step: int) -> list[dict[str, Any]]:
        """Return the rows of `spot_training` of the ended rollout, those of trainers that failed in it too."""
        rows = [row for answer in self.processes.answers("take_rows").values() for row in answer]
        for worker, term, died_s in self._lost:
            lost = TrainingPeriod(rl_step=rl_step, term=term, began=died_s, ended="killed", detail=LOST)
            rows.append(lost.row(worker, 0.0, died_s) | {"accept": None})
        self._lost = []
        for row in rows:
            if row["ended"] == "failed":
                self.events.note(f"drafter training on worker {row['worker']} failed: {row['detail']}")
        for worker, failures in self.processes.answers("complaints").items():
            for failure in failures:
                self.events.note(f"a checkpoint of the drafter on worker {worker} failed: {failure}")
        return rows

    def close(self) -> None:
        self.processes.close()
        self._meeting.close()
        server, self.server = self.server, None
        if server is not None:
            server.close()

    def _kill(self, worker: int) -> None:
        self._note_lost(worker)
        self.processes.kill(worker, f"it did not yield within {self.config.coordinator.yield_timeout_s:g} s")

    def _note_death(self, worker: int) -> None:
        if self.server is not None and self.server.trains(worker):
            self._note_lost(worker)
        self._notify(lambda server: server.worker_gone(worker))

    def _note_lost(self, worker: int) -> None:
        if self.server is not None:
            self._lost.append((worker, self.server.term, time.perf_counter() - self._began))

    def _notify(self, call: Callable[[CoordinatorServer], Any]) -> None:
        """Call the coordinator; where its thread has failed end training for good: nothing else frees the devices."""
        server = self.server
        if server is None:
            return
        try:
            call(server)
        except RunError as error:
            # None where the run has ended meanwhile.
            if self.server is server:
                self.server = None
                server.close()
                self.events.note(f"{error}: the drafter is not trained any more in this run")
                self.processes.close()


def machine_addresses(nodes: Sequence[str], driver: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses of the trainers' machines `nodes` and the `driver`'s; loopback if all is one machine.

    All machines by Ray's names; `addresses` are Ray's.
    """
    if set(nodes) <= {driver}:
        return {driver: LOOPBACK}
    return {node: addresses[node] for node in {*nodes, driver}}


def coordinator_endpoint(config: DrafterConfig, private: str, addresses: Mapping[str, str], driver: str) -> str:
    """Return the coordinator's endpoint: the recipe's, else `private` on one machine, else the `driver`'s address.

    ConfigError where workers on other machines could not reach the recipe's.
    """
    if addresses[driver] == LOOPBACK:
        return config.endpoint or private
    endpoint = config.endpoint or f"tcp://{addresses[driver]}:*"
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if not endpoint.startswith("tcp://") or host in ("*", "0.0.0.0", "[::]"):
        raise ConfigError(
            f"there are rollout workers on other machines than the driver, which do not reach {endpoint}: leave "
            "drafter.endpoint out, or set it to tcp://HOST:PORT, an address of the driver's machine"
        )
    return endpoint


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"drafter.rendezvous = {address} is no HOST:PORT")
    return host.strip("[]"), int(port)
