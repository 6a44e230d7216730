"""The learned drafter of a GRPO run, between the trainers next to the rollout workers and the engines that draft.

Rollouts are correct without it: a failure becomes an event of the run, and the drafter in service stays the last good
one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from tltlab.coordination.canary import check_chances
from tltlab.coordination.schedule import Attempt, TrainingSchedule, tokens_per_draft
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.files import new_folder
from tltlab.policies.policy import Policy
from tltlab.runtime.coordinator.keys import ClientKeys
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.graphs import parts_of
from tltlab.runtime.ray.actors import get
from tltlab.runtime.ray.scratch import scratch_folder
from tltlab.runtime.recipe.drafter import DrafterConfig
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.memory import ProcessMemory
from tltlab.runtime.run.state import RunEvents
from tltlab.state import DrafterState

from .drafting import Drafting, NullDrafting, Rows
from .heads.kinds import check_fit, load_head, new_head
from .processes import IdleWorkerTraining, coordinator_endpoint, machine_addresses
from .service import CanaryWatch, ServedDrafter
from .worker import TrainerPlacement

MOST_LETTERS = 85
"""Most characters of a folder for sockets, whose addresses have at most 107."""


class DrafterRun(Drafting):
    """A `Drafting` by a recipe's `[drafter]`; its heads and checkpoints go below `out`.

    `served` is the drafter in service, `watch` the canaries' verdicts on it, `training` trains the next one, by the
    `schedule`. `drafts`: True if the policy that the run begins with ever drafts with it.
    """

    def __init__(self, config: DrafterConfig, recipe: Recipe, out: Path, events: RunEvents) -> None:
        self.config, self.recipe, self.events = config, recipe, events
        self.out = Path(out).resolve()
        self.head = self.out / "initial"
        self.drafts = True
        self.schedule = TrainingSchedule(config.schedule, pretrained=config.pretrained)
        self.served = ServedDrafter()
        self.watch = CanaryWatch(config.name, events)
        self.training: IdleWorkerTraining | None = None
        self._sockets: Path | None = None
        self._data: Path | None = None
        self._annotating: dict[int, Any] = {}
        self._rows: Rows = {}

    @property
    def specs(self) -> dict[str, DrafterSpec]:
        config = self.config
        method = config.loss.method
        # Engines find MTP layers in the target's folder.
        head = "" if method == "mtp" else str(self.head)
        learned = LearnedSpec(method=method, model=head, trained=config.pretrained, fallback=config.fallback)
        return {config.name: learned}

    def prepare(self) -> None:
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
        return f"ipc://{self._sockets}/feed-{worker}"

    def start(self, workers: Sequence[Any], frozen: Callable[[], Any], ask: Callable[..., list[Any]]) -> None:
        self._workers, self._frozen, self._ask_engines = workers, frozen, ask
        self._start_training()
        self._serve(ask)

    def _start_training(self) -> None:
        self._stop_training()
        machines = self._ask_engines("place")
        driver = ray.get_runtime_context().get_node_id()
        of_ray = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        addresses = machine_addresses([node for node, _ in machines], driver, of_ray)
        endpoint = coordinator_endpoint(self.config, f"ipc://{self._sockets}/coordinator", addresses, driver)
        self.training = IdleWorkerTraining(self.config, endpoint, machines, driver, addresses, self._place, self.events)
        self.training.begin(self._frozen(), self.served, self._data)

    def _stop_training(self) -> None:
        if self.training is not None:
            self.training.close()

    def _place(
        self, worker: int, coordinator: str, rendezvous: str, host: str, keys: ClientKeys | None
    ) -> TrainerPlacement:
        return TrainerPlacement(
            worker=worker,
            coordinator=coordinator,
            feed=self.feed(worker),
            folder=self.out / f"worker-{worker}",
            rendezvous=rendezvous,
            host=host,
            head=self.head,
            seed=self.recipe.seed,
            max_depth=self.recipe.rollout.max_draft_depth,
            temperature=self.recipe.rollout.temperature,
            keys=keys,
        )

    def rejoin(self, worker: int) -> None:
        if self.training is not None:
            handle = self._workers[worker]
            self._serve(lambda method, *args: get(getattr(handle, method).remote(*args)))

    def _serve(self, ask: Callable[..., Any]) -> None:
        """Make new engines, which `ask` calls, draft with the drafter in service, under the canary's watch."""
        ask("ask_engine", "guard_drafter", self.config.canary)
        served = self.served
        if served.weights is not None:
            ask("update_draft_weights", ray.put(served.weights), list(served.predicted), served.updates)

    def rollout_starts(self, rl_step: int) -> None:
        assert self.training is not None
        trusted = self.watch.look(self._ask_engines("ask_engine", "drafter_report"))
        served = self.served
        age = rl_step - served.published
        decision = self.schedule.decide(rl_step, DrafterState(age=age, updates=served.updates), trusted=trusted)
        self.events.record(f"{'training' if decision.train else 'no training'}: {decision.reason}")
        self._in_service = {"drafter_version": served.swaps, "drafter_age": age, "drafter_updates": served.updates}
        if decision.train:
            self.training.rollout_starts(rl_step)

    def rollout_ends(self, rl_step: int) -> None:
        if self.training is not None:
            self.training.rollout_ends(rl_step)

    def annotate(self) -> None:
        assert self.training is not None
        self._annotating = self.training.processes.ask("annotate")

    def publish(self, rl_step: int) -> None:
        assert self.training is not None
        processes = self.training.processes
        annotated = processes.collect(self._annotating)
        self._rows["acceptance"] = [row for rows in annotated.values() for row in rows]
        self._rows["spot_training"] = self.training.rows(rl_step - 1)
        self.watch.rollout_ended(self._ask_engines("ask_engine", "drafter_report"))
        counts = processes.answers("num_updates")
        most = max(counts.values(), default=0)
        if most > self.served.updates:
            self._swap(rl_step, [worker for worker, updates in counts.items() if updates == most], most)

    def _swap(self, rl_step: int, furthest: Sequence[int], updates: int) -> None:
        """Load the drafter of the `furthest` trainers into the engines, and into all other trainers."""
        assert self.training is not None
        processes = self.training.processes
        # All of these have the same drafter; one that has just started has no held-out data.
        predictions = processes.answers("predicted", workers=furthest)
        if not predictions:
            return
        best = min(predictions, key=lambda worker: (not predictions[worker], worker))
        predicted = predictions[best]
        state = processes.ask("state", workers=[best])
        weights = processes.answers("weights", workers=[best]).get(best)
        if weights is None or not processes.collect(state):
            return
        try:
            check_chances(predicted)
        except ConfigError as error:
            self.events.note(f"the drafter that worker {best} trained does not go into service: {error}")
            return
        if self.schedule.config.kind == "gated" and not self._passes_gate(rl_step - 1, best):
            return
        self._ask_engines("update_draft_weights", ray.put(weights), predicted, updates)
        self.schedule.trained(rl_step - 1, updates - self.served.updates)
        self.served = ServedDrafter(
            updates=updates,
            swaps=self.served.swaps + 1,
            published=rl_step,
            predicted=predicted,
            weights=weights,
            training=state[best],
        )
        self.training.publish(self.served)

    def _passes_gate(self, rl_step: int, worker: int) -> bool:
        """Return True if the drafter trained in the rollout of `rl_step` goes into service, by `worker`'s data.

        A rejected drafter is judged again when it has been trained further.
        """
        assert self.training is not None
        trained = [row for row in self._rows["spot_training"] if row["updates"]]
        if not trained:
            return False
        answers = self.training.processes.answers("compared", workers=[worker])
        candidate, served = answers.get(worker, ([], []))
        attempt = Attempt(
            rl_step=rl_step,
            delay_s=max(row["yield_s"] or 0.0 for row in trained),
            candidate=tokens_per_draft(candidate) if candidate else None,
            served=tokens_per_draft(served) if served else None,
        )
        self.schedule.attempted(attempt)
        passes = self.schedule.serves(attempt)
        if attempt.candidate is None or attempt.served is None:
            reason = "no held-out response of the newest policy measures its acceptance"
        else:
            reason = f"{attempt.candidate:.3f} tokens per draft on held-out responses, {attempt.served:.3f} before"
        self.events.record(
            f"the drafter trained in RL step {rl_step} {'serves' if passes else 'does not serve'}: {reason}"
        )
        return passes

    def target_moved(self) -> None:
        assert self.training is not None
        self.training.set_target(self._frozen())

    def rewind(self, rl_step: int, state: Mapping[str, Any], folder: Path | None) -> None:
        self._stop_training()
        updates = self.served.updates
        self._restore(state, folder)
        self._annotating, self._rows = {}, {}
        # Engines repeat the last RL step that they were in.
        self._ask_engines("rewind", rl_step)
        # Reloading the same weights would clear their acceptance record.
        served = self.served
        if served.updates != updates:
            weights = load_head(self.head).serving_weights() if served.weights is None else served.weights
            self._ask_engines("update_draft_weights", ray.put(weights), list(served.predicted), served.updates)
        self._start_training()

    def rows(self, rl_step: int, *, rollout_s: float = 0.0, tokens: int = 0) -> Rows:
        length, drafts = self.watch.accept_length, self.watch.drafts
        self.schedule.rollout_done(rl_step, length, drafts=drafts, rollout_s=rollout_s, tokens=tokens)
        rows, self._rows = self._rows, {}
        return rows | {"steps": [self._in_service]}

    def memory(self) -> list[ProcessMemory]:
        return [] if self.training is None else list(self.training.processes.answers("memory").values())

    def summary(self) -> dict[str, Any] | None:
        return {"name": self.config.name, "updates": self.served.updates, "swaps": self.served.swaps}

    def save(self) -> None:
        """Write the drafter to `drafter/final`, as a head's folder."""
        head = load_head(self.head)
        if self.served.weights is not None:
            head.take_serving_weights(self.served.weights)
        with new_folder(self.out / "final") as folder:
            head.save(folder)

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Return the drafter in service, and all training state and data.

        State of the drafter: weights, AdamW's moments and counters, the RL step since which it serves, the training
        schedule and the canaries' verdicts. Every live trainer has its own file: buffer, held-out sequences, random
        state. Older drafters are not kept; the trace has their acceptance.
        """
        if self.training is not None:
            self.training.processes.save_data(folder)
        parts = self.served.state_dict(folder) | self.watch.state_dict()
        return {"name": self.config.name, "schedule": self.schedule.state_dict(), **parts}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        if state.get("name") != self.config.name:
            raise ConfigError(
                f"{folder} is of a run with {state.get('name') or 'no'} drafter, and this recipe trains "
                f"{self.config.name!r}"
            )
        self._restore(state, folder)

    def _restore(self, state: Mapping[str, Any], folder: Path | None) -> None:
        """Restore the result of `state_dict`; trainers started from now on use its data."""
        self.served = ServedDrafter.from_state_dict(state, folder)
        self.watch.load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        self._data = folder and folder.resolve()

    def close(self) -> None:
        self._stop_training()
        for partial in self.out.glob("worker-*/.checkpoint-*"):
            shutil.rmtree(partial, ignore_errors=True)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)


def drafter_of(recipe: Recipe, policy: Policy, out: Path, events: RunEvents) -> Drafting:
    """Return the drafter that a recipe trains. ConfigError where that cannot be run."""
    config = recipe.drafter
    if config is None:
        return NullDrafting()
    if config.checkpoint is not None:
        head = load_head(config.checkpoint, target=recipe.model)
        if head.method != config.loss.method:
            raise ConfigError(
                f"{config.checkpoint} is an {head.method} head, and drafter.loss trains one of method "
                f"{config.loss.method}"
            )
        check_fit(head, config.checkpoint, recipe.model)
    run = DrafterRun(config, recipe, out / "drafter", events)
    specs = DEFAULT_DRAFTERS | policy.drafters | recipe.rollout.drafters | run.specs
    DrafterPool(specs, recipe.rollout.max_draft_depth)
    run.drafts = any(s.speculates and config.name in parts_of(specs, s.drafter) for s in policy.strategies)
    return run
