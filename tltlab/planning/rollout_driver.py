"""The only caller of a planner, in the simulator and in a pool of engines alike."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tltlab.config import shown
from tltlab.errors import ConfigError, one_line
from tltlab.state import Key
from tltlab.traces.schema import Row, columns

from .rollout import HELD, Action, Gather, Hold, Move, RolloutPlanner, RolloutState, Shape


class PlanDriver:
    """Asks a planner, and passes on what can be done.

    A planner that raises, or that returns what cannot be done, is named once with `note`, and not asked again in the
    rollout: it goes on as it is. SystemExit counts as raised, KeyboardInterrupt passes.
    """

    def __init__(self, planner: RolloutPlanner | None, note: Callable[[str], object]):
        self.planner = planner
        self.note = note
        self._noted = self._refused = False

    def wants(self, running: int) -> bool:
        """True if the planner is to be asked with so many requests left."""
        return self.planner is not None and not self._refused and 0 < running <= self.planner.asked_below

    def begin(self, state: RolloutState) -> Sequence[Action]:
        """Ask at the start of a rollout."""
        self._refused = False
        if self.planner is not None:
            self.planner.asked_below = type(self.planner).asked_below
        return self.ask(state) if self.wants(len(state)) else ()

    def ask(self, state: RolloutState) -> Sequence[Action]:
        """Ask now; return the actions that are valid, none where one is not."""
        assert self.planner is not None
        try:
            actions = list(self.planner.plan(state))
            check_actions(actions, state)
            if math.isnan(self.planner.asked_below):
                raise ConfigError("asked_below is NaN")
        except (Exception, SystemExit) as error:
            self._refuse(one_line(error))
            return ()
        gathers = [i for i, action in enumerate(actions) if isinstance(action, Gather)]
        last = gathers[0] + 1 if gathers else len(actions)
        for action in actions[last:]:
            self.failed(action, "all requests were gathered first")
        return actions[:last]

    def failed(self, action: Action, why: str) -> None:
        """Tell the planner, and the user, that an action was not carried out."""
        self.note(f"{type(self.planner).__name__}: {_words(action)} failed: {why}")
        if self.planner is not None:
            try:
                self.planner.failed(action, why)
            except (Exception, SystemExit) as error:
                self._refuse(one_line(error))

    def _refuse(self, why: str) -> None:
        self._refused = True
        if not self._noted:
            self._noted = True
            name = type(self.planner).__name__
            self.note(f"planner {name}: {why}; the rollout goes on without it")


def _words(action: Action) -> str:
    match action:
        case Gather(shape=shape, queues=queues):
            return f"gather onto {shape}" + (f": {queues}" if queues else "")
        case Move(key=key, worker=worker):
            return f"move of {key} to worker {worker}"
        case _:
            return f"hold of {action.key}"


def plan_row(state: RolloutState, actions: Sequence[Action]) -> Row:
    """Return the row of the trace's `plans`, without its number, of what was returned in a state."""
    return columns(
        "plans",
        rl_step=state.rl_step,
        t_start=state.now_s,
        shape=str(state.active),
        prompts=[key[1] for key in state.keys],
        samples=[key[2] for key in state.keys],
        workers=np.maximum(state.worker, 0).tolist(),
        held=np.flatnonzero(state.worker == HELD).tolist(),
        generated_tokens=state.generated_tokens.tolist(),
        switch_s=[engines.switch_s for engines in state.engines.values()],
        actions=[_words(action) for action in actions],
    )


def check_actions(actions: Sequence[Action], state: RolloutState) -> None:
    """ConfigError for the first action that names what is not there."""
    at = {key: i for i, key in enumerate(state.keys)}
    named: Sequence[Key]
    for action in actions:
        match action:
            case Gather(shape=shape, queues=queues):
                if shape not in state.engines or shape == state.active:
                    raise ConfigError(f"{shape} is not a shape to gather onto; there are {_shapes(state)}")
                if queues and len(queues) != shape.engines:
                    raise ConfigError(f"a gather onto {shape} has {len(queues)} queues, one for each engine is needed")
                named = [key for queue in queues for key in queue]
                if len(set(named)) < len(named):
                    raise ConfigError("a gather has a request in two places")
            case Move(key=key, worker=worker):
                if not isinstance(worker, int) or not 0 <= worker < state.active.engines:
                    raise ConfigError(f"there is no worker {worker!r} of {state.active.engines} to move a request to")
                named = [key]
            case Hold(key=key):
                named = [key]
                if key in at and state.generated_tokens[at[key]] > 0:
                    raise ConfigError(f"request {key} has begun and cannot be held")
            case _:
                raise ConfigError(f"{shown(action)} is no action: return Move, Gather or Hold")
        for key in named:
            if key not in at:
                raise ConfigError(f"request {key} {'has ended' if key in state.ended else 'is not known'}")


def _shapes(state: RolloutState) -> str:
    return ", ".join(str(shape) for shape in state.engines if shape != state.active) or "none"


def shared_out(shape: Shape, action: Gather, keys: Sequence[Key]) -> list[list[Key]]:
    """The requests of each engine of a gather: its queues without what has ended, the rest where the fewest are."""
    left = dict.fromkeys(keys)
    queues = [[key for key in queue if key in left] for queue in action.queues] or [[] for _ in range(shape.engines)]
    placed = {key for queue in queues for key in queue}
    for key in left:
        if key not in placed:
            min(queues, key=len).append(key)
    return queues
