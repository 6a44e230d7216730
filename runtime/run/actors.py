"""The actors of a run in their places: engines, trainers, and their turns where they share the devices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tltlab.drafters.specs import LearnedSpec
from tltlab.policies.policy import Policy
from tltlab.runtime.drafter.drafting import Drafting
from tltlab.runtime.ray.actors import actor_env
from tltlab.runtime.ray.liveness import StoppedProcesses
from tltlab.runtime.ray.start import ray_running
from tltlab.runtime.recipe.engines import drafters_of, engine_build
from tltlab.runtime.recipe.gpus import weight_transport
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.rollout.pool import WorkerPool
from tltlab.runtime.trainer.group import TrainerDied, TrainerGroup

from .placement import GpuPlacement
from .state import RunEvents


class RunActors:
    """Starts Ray where there is none, the rollout workers, the trainers and the drafter's trainers; a context manager.

    Colocated, engines sleep while trainers have the devices, and with `train.offload` trainers keep their tensors on
    the host while engines have them. `engines_turn` and `trainers_turn` hand the devices over; they do nothing where
    both have their own devices.
    """

    def __init__(self, recipe: Recipe, policy: Policy, drafting: Drafting, events: RunEvents) -> None:
        self.recipe = recipe
        self._policy, self._drafting, self._events = policy, drafting, events
        self._colocated = recipe.cluster.placement == "colocated"
        self._transport = weight_transport(recipe)
        self._engines_awake = True
        self._given_up = False
        # As in graphs.json.
        self.graphs: dict[str, Any] = {}

    def __enter__(self) -> RunActors:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        recipe, drafting = self.recipe, self._drafting
        stack.enter_context(ray_running(recipe.cluster))
        place = stack.enter_context(GpuPlacement(recipe))
        stack.callback(drafting.close)
        drafting.prepare()
        build = engine_build(recipe, self._policy, drafters_of(recipe, self._policy) | drafting.specs)
        self._learned = any(isinstance(spec, LearnedSpec) for spec in build.drafters.values())
        self.pool = WorkerPool(
            recipe, build, drafting.feed, place.worker_options, events=self._events, on_restart=drafting.rejoin
        )
        env = actor_env({"OMP_NUM_THREADS": str(recipe.train.threads)}, recipe.cluster.host)
        self.trainers = TrainerGroup(recipe, place.trainer_options, env)
        stack.callback(self.trainers.close)
        stack.callback(self.pool.close)
        if recipe.cluster.num_nodes == 1:
            patience_s = recipe.faults.stopped_timeout_s
            stack.enter_context(StoppedProcesses(self._processes, self._events.note, patience_s))
        if self._colocated:
            # An engine measures free memory when it starts, so no other actor may take any then.
            self._start_engines()
            self.pool.sleep()
            self._engines_awake = False
            self._with_trainers()
        else:
            with ThreadPoolExecutor(1) as executor:
                trainers = executor.submit(self._with_trainers)
                try:
                    self._start_engines()
                except BaseException:
                    # A run without engines does not wait for trainers.
                    self._given_up = True
                    self.trainers.close()
                    raise
                trainers.result()
        self._with_trainers(self._start_drafting)

    def _processes(self) -> dict[str, int]:
        """Return the process ids of engines and trainer ranks that have started, by name."""
        kinds = {"rollout worker": self.pool.pids, "trainer rank": self.trainers.pids}
        return {f"{kind} {n}": pid for kind, pids in kinds.items() for n, pid in enumerate(list(pids))}

    def _start_engines(self) -> None:
        self.pool.start()
        build, captured = self.pool.build, self.pool.ask("ask_engine", "captured_graphs")
        self.graphs = build.as_json(captured)
        for sentence in build.sentences(captured[0]):
            self._events.note(sentence)

    def _start_drafting(self) -> None:
        # Sleeping engines neither answer nor load draft weights.
        self.engines_turn()
        self._drafting.start(self.pool.handles, self.trainers.frozen, self.pool.ask)

    def _with_trainers(self, then: Callable[[], None] = lambda: None) -> None:
        """Start the trainers where none are and do `then`; both again after a failure, `faults.max_restarts` times."""
        for restarts_left in reversed(range(self.recipe.faults.max_restarts + 1)):
            try:
                if not self.trainers.handles:
                    self.restart_trainers()
                then()
                return
            except TrainerDied as error:
                if not restarts_left or self._given_up:
                    raise
                self._events.note(f"{error}; trainers are restarted")

    def engines_turn(self) -> None:
        """Hand the devices to the engines."""
        if self._colocated and not self._engines_awake:
            self.trainers.offload()
            self.pool.wake_up()
            self._engines_awake = True

    def trainers_turn(self, *, weights_follow: bool = False) -> None:
        """Hand the devices to the trainers. `weights_follow`: `push_weights` comes before the next call of engines.

        Then engines need not keep their own weights. A learned drafter's lie next to them and would not be restored.
        """
        if self._colocated and self._engines_awake:
            self.pool.sleep(2 if weights_follow and not self._learned else 1)
            # Before calls to trainers, which may fail: engines must not be put to sleep twice.
            self._engines_awake = False
            self.trainers.onload()

    def push_weights(self, version: int, before: Callable[[], None] = lambda: None) -> None:
        """Send the policy's weights to the engines as `version`, after `before`, which may call engines."""
        in_place = self._colocated and self._transport == "ipc" and self.pool.all_alive
        if in_place:
            # Engines and trainers hold the devices: two models fit without caches and optimizer steps.
            self.trainers_turn()
            self.pool.wake_up(["weights"])
        else:
            self.engines_turn()
        before()
        transport = "host" if self._colocated and not in_place else self._transport
        self.pool.update_weights(self.trainers.send_weights, version, transport)
        if in_place:
            self.trainers.offload()
            self.pool.wake_up(["kv_cache"])
            self._engines_awake = True

    def restart_trainers(self) -> None:
        """Restart all trainers, in the state of the run's start."""
        if self._colocated and self._engines_awake:
            self.pool.sleep()
            self._engines_awake = False
        self.trainers.restart()
