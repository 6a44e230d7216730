"""The learned drafter of a GRPO run: its head, the trainers beside the rollout workers, and when which weights serve.

Nothing here is needed for the rollout to be right: whatever fails becomes an event of the run, and the drafter in
service stays the last good one.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from tltlab.coordination.canary import Verdict, check_chances
from tltlab.coordination.schedule import TrainingSchedule
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, HybridSpec, LearnedSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy
from tltlab.runtime.coordinator.keys import ClientKeys, ServerKeys, make_keys
from tltlab.runtime.coordinator.log import Membership, PeriodRecord
from tltlab.runtime.coordinator.server import CoordinatorServer
from tltlab.runtime.drafter.heads.kinds import check_fit, load_head, new_head
from tltlab.runtime.engine.drafter_pool import DrafterPool, DrafterReport
from tltlab.runtime.recipe.drafter import DrafterConfig
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.state import RunEvents
from tltlab.state import DrafterState

from .checkpoint import read_drafter, verdicts_of, verdicts_state, write_drafter
from .drafting import NoDrafter, Rows
from .processes import TrainerProcesses
from .worker import SpotPlace

MOST_LETTERS = 85
"""Of a folder that is to hold sockets: their addresses have at most 107."""


class DrafterRun(NoDrafter):
    """The real thing, by a recipe's `[drafter]`; its heads and checkpoints go below `out`."""

    def __init__(self, config: DrafterConfig, recipe: Recipe, out: Path, events: RunEvents) -> None:
        self.config, self.recipe, self.events = config, recipe, events
        self.out = Path(out).resolve()
        self.num_workers = recipe.rollout.num_workers
        self.schedule = TrainingSchedule(config.schedule, pretrained=config.checkpoint is not None)
        self.updates = 0
        self.serves = True
        """Whether the policy that the run begins with ever drafts with it."""
        self._swaps = 0
        self._head = self.out / "initial" if config.checkpoint is None else Path(config.checkpoint).resolve()
        self._place: Path | None = None
        self._server: CoordinatorServer | None = None
        self._server_keys: ServerKeys | None = None
        self._server_lock = threading.Lock()
        self._trainers: TrainerProcesses | None = None
        self._trains_in: int | None = None
        self._began = time.perf_counter()
        self._died: set[int] = set()
        self._annotating: dict[int, Any] = {}
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._rows: Rows = {}
        self._lately: tuple[float | None, int] = (None, 0)
        self._verdicts: dict[int, tuple[Verdict, ...]] = {}
        self._weights: dict[str, Tensor] | None = None
        self._predicted: list[float] = []
        self._training: Any = None
        self._data: Path | None = None
        self._published = 0

    @property
    def specs(self) -> dict[str, DrafterSpec]:
        config = self.config
        learned = LearnedSpec(
            method=config.loss.method,
            model=str(self._head),
            trained=config.checkpoint is not None,
            fallback=config.fallback,
        )
        return {config.name: learned}

    def prepare(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="tltlab-drafter-"))
        if len(str(self._place)) > MOST_LETTERS:
            raise ConfigError(f"{self._place} is too long for a socket's address: set TMPDIR to a shorter folder")
        if self.config.checkpoint is None:
            new_head(self.recipe.model, self.config.loss.method, self.recipe.seed).save(self._head)
        if not self.serves:
            name = self.config.name
            self.events.note(
                f"policy {self.recipe.rollout.policy} never drafts with {name!r}: it is trained and serves nobody"
            )

    def feed(self, worker: int) -> str | None:
        return f"ipc://{self._place}/feed-{worker}"

    def start(
        self,
        workers: Sequence[Any],
        trainer: Any,
        get: Callable[[Any], Any],
        ask: Callable[..., list[Any]],
    ) -> None:
        self._workers, self._trainer, self._get, self._ask_workers = workers, trainer, get, ask
        self._start_trainers()
        self._serve(ask)

    def _start_trainers(self) -> None:
        config = self.config
        self._stop()
        client_keys: tuple[ClientKeys | None, ...] = (None,) * self.num_workers
        if config.endpoint is not None:
            self._server_keys, client_keys = make_keys(self.num_workers)
        where = self._ask_workers("place")
        check_machines(config, [node for node, _ in where], ray.get_runtime_context().get_node_id())
        self._server = self._new_server(config.endpoint or f"ipc://{self._place}/coordinator")
        assert self._place is not None
        places = [
            SpotPlace(
                worker=worker,
                coordinator=self._server.endpoint,
                feed=f"ipc://{self._place}/feed-{worker}",
                folder=self.out / f"worker-{worker}",
                rendezvous=self._place / "groups",
                head=self._head,
                seed=self.recipe.seed,
                max_depth=self.recipe.rollout.max_draft_depth,
                temperature=self.recipe.rollout.temperature,
                keys=client_keys[worker],
            )
            for worker in range(self.num_workers)
        ]
        self._trainers = TrainerProcesses(places, where, config, self.events, self._gone)
        self._trainers.state, self._trainers.published = self._training, self._published
        self._trainers.begin(self._trainer.frozen(), self._data)

    def rejoin(self, worker: int) -> None:
        if self._trainers is not None:
            handle = self._workers[worker]
            self._serve(lambda method, *args: self._get(getattr(handle, method).remote(*args)))

    def _serve(self, ask: Callable[..., Any]) -> None:
        """Have engines that begin, which `ask` calls, draft with what is in service, under the canary's eye."""
        ask("guard_drafter", self.config.canary)
        if self._weights is not None:
            ask("update_draft_weights", ray.put(self._weights), self._predicted, self.updates)

    def rollout_starts(self, rl_step: int) -> None:
        trusted = all(report.trusted for report in self._reports())
        age = rl_step - self._published
        decision = self.schedule.decide(rl_step, DrafterState(age=age, updates=self.updates), trusted=trusted)
        self.events.record(f"{'training' if decision.train else 'no training'}: {decision.reason}")
        self._in_service = {"drafter_version": self._swaps, "drafter_age": age, "drafter_updates": self.updates}
        if decision.train:
            self._trains_in, self._began, self._died = rl_step, time.perf_counter(), set()
            self._coordinate(lambda server: server.rollout_started(rl_step))

    def rollout_ends(self, rl_step: int) -> None:
        if self._trains_in is not None:
            self._trains_in = None
            self._coordinate(lambda server: server.rollout_ended(rl_step))

    def annotate(self) -> None:
        self._annotating = self._asked("annotate")

    def publish(self, rl_step: int) -> None:
        assert self._trainers is not None
        annotated = self._trainers.collect(self._annotating)
        self._rows["acceptance"] = [row for rows in annotated.values() for row in rows]
        self._rows["spot_training"] = [row for rows in self._ask("take_rows").values() for row in rows]
        self._rows["spot_training"] += self._lost(rl_step - 1, self._rows["spot_training"])
        for row in self._rows["spot_training"]:
            if row["ended"] == "failed":
                self.events.note(f"drafter training on worker {row['worker']} failed: {row['detail']}")
        for worker, failures in self._ask("complaints").items():
            for failure in failures:
                self.events.note(f"a checkpoint of the drafter on worker {worker} failed: {failure}")
        self._accepted()
        counts = self._ask("num_updates")
        most = max(counts.values(), default=0)
        if most > self.updates:
            self._swap(rl_step, [worker for worker, updates in counts.items() if updates == most], most)

    def target_moved(self) -> None:
        assert self._trainers is not None
        self._trainers.target = self._trainer.frozen()
        self._ask("set_target", self._trainers.target)

    def went_back(self, rl_step: int, state: Mapping[str, Any], folder: Path | None) -> None:
        # Coordinator and trainers know RL steps that only grow, so new ones begin.
        self._stop()
        served = self.updates
        self._take(state, folder)
        self._annotating, self._rows, self._lately = {}, {}, (None, 0)
        self._trains_in, self._died = None, set()
        # Engines repeat the last RL step that they were in.
        self._ask_workers("went_back", rl_step)
        # The weights that they have would be news to them, and they would forget how those did.
        if self.updates != served:
            weights = load_head(self._head).serving_weights() if self._weights is None else self._weights
            self._ask_workers("update_draft_weights", ray.put(weights), self._predicted, self.updates)
        self._start_trainers()

    def rows(self, rl_step: int, drift_kl: float | None) -> Rows:
        accept_length, drafts = self._lately
        self.schedule.rollout_done(rl_step, accept_length, drift_kl, drafts=drafts)
        rows, self._rows = self._rows, {}
        return rows | {"steps": [self._in_service]}

    def summary(self) -> dict[str, Any] | None:
        drift = asdict(self.schedule.summary())
        known = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in drift.items()}
        return {"name": self.config.name, "updates": self.updates, "swaps": self._swaps, "drift": known}

    def save(self) -> None:
        """Write it to `drafter/final`, as a head's folder."""
        folder = self.out / "final"
        partial = folder.with_name(".final.partial")
        shutil.rmtree(partial, ignore_errors=True)
        head = load_head(self._head)
        if self._weights is not None:
            head.load_state_dict(self._weights)
        head.save(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """As `NoDrafter.state_dict`: the drafter in service, and all that trainers train on and from.

        That is its weights, AdamW's moments and counters, since when it serves, the training schedule, the canaries'
        verdicts; and of every trainer that is alive its buffer, held-out sequences and random state, in a file of its
        own. Not kept are older drafters, whose acceptance the trace shows beside that of the one in service.
        """
        if self._trainers is not None:
            self._trainers.save_data(folder)
        if self._weights is not None:
            folder.mkdir(exist_ok=True)
            write_drafter(folder, self._weights, self._get(self._training))
        return {
            "name": self.config.name,
            "updates": self.updates,
            "swaps": self._swaps,
            "published": self._published,
            "predicted": list(self._predicted),
            "in_service": self._weights is not None,
            "schedule": self.schedule.state_dict(),
            "seen": {str(worker): list(seen) for worker, seen in self._seen.items()},
            "verdicts": verdicts_state(self._verdicts),
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        if state.get("name") != self.config.name:
            raise ConfigError(
                f"{folder} is of a run with {state.get('name') or 'no'} drafter, and this recipe trains "
                f"{self.config.name!r}"
            )
        self._take(state, folder)

    def _take(self, state: Mapping[str, Any], folder: Path | None) -> None:
        """Be what `state_dict` told; trainers that start from now on learn from what it kept."""
        self.updates, self._swaps, self._published = state["updates"], state["swaps"], state["published"]
        self._predicted = list(state["predicted"])
        self.schedule.load_state_dict(state["schedule"])
        self._seen = {int(worker): (seen[0], seen[1], seen[2]) for worker, seen in state["seen"].items()}
        self._verdicts = verdicts_of(state["verdicts"])
        self._weights, self._training, self._data = None, None, folder and folder.resolve()
        if state["in_service"]:
            assert folder is not None
            self._weights, training = read_drafter(folder)
            self._training = ray.put(training)

    def _stop(self) -> None:
        if self._trainers is not None:
            self._trainers.close()
        with self._server_lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        self._stop()
        for left in self.out.glob("worker-*/*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def _new_server(self, endpoint: str, *, take_over: bool = False) -> CoordinatorServer:
        return CoordinatorServer(
            self.config.coordinator, endpoint, self.num_workers, self._kill, self._server_keys, take_over=take_over
        )

    def _kill(self, worker: int) -> None:
        assert self._trainers is not None
        self._died.add(worker)
        self._trainers.kill(worker, f"it did not yield within {self.config.coordinator.yield_timeout_s:g} s")

    def _gone(self, worker: int) -> None:
        self._died.add(worker)
        self._coordinate(lambda server: server.worker_gone(worker))

    def _coordinate(self, tell: Callable[[CoordinatorServer], Any]) -> None:
        """Tell the coordinator something; where its thread has died another one takes over, and is told."""
        server = self._server
        for _ in range(2):
            if server is None:
                return
            try:
                tell(server)
                return
            except RunError as error:
                server = self._take_over(server, error)
        self._give_up("the worker coordinator failed twice")

    def _take_over(self, dead: CoordinatorServer, why: RunError) -> CoordinatorServer | None:
        with self._server_lock:
            # Another thread may have been first, or the run has ended.
            if self._server is not dead:
                return self._server
            dead.close()
            try:
                self._server = self._new_server(dead.endpoint, take_over=True)
                if self._trains_in is not None:
                    self._server.rollout_started(self._trains_in)
            except RunError as error:
                self._server = None
                self._give_up(f"no worker coordinator could take over ({error})")
                return None
            self.events.note(f"{why}; another one has taken over")
            return self._server

    def _give_up(self, why: str) -> None:
        """Go on without training: nobody could take the devices back."""
        assert self._trainers is not None
        self.events.note(f"{why}: the drafter is not trained any more in this run")
        self._trainers.close()

    def _lost(self, rl_step: int, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows of `spot_training` for trainers that died in this rollout's training and tell nothing any more."""
        died, self._died = self._died, set()
        server = self._server
        if not died or server is None:
            return []
        known = {(row["worker"], row["term"]) for row in told}
        rows = {
            (member.worker, period.term): lost_row(period, member, self._began)
            for period in server.periods()
            for member in period.members
            if period.rl_step == rl_step and member.worker in died
        }
        return [row for key, row in rows.items() if key not in known]

    def _swap(self, rl_step: int, furthest: Sequence[int], updates: int) -> None:
        """Bring the drafter of the trainers that are `furthest` to the engines, and to all other trainers."""
        assert self._trainers is not None
        # They have the same drafter, and one that has just started has nothing to judge it by.
        predictions = self._trainers.collect(self._asked("predicted", workers=furthest))
        if not predictions:
            return
        best = min(predictions, key=lambda worker: (not predictions[worker], worker))
        state = self._asked("state", workers=[best])
        weights = self._ask("weights", workers=[best]).get(best)
        if weights is None or not self._trainers.collect(state):
            return
        try:
            check_chances(predictions[best])
        except ConfigError as error:
            self.events.note(f"the drafter that worker {best} trained does not go into service: {error}")
            return
        shared = ray.put(weights)
        self._ask_workers("update_draft_weights", shared, predictions[best], updates)
        self._weights, self._predicted, self._published = weights, predictions[best], rl_step
        self._training = self._trainers.state = state[best]
        self._trainers.published = rl_step
        self.schedule.trained(rl_step - 1, updates - self.updates)
        self.updates = updates
        self._swaps += 1
        self._ask("publish", state[best], rl_step)

    def _asked(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> dict[int, Any]:
        assert self._trainers is not None
        return self._trainers.ask(method, *args, workers=workers)

    def _ask(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> dict[int, Any]:
        assert self._trainers is not None
        return self._trainers.collect(self._trainers.ask(method, *args, workers=workers))

    def _reports(self) -> list[DrafterReport]:
        reports: list[DrafterReport] = self._ask_workers("drafter_report")
        for worker, report in enumerate(reports):
            known = self._verdicts.get(worker, ())
            for verdict in report.verdicts:
                if verdict not in known:
                    tell = self.events.record if verdict.kind == "fine" else self.events.note
                    tell(f"worker {worker}: {verdict.sentence}", worker=worker, verdict=asdict(verdict))
            self._verdicts[worker] = report.verdicts
        return reports

    def _accepted(self) -> None:
        """The learned drafter's accepted length and drafts in the rollout that has just ended."""
        drafts = kept = 0
        for worker, report in enumerate(self._reports()):
            positions = report.positions.get(self.config.name)
            now = (report.updates, sum(positions.drafted[:1]), sum(positions.kept)) if positions else (0, 0, 0)
            before = self._seen.get(worker, (0, 0, 0))
            # An engine that was started again has counted from 0.
            base = before if before[0] == now[0] and before[1] <= now[1] else (now[0], 0, 0)
            drafts, kept = drafts + now[1] - base[1], kept + now[2] - base[2]
            self._seen[worker] = now
        self._lately = (1 + kept / drafts if drafts else None), drafts


def lost_row(period: PeriodRecord, member: Membership, began: float) -> dict[str, Any]:
    """What the coordinator knows of a trainer that died: when it held its device, and not what it did."""
    until = member.stop_s if member.free_s is None else member.free_s
    return {
        "rl_step": period.rl_step,
        "worker": member.worker,
        "term": period.term,
        "t_start": max(member.start_s - began, 0.0),
        "duration": (time.perf_counter() if until is None else until) - member.start_s,
        "members": len(period.members),
        **dict.fromkeys(("setup_s", "train_s", "wait_s", "blocked_s"), 0.0),
        **dict.fromkeys(("updates", "tokens", "sequences", "checkpoints"), 0),
        "yield_s": None,
        "ended": "killed",
        "loss": None,
        "accept": None,
        "detail": "its process ended: what it did is not known",
    }


def check_machines(config: DrafterConfig, nodes: Sequence[str], here: str) -> None:
    """Raise ConfigError where workers on other machines than the driver's could not be reached, or not together.

    `nodes` are the workers' machines by Ray's names, `here` is the driver's.
    """
    if set(nodes) <= {here}:
        return
    host = "" if config.endpoint is None else config.endpoint.removeprefix("tcp://").rpartition(":")[0]
    if config.endpoint is None or not config.endpoint.startswith("tcp://") or host in ("*", "0.0.0.0", "[::]"):
        raise ConfigError(
            "there are rollout workers on other machines than the driver: set drafter.endpoint to tcp://HOST:PORT, an "
            "address of the driver's machine that they can reach"
        )
    if len(set(nodes)) > 1 and config.coordinator.max_members != 1:
        raise ConfigError(
            "the rollout workers are on several machines, and trainers of one machine only train together: set "
            "drafter.coordinator.max_members to 1"
        )


def drafter_of(recipe: Recipe, policy: Policy, out: Path, events: RunEvents) -> NoDrafter:
    """What a recipe says of a drafter to train. Raises ConfigError where that cannot be run."""
    config = recipe.drafter
    if config is None:
        return NoDrafter()
    if config.checkpoint is not None:
        _check_head(config.checkpoint, config.loss.method, recipe.model)
    run = DrafterRun(config, recipe, out / "drafter", events)
    specs = DEFAULT_DRAFTERS | policy.drafters | recipe.rollout.drafters | run.specs
    DrafterPool(specs, recipe.rollout.max_draft_depth)
    run.serves = any(s.speculates and _drafts(s.drafter, config.name, specs) for s in policy.strategies)
    return run


def _check_head(folder: str, method: str, model: str) -> None:
    head = load_head(folder)
    if head.method != method:
        raise ConfigError(f"{folder} is an {head.method} head, and drafter.loss trains one of method {method}")
    check_fit(head, folder, model)


def _drafts(name: str, learned: str, specs: Mapping[str, DrafterSpec]) -> bool:
    """Whether strategies of drafter `name` may draft with `learned`."""
    spec = specs.get(name)
    return learned in ((spec.first, spec.otherwise) if isinstance(spec, HybridSpec) else (name,))
