"""Interface between a training run and its drafter: `Drafting`, and `NullDrafting` for a run that trains none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tltlab.drafters.specs import DrafterSpec
from tltlab.errors import ConfigError
from tltlab.runtime.run.memory import ProcessMemory

Rows = dict[str, list[dict[str, Any]]]


class Drafting:
    """The drafter of a run, called from one thread in the order of an RL step, `start` to `close`; here none."""

    @property
    def specs(self) -> dict[str, DrafterSpec]:
        """The drafters that engines need for it, by name."""
        return {}

    def prepare(self) -> None:
        """Create the files that engines read when they start."""

    def feed(self, worker: int) -> str | None:
        """Return the address to which worker `worker`'s engine sends its responses; None for none."""
        return None

    def start(self, workers: Sequence[Any], frozen: Callable[[], Any], ask: Callable[..., list[Any]]) -> None:
        """Start the trainers, once engines and the policy's trainer run; engines get the drafter in service, if any.

        An item of `workers` is replaced when its worker is restarted; `rejoin` follows. `frozen()` is a reference to a
        `FrozenTarget`. `ask(method, ...)` calls every worker, and repeats the call on one that fails in it.
        """

    def rejoin(self, worker: int) -> None:
        """Give the engine of the restarted worker `worker` the drafter in service."""

    def rollout_starts(self, rl_step: int) -> None:
        """Begin the rollout of `rl_step`: idle workers may train from now on, if the schedule permits it."""

    def rollout_ends(self, rl_step: int) -> None:
        """End the rollout: on return no trainer trains on a worker's device."""

    def annotate(self) -> None:
        """Begin to compute the acceptance of drafters of several ages on the rollout that has ended."""

    def publish(self, rl_step: int) -> None:
        """Make engines draft with the newest good weights from now on: the policy has changed; `rl_step` is next.

        Engines are awake, and still have the policy's previous weights.
        """

    def target_moved(self) -> None:
        """Note that the engines have the policy's new weights."""

    def rewind(self, rl_step: int, state: Mapping[str, Any], folder: Path | None) -> None:
        """Restore the drafter of `rl_step`: the run repeats it and later RL steps.

        `state` is the result of `state_dict` at that time, and `folder` the folder of its tensors. A run that is back
        at its start has no folder, and `state` is from before `start`. Engines have restored their learned state
        already.
        """

    def rows(self, rl_step: int, *, rollout_s: float = 0.0, tokens: int = 0) -> Rows:
        """Return rows for the trace's tables of the RL step that has just ended; of `steps` only some columns.

        Its rollout took `rollout_s` seconds, its wait for trainers included, for `tokens` tokens.
        """
        return {}

    def memory(self) -> list[ProcessMemory]:
        """Return the memory of the processes that train the drafter."""
        return []

    def summary(self) -> dict[str, Any] | None:
        """Return the drafter's part of the run's summary."""
        return None

    def save(self) -> None:
        """Write the newest good drafter next to the run's checkpoints."""

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Return the state to continue from, between two RL steps, as JSON types; tensors go into `folder`.

        Before `start` there are no tensors.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Continue from the result of `state_dict`, before `start`. ConfigError where it is of another kind of run."""

    def close(self) -> None:
        """End the trainers; safe to call at any time."""


class NullDrafting(Drafting):
    """A run that trains no drafter."""

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        if state:
            raise ConfigError(f"{folder} is of a run that trains a drafter, and this recipe has no [drafter]")
