"""A run's checkpoints, and how it goes back to one: in a new process, or after a trainer's death."""

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
    """Puts together what a checkpoint holds: `RunState`, data, engines, trainers, drafter; and brings all of it back.

    `policy` is the recipe's, and engines follow the decisions of `replay` for as long as there are any.
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
        """The newest whole checkpoint; those that are not whole are noted."""
        folder = self.checkpoints.latest()
        for complaint in self.checkpoints.complaints:
            self.events.note(complaint)
        self.checkpoints.complaints.clear()
        return folder

    def prepare(self, folder: Path | None) -> None:
        """Before any actor starts: the drafter that it begins with."""
        if folder is not None:
            state, parts = read_state(folder, self.recipe)
            self.events.rl_step = state.rl_step
            self.drafting.load_state_dict(parts["drafter"], folder / "drafter")

    def begin(self, actors: RunActors, state: RunState, folder: Path | None) -> RunState:
        """The actors have started: be what the checkpoint in `folder` says, None for the start, which is `state`."""
        self.actors = actors
        actors.engines_turn()
        self._origin, self._origin_workers = state.copy(), actors.pool.state_dicts()
        if folder is None:
            if self._replay is not None:
                actors.pool.replay(self._replay)
            return state
        try:
            state, _ = self._go_back(folder)
            return state
        except TrainerDied as error:
            return self.restart(error)

    def save(self, state: RunState) -> Path:
        """Save all that the run needs to go on from here; returns the checkpoint's folder.

        Engines then load what they have just told: learned trees come out of a file in an order of their own, and a
        run that goes on must be no other than one that is resumed.
        """
        start = time.perf_counter()
        # Who died is started again here: what an engine that sleeps has learned cannot be asked for.
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
        """Start the trainers again and go back to the newest checkpoint or the start, however often they die in it."""
        while True:
            self._restarts += 1
            if self._restarts > self.recipe.faults.max_restarts:
                raise RunError(f"{error}; that was more than faults.max_restarts = {self.recipe.faults.max_restarts}")
            folder = self.newest()
            self.events.note(f"{error}; trainers start again from {'the start' if folder is None else folder.name}")
            try:
                self.actors.restart_trainers()
                state, drafter = self._go_back(folder)
                self.drafting.went_back(state.rl_step, drafter, None if folder is None else folder / "drafter")
            except TrainerDied as again:
                error = again
            else:
                return state

    def _go_back(self, folder: Path | None) -> tuple[RunState, Mapping[str, Any]]:
        """Bring everything back but the drafter, whose state then is the second of the two."""
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
        # Before what is known of drafters comes back: weights that move have their canary look anew.
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
            # They may have learned more since this run began.
            pool.set_policy(self.policy, 0)
            pool.load_state_dicts(self._origin_workers)
            pool.history.load_state_dict(None, self.checkpoints.folder)
            pool.set_policy(self.policy, state.rl_step)
            state.in_force(self.policy)
            self.events.note("another policy than before: what engines had learned under that one is left behind")
        if self._replay is not None:
            pool.replay(self._replay)
        self.drafting.target_moved()
        self.events.record(f"goes on with RL step {state.rl_step}")
        return state, drafter
