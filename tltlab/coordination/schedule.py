"""When idle workers train the drafter: always, now and then, once acceptance drops, while it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from tltlab.arrays import Floats
from tltlab.config import FrozenModel
from tltlab.state import DrafterState

from .gate import Attempt, RolloutDrift, worth_training

_ENOUGH_PAIRS = 4
"""Fewest pairs of successive rollouts from which their noise is estimated."""

_NEWEST = 40
"""Rollouts that the gated schedule looks back on; it does so before each."""

_SURE = 1.5
"""Standard errors by which either of two means is given the benefit of the doubt before they count as different."""


class ScheduleConfig(FrozenModel):
    """Schedule of drafter training on idle workers.

    `kind`: never, always, in every `every`-th RL step, when acceptance has dropped, or gated.

    Gated, a drafter goes into service only if it is better than the one there on responses of the newest policy that
    neither was trained on, and training pauses while it brings less than it takes (`gate.worth_training`).

    Acceptance has dropped when the mean accepted length of the latest rollouts, weighted by drafts, is below 1 - `drop`
    times the best since the last training, by more than their noise. With 3,000 drafts a rollout and 4 % variation
    between rollouts, a drafter that does not age is trained some 3 times in 100 RL steps; one that loses 0.5 % a step,
    8 times. Training also continues while the last one that can be judged raised it by more than `drop`.
    Whatever the kind, except `never`, a drafter that was never trained or that its canary distrusts is trained.
    """

    kind: Literal["never", "always", "every", "acceptance-drops", "gated"] = "gated"
    every: Annotated[int, Field(ge=1)] = 10
    drop: Annotated[float, Field(ge=0, le=1)] = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision whether idle workers train in a rollout, with the reason."""

    train: bool
    reason: str


class TrainingSchedule:
    """Decides before each rollout whether idle workers train the drafter, and keeps a record of its acceptance.

    Call `rollout_done` and, where updates were made, `attempted` and, if they went into service, `trained`, in any
    order; only the gated kind uses `attempted`. A drafter trained in RL step r serves from r + 1 on, so rollout r still
    measures the drafter before. With `pretrained` the drafter that the run begins with has been trained elsewhere.

    >>> schedule = TrainingSchedule(ScheduleConfig(kind="every", every=2))
    >>> schedule.decide(0, DrafterState()).reason
    'the drafter was never trained'
    >>> schedule.trained(0, updates=100)
    >>> [schedule.decide(step, DrafterState(updates=1)).train for step in (1, 2)]
    [False, True]
    """

    def __init__(self, config: ScheduleConfig, *, pretrained: bool = False) -> None:
        self.config = config
        self.pretrained = pretrained
        self.record: list[RolloutDrift] = []
        self.trainings: list[int] = []
        self.attempts: list[Attempt] = []
        self._first: int | None = None

    def decide(self, rl_step: int, drafter: DrafterState, *, trusted: bool = True) -> Decision:
        """Decide whether to train in the rollout of `rl_step`; `trusted` is the verdict of the canary."""
        first = self._first_step(rl_step)
        if self.config.kind == "never":
            return Decision(train=False, reason="the schedule is never")
        if not (self.trainings or self.pretrained or drafter.updates):
            return Decision(train=True, reason="the drafter was never trained")
        if not trusted:
            return Decision(train=True, reason="the canary does not trust the drafter in service")
        if self.config.kind == "always":
            return Decision(train=True, reason="the schedule is always")
        if self.config.kind == "every":
            since = rl_step - (self.trainings[-1] if self.trainings else first)
            last = "the last training" if self.trainings else "the start"
            return Decision(
                train=since >= self.config.every, reason=f"{since} of {self.config.every} RL steps since {last}"
            )
        return self._gated(rl_step) if self.config.kind == "gated" else self._dropped(rl_step)

    def serves(self, attempt: Attempt) -> bool:
        """True if the drafter of a training goes into service: always, except that the gated kind judges it.

        A drafter that was never trained is always replaced.
        """
        return self.config.kind != "gated" or attempt.better or not (self.trainings or self.pretrained)

    def rollout_done(
        self, rl_step: int, accept_length: float | None, *, drafts: int, rollout_s: float = 0.0, tokens: int = 0
    ) -> None:
        """Record a rollout, in place of an earlier record of its RL step; `RolloutDrift` explains the arguments."""
        self._first_step(rl_step)
        drafted = accept_length is not None and drafts > 0
        self.record = [row for row in self.record if row.rl_step != rl_step]
        self.record.append(
            RolloutDrift(
                rl_step=rl_step,
                accept_length=accept_length if drafted else None,
                drafts=drafts if drafted else 0,
                training=sum(step < rl_step for step in self.trainings),
                rollout_s=rollout_s,
                tokens=tokens,
            )
        )
        self.record.sort(key=lambda row: row.rl_step)

    def trained(self, rl_step: int, updates: int) -> None:
        """The rollout of `rl_step` ended with `updates` more updates; none is no training."""
        if updates > 0 and rl_step not in self.trainings:
            self.trainings = sorted([*self.trainings, rl_step])

    def attempted(self, attempt: Attempt) -> None:
        """Workers trained in a rollout, whatever became of it; in place of an earlier attempt in that RL step."""
        earlier = [past for past in self.attempts if past.rl_step != attempt.rl_step]
        self.attempts = sorted([*earlier, attempt], key=lambda past: past.rl_step)

    def state_dict(self) -> dict[str, Any]:
        """The record, as JSON."""
        return {
            "record": [asdict(row) for row in self.record],
            "trainings": list(self.trainings),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "first": self._first,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave."""
        self.record = [RolloutDrift(**row) for row in state["record"]]
        self.trainings = list(state["trainings"])
        self.attempts = [Attempt(**attempt) for attempt in state["attempts"]]
        self._first = state["first"]

    def _first_step(self, rl_step: int) -> int:
        """Return the first RL step of the schedule, `rl_step` if there is none yet."""
        if self._first is None:
            self._first = rl_step
        return self._first

    def _dropped(self, rl_step: int) -> Decision:
        rows = [row for row in self.record if row.accept_length is not None and row.rl_step < rl_step]
        noise = self._noise()
        now = [row for row in rows if row.training == len(self.trainings)]
        if not now:
            if len(self.trainings) == 1 and not self.pretrained:
                return Decision(train=True, reason="the drafter was trained once and what that brought is not known")
            gain = self._gain(rows, len(self.trainings) - 1, noise)
            return Decision(train=bool(gain), reason=gain or "nothing was drafted since the last training")
        if gain := self._gain(rows, len(self.trainings), noise):
            return Decision(train=True, reason=gain)
        best, mean, first = self._fallen(now, noise)
        if first is not None:
            steps = f"RL step {first.rl_step}" + ("" if first is now[-1] else f" to {now[-1].rl_step}")
            return Decision(train=True, reason=f"the accepted length fell from {best:.2f} to {mean:.2f} ({steps})")
        return Decision(train=False, reason=f"the accepted length is {now[-1].accept_length:.2f}, at best {best:.2f}")

    def _gated(self, rl_step: int) -> Decision:
        rows = [row for row in self.record if row.rl_step < rl_step]
        attempts = [attempt for attempt in self.attempts if attempt.rl_step < rl_step]
        last = attempts[-1] if attempts else Attempt(rl_step=-1)
        since = [row for row in rows if row.accept_length is not None and row.rl_step >= last.rl_step]
        if since and since[0].rl_step == last.rl_step and last.better:
            # This rollout ran with the drafter before the training: scale it by the expected gain.
            since[0] = replace(since[0], accept_length=(since[0].accept_length or 1.0) * math.exp(last.gain))
        best, mean, fell = self._fallen(since[-_NEWEST:], self._noise())
        train, reason = worth_training(rl_step, rows, attempts, 1.0 - mean / best if fell else 0.0)
        return Decision(train=train, reason=reason)

    def _fallen(self, now: Sequence[RolloutDrift], noise: float) -> tuple[float, float, RolloutDrift | None]:
        """The best accepted length, the latest, and the first rollout of the latter if it is surely lower by `drop`.

        Where it is not the latter is the mean of all; nan where there are no rollouts.
        """
        if not now:
            return math.nan, math.nan, None
        lengths, drafts = _columns(now)
        mean = level = _pooled(lengths, drafts, noise)[0]
        best, low = _best(lengths, drafts, noise, level)
        for first in reversed(range(len(now))):
            mean, error = _pooled(lengths[first:], drafts[first:], noise, level)
            if mean + error < (1 - self.config.drop) * low:
                return best, mean, now[first]
        return best, mean, None

    def _gain(self, rows: Sequence[RolloutDrift], training: int, noise: float) -> str:
        """Sentence on a training that raised the accepted length by more than `drop`; "" if it did not."""
        before = [row for row in rows if row.training < training][-1:]
        after = [row for row in rows if row.training == training][:1]
        if not before or not after or training == 0:
            return ""
        (old, old_error), (new, new_error) = (_pooled(*_columns(rows), noise) for rows in (before, after))
        if new - new_error <= (1 + self.config.drop) * (old + old_error):
            return ""
        return f"the last training that can be judged raised the accepted length from {old:.2f} to {new:.2f}"

    def _noise(self) -> float:
        """Relative spread of a rollout's mean about the trend, prompts included; 0 for too few rollouts."""
        rows = [row for row in self.record if row.accept_length is not None]
        steps = [
            abs(math.log(b.accept_length / a.accept_length))
            for a, b in pairwise(rows)
            if a.training == b.training and a.accept_length and b.accept_length
        ]
        if len(steps) < _ENOUGH_PAIRS:
            return 0.0
        # The median of |x - y| is 0.6745 * sqrt(2) standard deviations; a true drop among the pairs hardly moves it.
        return float(np.median(steps)) / (0.6745 * math.sqrt(2))


def _columns(rows: Sequence[RolloutDrift]) -> tuple[Floats, Floats]:
    return np.array([row.accept_length for row in rows], np.float64), np.array([row.drafts for row in rows], np.float64)


def _pooled(lengths: Floats, drafts: Floats, noise: float, level: float | None = None) -> tuple[float, float]:
    """The mean accepted length of rollouts, weighted by drafts, and `_SURE` standard errors of it.

    The larger of two: what geometrically distributed lengths have, whose variance is m (m - 1) where `level`, or their
    own mean, is m; and what rollouts differ by anyway.
    """
    total = float(drafts.sum())
    mean = float(lengths @ drafts / total)
    m = mean if level is None else level
    sampling = max(m * (m - 1.0), 0.0) / total
    between = (noise * mean) ** 2 * float((drafts**2).sum() / total**2)
    return mean, _SURE * math.sqrt(max(sampling, between))


def _best(lengths: Floats, drafts: Floats, noise: float, level: float) -> tuple[float, float]:
    """The best accepted length among rollouts, and what it surely was."""
    # The maximum over many rollouts picks up noise: rollouts of few drafts are left out.
    enough = np.flatnonzero(drafts >= float(np.median(drafts)) / 2)
    # A drafter is at its best right after training: so the first rollouts together count as one too.
    runs = [slice(i, i + 1) for i in enough] + [slice(i) for i in range(2, len(drafts))]
    pooled = (_pooled(lengths[run], drafts[run], noise, level) for run in runs)
    best, error = max(pooled, key=lambda mean_and_error: mean_and_error[0] - mean_and_error[1])
    return best, best - error
