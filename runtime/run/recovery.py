"""A run's checkpoints, and its return to one: in a new process, or after a trainer's failure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tltlab.errors import RunError
from tltlab.files import read_json
from tltlab.policies.policy import Policy
from tltlab.runtime.drafter.drafting import Drafting
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.traces.trace import Trace

from .actors import RunActors
from .checkpoints import RunCheckpoints
from .data import RunData
from .state import RunEvents, RunState, read_state, write_state


class Recovery:
    """Writes and restores a checkpoint's contents: `RunState`, data, engines, trainers, drafter.

    `policy` is the recipe's, and engines follow the decisions of `replay` until they are used up.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        checkpoints: RunCheckpoints,
        data: RunData,
        drafting: Drafting,
        events: RunEvents,
        *,
        replay: Trace | None = None,
    ) -> None:
        self.recipe, self.policy, self.checkpoints = recipe, policy, checkpoints
        self.data, self.drafting, self.events = data, drafting, events
        self._replay = replay
        self._restarts = 0
        self._origin_drafter = drafting.state_dict(checkpoints.folder)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; incomplete ones are noted."""
        folder = self.checkpoints.latest()
        for complaint in self.checkpoints.complaints:
            self.events.note(complaint)
        self.checkpoints.complaints.clear()
        return folder

    def prepare(self, folder: Path | None) -> None:
        """Load the drafter that the run begins with, before any actor starts."""
        if folder is not None:
            state, parts = read_state(folder, self.recipe)
            self.events.rl_step = state.rl_step
            self.drafting.load_state_dict(parts["drafter"], folder / "drafter")

    def begin(self, actors: RunActors, state: RunState, folder: Path | None) -> RunState:
        """Restore the checkpoint in `folder` in the started actors; None for the start, which is `state`."""
        self.actors = actors
        actors.engines_turn()
        self._origin, self._origin_workers = state.copy(), actors.pool.state_dicts()
        if folder is None:
            if self._replay is not None:
                actors.pool.replay(self._replay)
            return state
        try:
            state, _ = self._restore(folder)
            return state
        except TrainerDied as error:
            return self.restart(error)

    def save(self, state: RunState) -> Path:
        """Save all that the run needs to continue; return the checkpoint's folder.

        Engines then load their saved state: a file changes the order of learned trees, and a continuing run must equal
        a resumed one.
        """
        start = time.perf_counter()
        # Failed workers are restarted here: a sleeping engine cannot return its learned state.
        self.actors.engines_turn()
        workers = self.actors.pool.state_dicts()
        self.actors.trainers_turn()

        def write(folder: Path) -> None:
            self.actors.trainers.save_checkpoint(str((folder / "trainer").resolve()))
            parts = {
                "recipe_policy": self.policy.model_dump(mode="json"),
                **self.data.state_dict(folder / "rollouts"),
                "drafter": self.drafting.state_dict(folder / "drafter"),
                "history": self.actors.pool.history.state_dict(folder / "history"),
                "lengths": self.actors.pool.lengths,
            }
            write_state(folder, state, parts, workers, self.recipe)

        folder = self.checkpoints.save(state.rl_step, write)
        self.actors.pool.load_state_dicts(workers)
        self.events.record(f"{folder.name} saved", seconds=round(time.perf_counter() - start, 3))
        return folder

    def restart(self, error: TrainerDied) -> RunState:
        """Restart the trainers and go back to the newest checkpoint or the start, repeatedly if they fail again."""
        while True:
            self._restarts += 1
            if self._restarts > self.recipe.faults.max_restarts:
                raise RunError(f"{error}; that was more than faults.max_restarts = {self.recipe.faults.max_restarts}")
            folder = self.newest()
            self.events.note(f"{error}; trainers are restarted from {'the start' if folder is None else folder.name}")
            try:
                self.actors.restart_trainers()
                state, drafter = self._restore(folder)
                self.drafting.rewind(state.rl_step, drafter, None if folder is None else folder / "drafter")
            except TrainerDied as again:
                error = again
            else:
                return state

    def _restore(self, folder: Path | None) -> tuple[RunState, Mapping[str, Any]]:
        """Restore everything but the drafter; return the state and the drafter's."""
        pool = self.actors.pool
        pool.lengths = {}
        now = self.policy.model_dump(mode="json")
        if folder is None:
            state, drafter, then, history = self._origin.copy(), self._origin_drafter, now, None
            self.data.begin()
        else:
            state, parts = read_state(folder, self.recipe)
            drafter, then, history = parts["drafter"], parts["recipe_policy"], parts.get("history")
            self.data.load_state_dict(parts, folder / "rollouts")
            pool.lengths = parts.get("lengths", {})
            self.actors.trainers_turn()
            self.actors.trainers.load_checkpoint(str((folder / "trainer").resolve()))
        self.events.rl_step = state.rl_step
        # Before the drafters' record is restored: new weights make their canary check anew.
        self.actors.push_weights(state.policy_version)
        if then == now:
            latest = state.policies[-1]
            pool.set_policy(Policy.model_validate(latest["policy"]), latest["rl_step"])
            workers = self._origin_workers
            if folder is not None:
                workers = [read_json(folder / f"worker-{number}.json") for number in range(len(pool.handles))]
            pool.load_state_dicts(workers)
            pool.history.load_state_dict(history, self.checkpoints.folder if folder is None else folder / "history")
        else:
            # Workers may have learned more since this run began.
            pool.set_policy(self.policy, 0)
            pool.load_state_dicts(self._origin_workers)
            pool.history.load_state_dict(None, self.checkpoints.folder)
            pool.set_policy(self.policy, state.rl_step)
            state.in_force(self.policy)
            self.events.note("another policy than before: learned state of the earlier one is dropped")
        if self._replay is not None:
            pool.replay(self._replay)
        self.drafting.target_moved()
        self.events.record(f"continues with RL step {state.rl_step}")
        return state, drafter
