"""Schedules of drafter training on idle workers: always, at intervals, while it pays.

Repeated training at a fixed price against a growing loss is the economic lot size problem (Harris 1913): under a steady
drift, the total time is least if training starts once the loss since the last one equals its price.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from tltlab.arrays import Floats
from tltlab.config import Count, FrozenModel, Share
from tltlab.records import Json, frozen
from tltlab.state import DrafterState

PROBE_SHARE = 0.003
"""Share of the rollouts' time that trainings may take whose worth is not known, or which brought too little."""

CONTROL_EVERY = 20
"""After so many trained rollouts in a row one goes without, to see what training takes."""

LASTS = 10, 50
"""RL steps that a lasting gain counts for, at least and at most: in between, as many as there were already."""

_WINDOW = 40
_ATTEMPTS = 12
_FORGET = 0.7
_TO_JUDGE = 4
_PERIODS = 2
_PAIR_NOISE, _TEXT_NOISE = 0.005, 0.04
_SLOWDOWN_SD = 0.15
_ELASTICITY, _ELASTICITY_SD = 0.7, 0.2
_NOISE, _NOISE_ROLLOUTS = 0.04, 4.0
_ENOUGH_PAIRS = 4
"""Fewest pairs of successive rollouts from which their noise is estimated."""

_NEWEST = 40
"""Rollouts that the gated schedule looks back on; it does so before each."""

_SURE = 1.5
"""Standard errors by which either of two means is given the benefit of the doubt before they count as different."""


def tokens_per_draft(chances: Sequence[float]) -> float:
    """Expected tokens of a draft with its bonus token, from each token's chance given that those before were kept.

    >>> tokens_per_draft([0.5, 0.5])
    1.75
    """
    return 1.0 + float(np.cumprod(np.asarray(chances, np.float64)).sum())


@frozen
class Attempt:
    """A training: it held the rollout of `rl_step` up by `delay_s`.

    `candidate` and `served` are the tokens per draft of what came of it and of what was in service, on the same
    responses of the newest policy to held-out prompts; None while there were none.
    """

    rl_step: int
    delay_s: float = 0.0
    candidate: float | None = None
    served: float | None = None

    @property
    def better(self) -> bool:
        """True if the candidate beats the drafter in service on the same responses, and may replace that drafter."""
        return self.candidate is not None and self.served is not None and self.candidate > self.served

    @property
    def gain(self) -> float:
        """Logarithm of the ratio of tokens per draft; 0 where it is not known."""
        return math.log(self.candidate / self.served) if self.candidate and self.served else 0.0


@frozen
class RolloutDrift:
    """One rollout of the record.

    `accept_length` is the mean number of tokens per verified draft of the learned drafter, bonus included, over
    `drafts` of them; None where it drafted nothing. `training` numbers the last training before it, 0 where there was
    none. The rollout took `rollout_s` seconds for `tokens` tokens, any delay by a training included; 0 where unknown.
    """

    rl_step: int
    accept_length: float | None
    drafts: int = 0
    training: int = 0
    rollout_s: float = 0.0
    tokens: int = 0


@frozen
class TrainingCost:
    """Cost of training in a rollout of `rollout_s` seconds.

    Training stretches the rollout by the share `slowdown`, known to a standard error of `slowdown_error`, and delays
    the rollout by `delay_s`; `elasticity` is the share by which a rollout is shorter per share that accepted lengths
    are longer.
    """

    rollout_s: float
    slowdown: float
    slowdown_error: float
    delay_s: float
    elasticity: float

    @property
    def seconds(self) -> float:
        return self.seconds_at(0.0)

    def seconds_at(self, errors: float) -> float:
        """Seconds that training costs with `slowdown` raised by `errors` standard errors."""
        return self.delay_s + max(self.slowdown + errors * self.slowdown_error, 0.0) * self.rollout_s


def training_cost(rollouts: Sequence[RolloutDrift], attempts: Sequence[Attempt]) -> TrainingCost:
    """Fit to the newest rollouts, with and without training; with none the prior.

    Log seconds per token = a + slowdown * trained - elasticity * log(accepted length), by ridge regression towards no
    slowdown and an elasticity of 0.7 +- 0.2, as if from four rollouts that scatter by 4 %.
    """
    delays = {attempt.rl_step: attempt.delay_s for attempt in attempts}
    rows = [row for row in rollouts if row.accept_length and row.rollout_s > 0 and row.tokens > 0][-_WINDOW:]
    lasting = [row.rollout_s - delays.get(row.rl_step, 0.0) for row in rollouts[-LASTS[0] :]]
    typical_s = float(np.mean(lasting)) if lasting else 0.0
    delay_s = float(np.mean([attempt.delay_s for attempt in attempts[-_ATTEMPTS:]])) if attempts else 0.0
    slowdown, error, elasticity = 0.0, _SLOWDOWN_SD, _ELASTICITY
    if rows:
        seconds = [max(row.rollout_s - delays.get(row.rl_step, 0.0), 1e-9) / row.tokens for row in rows]
        y = np.log(seconds)
        x = np.array([[1.0, row.rl_step in delays, -math.log(row.accept_length or 1.0)] for row in rows])
        prior = np.array([float(y.mean()), 0.0, _ELASTICITY])
        spread = np.array([1e3, _SLOWDOWN_SD, _ELASTICITY_SD])
        noise = _NOISE
        for _ in range(3):
            precision = x.T @ x / noise**2 + np.diag(spread**-2.0)
            coefficients = np.linalg.solve(precision, x.T @ y / noise**2 + prior / spread**2)
            scatter = y - x @ coefficients
            noise = math.sqrt((_NOISE_ROLLOUTS * _NOISE**2 + float(scatter @ scatter)) / (_NOISE_ROLLOUTS + len(rows)))
        slowdown, elasticity = math.expm1(float(coefficients[1])), float(np.clip(coefficients[2], 0.05, 1.0))
        error = math.sqrt(float(np.linalg.inv(precision)[1, 1]))
    return TrainingCost(
        rollout_s=typical_s, slowdown=slowdown, slowdown_error=error, delay_s=delay_s, elasticity=elasticity
    )


def loss_and_gain(attempts: Sequence[Attempt], first: int) -> tuple[float, float]:
    """Loss of drafters per RL step as the target moves, and lasting gain of a training: shares of accepted length.

    Over successive attempts, the gains on the same responses sum to the net growth of the serving drafter plus its
    losses in between. The loss is therefore the drop of accepted length from a training to the next judgement.
    Loss and gain are at their lower ends, a standard error down, so that noise adds next to nothing. `first` is the RL
    step that the record begins at.
    """
    judged = [attempt for attempt in attempts if attempt.candidate and attempt.served][-_ATTEMPTS:]
    if not judged:
        return 0.0, 0.0
    before = [attempt for attempt in attempts if attempt.rl_step < judged[0].rl_step]
    start = before[-1].rl_step if before else first - 1
    steps = np.diff([start, *(attempt.rl_step for attempt in judged)]).astype(np.float64)
    gains = np.array([attempt.gain for attempt in judged])
    loss = 0.0
    if len(judged) > 1:
        served = np.log([max(a.candidate or 1.0, a.served or 1.0) for a in judged[:-1]])
        later = np.log([a.served or 1.0 for a in judged[1:]])
        lost = served - later
        # Texts differ, and each one but the first and the last counts once up and once down.
        texts = math.sqrt((_TEXT_NOISE**2 + float(((lost - lost.mean()) ** 2).sum())) / len(lost))
        loss = max(0.0, (float(lost.sum()) - texts) / float(steps[1:].sum()))
    weight = _FORGET ** np.arange(len(judged))[::-1]
    weight /= weight.sum()
    lasting = gains - loss * steps
    mean = float(weight @ lasting)
    spread = max(float(weight @ (lasting - mean) ** 2), _PAIR_NOISE**2)
    sure = mean - math.sqrt(spread * float(weight @ weight))
    if len(judged) > 1:
        # A drafter that improves gains less and less: that scatters, and still the latest two are worth as much.
        sure = max(sure, float(lasting[-2:].min()) - 2.0 * _PAIR_NOISE)
    return loss, max(0.0, sure)


def above_end(rollouts: Sequence[RolloutDrift], attempts: Sequence[Attempt]) -> float:
    """Shares of accepted length by which rollouts were above the end of their period, summed: the mean of the latest.

    A period goes from one attempt to the next, the last one until now. A drafter that has aged for long has reached its
    full loss, and training recovers it only for a while. The next period is worth at most what earlier periods were
    above their ends: the marginal value of renewal, which equals the loss so far under a steady loss.
    Infinite where no period has enough rollouts.
    """
    logs = {row.rl_step: math.log(row.accept_length) for row in rollouts if row.accept_length}
    starts = [attempt.rl_step for attempt in attempts[-_PERIODS:]]
    excesses = []
    for first, end in zip(starts, [*starts[1:], math.inf], strict=True):
        period = np.array([log for step, log in logs.items() if first < step <= end])
        if len(period) >= _TO_JUDGE:
            excesses.append(float(period.sum() - len(period) * period[-(len(period) // _TO_JUDGE) :].mean()))
    return float(np.mean(excesses)) if excesses else math.inf


def paid(rollouts: Sequence[RolloutDrift], attempts: Sequence[Attempt], cost: TrainingCost) -> bool:
    """True if the latest trainings saved at least half of their cost, or if the record is too short to decide.

    Between two trainings the accepted length is on average above its value just before the second one. With a steady
    loss this excess is half of all that was saved, so half of the cost is required. Trainings within four RL steps of
    one another leave too few rollouts in between to decide.
    """
    latest = attempts[-_ATTEMPTS:]
    steps = latest[-1].rl_step - latest[0].rl_step
    if len(latest) < _TO_JUDGE or steps < _TO_JUDGE * (len(latest) - 1):
        return True
    lengths = {row.rl_step: math.log(row.accept_length) for row in rollouts if row.accept_length}
    between = [log for step, log in lengths.items() if latest[0].rl_step < step <= latest[-1].rl_step]
    before = [lengths[attempt.rl_step] for attempt in latest[1:] if attempt.rl_step in lengths]
    if not before:
        return True
    doubt = _TEXT_NOISE / math.sqrt(len(before))
    longer = float(np.mean(between)) - float(np.mean(before)) + doubt
    return cost.elasticity * cost.rollout_s * longer * steps >= 0.5 * cost.seconds * (len(latest) - 1)


class Decision(NamedTuple):
    """Decision whether idle workers train in a rollout, with the reason."""

    train: bool
    reason: str


def worth_training(
    rl_step: int, rollouts: Sequence[RolloutDrift], attempts: Sequence[Attempt], fallen: float
) -> Decision:
    """Decide whether to train in the rollout of `rl_step`, with the reason.

    `rollouts` and `attempts` hold earlier RL steps only, in order.
    `fallen` is the share by which accepted lengths have surely dropped since the last attempt.
    """
    if not any(row.accept_length for row in rollouts) or not attempts:
        return Decision(True, "what training takes and brings is not known yet")
    trained = {attempt.rl_step for attempt in attempts}
    with_training = [row.rl_step in trained for row in rollouts if row.accept_length]
    if all(with_training[-CONTROL_EVERY:]):
        return Decision(False, "a rollout without training, to see what training takes")
    cost = training_cost(rollouts, attempts)
    first = rollouts[0].rl_step
    age = rl_step - attempts[-1].rl_step
    loss, gain = loss_and_gain(attempts, first)
    second_s = cost.elasticity * cost.rollout_s
    lost = max(loss, fallen / age) * age * (age + 1) / 2
    lost_s = second_s * max(0.0, min(lost, above_end(rollouts, attempts)))
    lasts = min(max(rl_step - first, LASTS[0]), LASTS[1])
    worth_s = lost_s + second_s * gain * lasts
    price = f"a training takes {cost.seconds:.3g} s"
    pays = paid(rollouts, attempts, cost) or fallen > 1.5 * max(attempt.gain for attempt in attempts[-_ATTEMPTS:])
    # Each training also narrows its cost estimate, so the lower end of the estimate is used here.
    if pays and worth_s >= cost.seconds_at(-1.0):
        return Decision(True, f"{price}, and not training would have cost {worth_s:.3g} s")
    wasted_s, most_s = 0.0, cost.seconds_at(1.0)
    for before, attempt in zip([first - 1, *(a.rl_step for a in attempts)], attempts, strict=False):
        brought_s = second_s * max(attempt.gain, 0.0) * (attempt.rl_step - before)
        wasted_s += max(0.0, most_s - brought_s)
    if wasted_s + most_s <= PROBE_SHARE * sum(row.rollout_s for row in rollouts):
        return Decision(True, f"{price}, a look at what it would bring now")
    if not pays:
        return Decision(False, f"{price}, and what the last ones brought was lost again too soon")
    return Decision(False, f"{price} and would have brought {worth_s:.3g} s")


Kind = Literal["never", "always", "every", "gated"]


class ScheduleConfig(FrozenModel):
    """Schedule of drafter training on idle workers.

    `kind`: never, always, in every `every`-th RL step, or gated.

    Gated, a drafter goes into service only if it is better than the one there on responses of the newest policy to
    held-out prompts, an eighth of all, from which no trainer of the run learns. Training pauses while it brings less
    than it takes (`worth_training`).

    A drop of more than `drop` counts at once: that is where the mean accepted length of the latest rollouts, weighted
    by drafts, is below 1 - `drop` times the best since the last training, by more than their noise.
    Whatever the kind, except `never`, a drafter that was never trained or that its canary distrusts is trained.
    """

    kind: Kind = "gated"
    every: Count = 10
    drop: Share = 0.03


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

    def __init__(self, config: ScheduleConfig, *, pretrained: bool = False):
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
            return Decision(False, "the schedule is never")
        if not (self.trainings or self.pretrained or drafter.updates):
            return Decision(True, "the drafter was never trained")
        if not trusted:
            return Decision(True, "the canary does not trust the drafter in service")
        if self.config.kind == "always":
            return Decision(True, "the schedule is always")
        if self.config.kind == "every":
            since = rl_step - (self.trainings[-1] if self.trainings else first)
            last = "the last training" if self.trainings else "the start"
            return Decision(since >= self.config.every, f"{since} of {self.config.every} RL steps since {last}")
        return self._gated(rl_step)

    def serves(self, attempt: Attempt) -> bool:
        """True if the drafter of a training goes into service: always, except that the gated kind judges it.

        It waits while nothing measures it. A drafter that was never trained is replaced by any that was measured.
        """
        untrained = not (self.trainings or self.pretrained)
        return self.config.kind != "gated" or attempt.better or (untrained and attempt.candidate is not None)

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

    def state_dict(self) -> Json:
        """The record, as JSON."""
        return {
            "record": [asdict(row) for row in self.record],
            "trainings": list(self.trainings),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "first": self._first,
        }

    def load_state_dict(self, state: Json) -> None:
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

    def _gated(self, rl_step: int) -> Decision:
        rows = [row for row in self.record if row.rl_step < rl_step]
        attempts = [attempt for attempt in self.attempts if attempt.rl_step < rl_step]
        last = attempts[-1] if attempts else Attempt(rl_step=-1)
        since = [row for row in rows if row.accept_length is not None and row.rl_step >= last.rl_step]
        if since and since[0].rl_step == last.rl_step and last.better:
            # This rollout ran with the drafter before the training: scale it by the expected gain.
            since[0] = replace(since[0], accept_length=(since[0].accept_length or 1.0) * math.exp(last.gain))
        return worth_training(rl_step, rows, attempts, self._fallen(since[-_NEWEST:]))

    def _fallen(self, now: Sequence[RolloutDrift]) -> float:
        """The share by which accepted lengths are below their best, where that is surely more than `drop`; else 0."""
        if not now:
            return 0.0
        noise = self._noise()
        lengths, drafts = _columns(now)
        level = _pooled(lengths, drafts, noise)[0]
        best, low = _best(lengths, drafts, noise, level)
        for first in reversed(range(len(now))):
            mean, error = _pooled(lengths[first:], drafts[first:], noise, level)
            if mean + error < (1 - self.config.drop) * low:
                return 1.0 - mean / best
        return 0.0

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
