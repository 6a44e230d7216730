"""What drafter training on idle workers achieves: optimizer updates, checkpoints, and what an interruption loses.

Progress is integrated in closed form: between two changes of the group or of the data, `advance` jumps over any
number of updates at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from tltlab.config import FrozenModel

PADDED_SAMPLES_PER_S, PACKED_SAMPLES_PER_S = 13.3, 29.6
"""TLT Fig 17: drafter training with padded and with packed sequences, 2.2x apart."""

CHECKPOINT_S = {"sync": 0.893, "async": 0.280, "selective": 0.097}
"""TLT Fig 17: seconds for which a checkpoint blocks training; selective: in the background, trainable weights only."""

_ROUNDING = 1e-9

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class SpotTraining(FrozenModel):
    """Rates and costs of one training group; the defaults are TLT's where it gives them, else stated assumptions.

    An update trains `samples_per_update` samples of `sample_tokens` tokens in
    samples_per_update / (samples_per_s * speedup(members)) + optimizer_s seconds, with speedup(m) = 1 + (m - 1) *
    `scaling_efficiency`. One worker trains `padded_samples_per_s`, times `packing_factor` where `packed`.

    `start_s` sets up a group, `join_s` is the whole group's pause when its membership changes. After every
    `checkpoint_every` updates (None: only when it stops) a checkpoint blocks for `checkpoint_s` and counts as written
    when that is over. Told to stop, a trainer saves in the background and loses nothing; killed, it loses the updates
    since its last checkpoint, as the trained layer is sharded over the members. `on_stop`: "abandon" drops the update
    under way, "finish" completes it first; either holds the device `yield_s` longer (0: the rest of the RL step hides
    the save; `checkpoint_s`: it does not).

    Data are this rollout's finished responses and, one step off, the longest `carried_share` of the last rollout's.
    Each token may be trained `max_epochs` times per rollout; None: any number of times, so that only an empty buffer
    stops the training.

    TLT states samples/s and checkpoint times without the number of devices or the sample's length: the rates are taken
    as one worker's. `samples_per_update`, `sample_tokens`, `scaling_efficiency`, `start_s`, `join_s` and
    `carried_share` are assumptions; `checkpoint_every` is that of TLT's released code.

    >>> round(SpotTraining(samples_per_update=8).update_s(members=1), 4)  # 8 / 29.6
    0.2703
    """

    kind: Literal["spot_training"] = "spot_training"
    padded_samples_per_s: _Positive = PADDED_SAMPLES_PER_S
    packing_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = PACKED_SAMPLES_PER_S / PADDED_SAMPLES_PER_S
    packed: bool = True
    scaling_efficiency: _Share = 0.9
    samples_per_update: Annotated[int, Field(gt=0)] = 8
    sample_tokens: _Positive = 2048.0
    optimizer_s: _Seconds = 0.0
    start_s: _Seconds = 5.0
    join_s: _Seconds = 1.0
    checkpoint_every: Annotated[int, Field(gt=0)] | None = 100
    checkpoint_s: _Seconds = CHECKPOINT_S["selective"]
    on_stop: Literal["abandon", "finish"] = "abandon"
    yield_s: _Seconds = 0.0
    carried_share: _Share = 0.25
    max_epochs: _Positive | None = None

    @property
    def samples_per_s(self) -> float:
        """Of one worker."""
        return self.padded_samples_per_s * (self.packing_factor if self.packed else 1.0)

    @property
    def update_tokens(self) -> float:
        return self.samples_per_update * self.sample_tokens

    def update_s(self, members: int) -> float:
        """Seconds from one update to the next in a group of `members`, which must be at least 1."""
        speedup = 1.0 + (members - 1) * self.scaling_efficiency
        return self.samples_per_update / (self.samples_per_s * speedup) + self.optimizer_s

    def max_updates(self, tokens: float) -> float:
        """Updates that `tokens` in the buffer are good for, whole or infinite."""
        if self.max_epochs is None:
            return math.inf if tokens > 0 else 0.0
        return math.floor(self.max_epochs * tokens / self.update_tokens + _ROUNDING)

    def carried_tokens(self, response_tokens: Sequence[float]) -> float:
        """Tokens that the next rollout's training finds in the buffer: those of the longest `carried_share`."""
        longest = sorted(response_tokens, reverse=True)
        return float(sum(longest[: math.ceil(self.carried_share * len(longest) - _ROUNDING)]))

    def advance(
        self, progress: Progress, seconds: float, members: int, max_updates: float = math.inf
    ) -> tuple[Progress, tuple[float, ...]]:
        """Progress after `seconds` of a group of `members`, and the offsets at which checkpoints began in them.

        An update begins only while fewer than `max_updates` are done, counted from `progress.updates` = 0.
        """
        setup_s = min(seconds, progress.setup_left_s)
        update_s, every = self.update_s(members), self.checkpoint_every or sys.maxsize
        cycle_s = every * update_s + self.checkpoint_s
        # Seconds since the last checkpoint was written, as if this group had trained all the time.
        writing = progress.checkpoint_left_s > 0
        begin_s = cycle_s - progress.checkpoint_left_s if writing else (progress.unsaved + progress.share) * update_s
        end_s = begin_s + seconds - setup_s
        if math.isfinite(max_updates):
            allowed = int(max_updates) - progress.updates + progress.unsaved
            dry_s = allowed * update_s + allowed // every * self.checkpoint_s
        else:
            dry_s = math.inf
        stop_s = max(begin_s, min(end_s, dry_s))
        cycles = math.floor(stop_s / cycle_s + _ROUNDING)
        within_s = max(0.0, stop_s - cycles * cycle_s)
        done = min(every, math.floor(within_s / update_s + _ROUNDING))
        share = 0.0 if done == every else max(0.0, within_s / update_s - done)
        share = share if share > _ROUNDING else 0.0
        gained = cycles * every + done - progress.unsaved
        after = replace(
            progress,
            updates=progress.updates + gained,
            unsaved=done,
            checkpoints=progress.checkpoints + cycles,
            share=share,
            setup_left_s=progress.setup_left_s - setup_s,
            checkpoint_left_s=max(0.0, cycle_s - within_s) if done == every else 0.0,
            trained_s=progress.trained_s + max(0.0, gained + share - progress.share) * update_s,
        )
        numbers = range(1 if writing else 0, cycles + (done == every))
        return after, tuple(setup_s + k * cycle_s + every * update_s - begin_s for k in numbers)

    def yield_delay_s(self, progress: Progress, members: int) -> float:
        """For how long a member holds its device after it was told to stop: at most one update and `yield_s`."""
        finishing = self.on_stop == "finish" and progress.share > 0
        return self.yield_s + ((1.0 - progress.share) * self.update_s(members) if finishing else 0.0)

    def stopped(self, progress: Progress) -> Trained:
        """What is left of a period that was told to stop: all of it, saved."""
        finished = self.on_stop == "finish" and progress.share > 0
        updates, unsaved = progress.updates + finished, progress.unsaved + finished
        checkpoints = progress.checkpoints + (unsaved > 0)
        return Trained(updates=updates, checkpoints=checkpoints, tokens=updates * self.update_tokens)

    def killed(self, progress: Progress) -> Trained:
        """What is left of a period that was killed: what its last checkpoint has."""
        updates = progress.updates - progress.unsaved
        return Trained(
            updates=updates,
            updates_lost=progress.unsaved,
            checkpoints=progress.checkpoints,
            tokens=updates * self.update_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A training period under way.

    `updates` are done, `unsaved` of them since the last of `checkpoints`; `share` of the next one is. `setup_left_s`
    and `checkpoint_left_s`: what is left of a pause. `trained_s` was spent on updates.
    """

    updates: int = 0
    unsaved: int = 0
    checkpoints: int = 0
    share: float = 0.0
    setup_left_s: float = 0.0
    checkpoint_left_s: float = 0.0
    trained_s: float = 0.0

    def regrouped(self, join_s: float) -> Progress:
        """With the pause for a changed membership; one that is already under way serves for both."""
        return replace(self, setup_left_s=max(self.setup_left_s, join_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training period leaves: updates in the saved drafter, those lost, checkpoints written, tokens trained."""

    updates: int = 0
    updates_lost: int = 0
    checkpoints: int = 0
    tokens: float = 0.0
