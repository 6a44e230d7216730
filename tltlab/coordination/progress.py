"""Progress of drafter training on idle workers: optimizer updates, checkpoints, and updates lost to interruptions.

Progress is integrated in closed form: between two changes of the group or of the data, `advance` jumps over any
number of updates at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from tltlab.config import FiniteModel, Share
from tltlab.records import frozen

PACKED_SAMPLES_PER_S = 29.6
"""TLT Fig 17: drafter training with packed sequences; 2.2 times what it is with padded ones."""

CHECKPOINT_S = {"sync": 0.893, "async": 0.280, "selective": 0.097}
"""TLT Fig 17: seconds for which a checkpoint blocks training; selective: in the background, trainable weights only."""

_ROUNDING = 1e-9


class SpotTraining(FiniteModel):
    """Rates and costs of one training group; the defaults are TLT's where it gives them, else stated assumptions.

    An update trains `samples_per_update` samples of `sample_tokens` tokens in
    samples_per_update / (samples_per_s * speedup(members)) seconds, with speedup(m) = 1 + (m - 1) *
    `scaling_efficiency`.

    `start_s` sets up a group, `join_s` is the whole group's pause when its membership changes. After every
    `checkpoint_every` updates (None: only when it stops) a checkpoint blocks for `checkpoint_s`, of which each of them
    bears its part. A trainer that is ordered to stop saves in the background and loses nothing; a killed one loses the
    updates since its last checkpoint, as the trained layer is sharded over the members. An order to stop drops the
    update under way, and holds the device `yield_s` longer (0: the rest of the RL step hides the save; `checkpoint_s`:
    it does not).

    Data are this rollout's finished responses and, one step off, the longest `carried_share` of the last rollout's.
    Each token may be trained any number of times, so that only an empty buffer stops the training.

    TLT states samples/s and checkpoint times without the number of devices or the sample's length: the rates are taken
    as one worker's. `samples_per_update`, `sample_tokens`, `scaling_efficiency`, `start_s`, `join_s` and
    `carried_share` are assumptions; `checkpoint_every` is that of TLT's released code.

    >>> round(SpotTraining(samples_per_update=8).update_s(members=1), 4)  # 8 / 29.6
    0.2703
    """

    kind: Literal["spot_training"] = "spot_training"
    samples_per_s: PositiveFloat = PACKED_SAMPLES_PER_S
    scaling_efficiency: Share = 0.9
    samples_per_update: PositiveInt = 8
    sample_tokens: PositiveFloat = 2048.0
    start_s: NonNegativeFloat = 5.0
    join_s: NonNegativeFloat = 1.0
    checkpoint_every: PositiveInt | None = 100
    checkpoint_s: NonNegativeFloat = CHECKPOINT_S["selective"]
    yield_s: NonNegativeFloat = 0.0
    carried_share: Share = 0.25

    @property
    def update_tokens(self) -> float:
        return self.samples_per_update * self.sample_tokens

    def update_s(self, members: int) -> float:
        """Seconds from one update to the next in a group of `members`, which must be at least 1."""
        speedup = 1.0 + (members - 1) * self.scaling_efficiency
        return self.samples_per_update / (self.samples_per_s * speedup)

    def advance(self, progress: Progress, seconds: float, members: int, *, has_data: bool = True) -> Progress:
        """Progress after `seconds` of a group of `members`; without data it waits."""
        setup_s = min(seconds, progress.setup_left_s)
        update_s = self.update_s(members)
        every_s = update_s + (self.checkpoint_s / self.checkpoint_every if self.checkpoint_every else 0.0)
        gained = (seconds - setup_s) / every_s if has_data else 0.0
        total = progress.share + gained
        done = math.floor(total + _ROUNDING)
        share = total - done
        return replace(
            progress,
            updates=progress.updates + done,
            share=share if share > _ROUNDING else 0.0,
            setup_left_s=progress.setup_left_s - setup_s,
            trained_s=progress.trained_s + gained * update_s,
        )

    def stopped(self, progress: Progress) -> Trained:
        """Result of a period that was ordered to stop: all updates are saved."""
        updates = progress.updates
        checkpoints = math.ceil(updates / (self.checkpoint_every or max(updates, 1)))
        return Trained(updates=updates, checkpoints=checkpoints, tokens=updates * self.update_tokens)

    def killed(self, progress: Progress) -> Trained:
        """Result of a killed period: the updates of its last checkpoint."""
        every = self.checkpoint_every
        checkpoints, lost = divmod(progress.updates, every) if every else (0, progress.updates)
        updates = progress.updates - lost
        return Trained(updates=updates, updates_lost=lost, checkpoints=checkpoints, tokens=updates * self.update_tokens)


@frozen
class Progress:
    """A training period under way.

    `updates` are done and a `share` of the next one; `setup_left_s` is what is left of a pause. `trained_s` was spent
    on updates.
    """

    updates: int = 0
    share: float = 0.0
    setup_left_s: float = 0.0
    trained_s: float = 0.0

    def regrouped(self, join_s: float) -> Progress:
        """Return the progress with a pause for a changed membership; one that is under way serves for both."""
        return replace(self, setup_left_s=max(self.setup_left_s, join_s))


@frozen
class Trained:
    """Result of a training period: updates in the saved drafter, updates lost, checkpoints written, tokens trained."""

    updates: int = 0
    updates_lost: int = 0
    checkpoints: int = 0
    tokens: float = 0.0
