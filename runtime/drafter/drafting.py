"""What a training run asks of its drafter: `Drafting`, and `NullDrafting` for a run that trains none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tltlab.drafters.specs import DrafterSpec
from tltlab.errors import ConfigError
from tltlab.runtime.run.memory import ProcessMemory

Rows = dict[str, list[dict[str, Any]]]


class Drafting:
    """The drafter of a run, asked from one thread in the order of an RL step, `start` to `close`; here none."""

    @property
    def specs(self) -> dict[str, DrafterSpec]:
        """The drafters that engines need for it, by name."""
        return {}

    def prepare(self) -> None:
        """Make what engines find when they start."""

    def feed(self, worker: int) -> str | None:
        """Where worker `worker`'s engine hands over what its responses can teach; None for nowhere."""
        return None

    def start(self, workers: Sequence[Any], frozen: Callable[[], Any], ask: Callable[..., list[Any]]) -> None:
        """Start what trains it, once engines and the policy's trainer run; they get the drafter in service, if any.

        An item of `workers` is replaced when its worker has to be started again; `rejoin` follows. `frozen()` is a
        reference to a `FrozenTarget`. `ask(method, ...)` calls every worker, and one that dies in it once more.
        """

    def rejoin(self, worker: int) -> None:
        """Worker `worker` was started again: its engine gets the drafter in service."""

    def rollout_starts(self, rl_step: int) -> None:
        """The rollout of `rl_step` begins: idle workers may train from now on, if it is time to."""

    def rollout_ends(self, rl_step: int) -> None:
        """It is over: on return no trainer trains on a worker's device."""

    def annotate(self) -> None:
        """Begin to work out how drafters of several ages do on the rollout that has ended."""

    def publish(self, rl_step: int) -> None:
        """The policy has moved, and `rl_step` comes next: from then on engines draft with the newest good weights.

        Engines are awake, and have the policy's weights of before.
        """

    def target_moved(self) -> None:
        """The engines have the policy's new weights."""

    def went_back(self, rl_step: int, state: Mapping[str, Any], folder: Path | None) -> None:
        """The run does `rl_step` and what came after it again, with the drafter that it had then.

        `state` is what `state_dict` gave then, and `folder` where it put tensors. A run that is back at its start has
        no folder, and `state` is what it gave before `start`. Engines have taken back what they had learned before.
        """

    def rows(self, rl_step: int, drift_kl: float | None, *, rollout_s: float = 0.0, tokens: int = 0) -> Rows:
        """Rows for the trace's tables of the RL step that has just ended; of `steps` only some columns.

        Its rollout took `rollout_s` seconds, what it waited for trainers included, for `tokens` tokens.
        """
        return {}

    def memory(self) -> list[ProcessMemory]:
        """What the processes that train it hold."""
        return []

    def summary(self) -> dict[str, Any] | None:
        """What became of it, for the run's summary."""
        return None

    def save(self) -> None:
        """Write the newest good drafter beside the run's checkpoints."""

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Between two RL steps, all that a later run needs to go on, as JSON types; tensors go into `folder`.

        Before `start` there are none.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go on from what `state_dict` gave, before `start`. ConfigError where it is of a run of another kind."""

    def close(self) -> None:
        """End the trainers; safe to call at any time."""


class NullDrafting(Drafting):
    """A run without a drafter of its own to train."""

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        if state:
            raise ConfigError(f"{folder} is of a run that trains a drafter, and this recipe has no [drafter]")
