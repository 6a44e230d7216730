"""Training on idle workers: the trainers' processes, the coordinator that gives them orders, and its keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tltlab.errors import ConfigError, RunError
from tltlab.runtime.coordinator.keys import ClientKeys, make_keys
from tltlab.runtime.coordinator.server import CoordinatorServer
from tltlab.runtime.recipe.drafter import DrafterConfig
from tltlab.runtime.run.state import RunEvents

from .group import LOOPBACK, RendezvousServer
from .processes import Machines, TrainerProcesses
from .service import ServedDrafter
from .worker import TrainerPlacement


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
        rows += [_lost_row(rl_step, *lost) for lost in self._lost]
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


def _lost_row(rl_step: int, worker: int, term: int, died_s: float) -> dict[str, Any]:
    """Return the row of a trainer that failed, `died_s` after the RL step began: its work is unknown."""
    return {
        "rl_step": rl_step,
        "worker": worker,
        "term": term,
        "t_start": died_s,
        "duration": 0.0,
        "members": 1,
        **dict.fromkeys(("setup_s", "train_s", "wait_s", "blocked_s"), 0.0),
        **dict.fromkeys(("updates", "tokens", "sequences", "checkpoints"), 0),
        "yield_s": None,
        "ended": "killed",
        "loss": None,
        "accept": None,
        "detail": "its process ended: its work is unknown",
    }


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
