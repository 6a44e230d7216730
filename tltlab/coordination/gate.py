"""Decision whether one more training of the drafter is worth its time, from costs and gains of earlier trainings.

Repeated training at a fixed price against a growing loss is the economic lot size problem (Harris 1913): under a steady
drift, the total time is least if training starts once the loss since the last one equals its price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def tokens_per_draft(chances: Sequence[float]) -> float:
    """Expected tokens of a draft with its bonus token, from each token's chance given that those before were kept.

    >>> tokens_per_draft([0.5, 0.5])
    1.75
    """
    return 1.0 + float(np.cumprod(np.asarray(chances, np.float64)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A training: it held the rollout of `rl_step` up by `delay_s`.

    `candidate` and `served` are the tokens per draft of what came of it and of what was in service, on the same
    responses of the newest policy, which neither was trained on; None where there were none.
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


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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


def worth_training(
    rl_step: int, rollouts: Sequence[RolloutDrift], attempts: Sequence[Attempt], fallen: float
) -> tuple[bool, str]:
    """Decide whether to train in the rollout of `rl_step`, with the reason.

    `rollouts` and `attempts` hold earlier RL steps only, in order.
    `fallen` is the share by which accepted lengths have surely dropped since the last attempt.
    """
    if not any(row.accept_length for row in rollouts) or not attempts:
        return True, "what training takes and brings is not known yet"
    trained = {attempt.rl_step for attempt in attempts}
    with_training = [row.rl_step in trained for row in rollouts if row.accept_length]
    if all(with_training[-CONTROL_EVERY:]):
        return False, "a rollout without training, to see what training takes"
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
        return True, f"{price}, and not training would have cost {worth_s:.3g} s"
    wasted_s, most_s = 0.0, cost.seconds_at(1.0)
    for before, attempt in zip([first - 1, *(a.rl_step for a in attempts)], attempts, strict=False):
        brought_s = second_s * max(attempt.gain, 0.0) * (attempt.rl_step - before)
        wasted_s += max(0.0, most_s - brought_s)
    if wasted_s + most_s <= PROBE_SHARE * sum(row.rollout_s for row in rollouts):
        return True, f"{price}, a look at what it would bring now"
    if not pays:
        return False, f"{price}, and what the last ones brought was lost again too soon"
    return False, f"{price} and would have brought {worth_s:.3g} s"
