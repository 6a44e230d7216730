"""Adaptive: learn seconds and acceptance while decoding, and draft what promises the most tokens per second."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from tltlab.arrays import Floats, Ints
from tltlab.costs.linear import FAR_TOKENS
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION, Strategy

from .goodput import kept_by_position
from .reward import Reward
from .selector import Selector

NUM_BANDS = 14
"""Bands of batch sizes [1], [2, 3], [4, 7], ...; the last is open-ended."""
MOST_COUNTED = 32
"""Requests of an iteration whose accepted tokens are counted: of more, every n-th, which then counts for n."""
MOST_OFTEN = 0.03
"""Chance of any one strategy that is tried though another looks better."""
EVERY, AT_FIRST = 16, 2
"""Iterations between two looks at all strategies, at most and at first; in between a sixteenth of those since the RL
step began or the machine changed. A batch that changes by more than 5 % is looked at anyway."""
PRIOR_CHANCE, PRIOR_DRAFTS = 0.6, 8.0
BAND_DRAFTS = 64.0
"""Drafts that all bands together count for in one of them."""
CHANGE, LOOK_AROUND = 0.64, 30
"""Mean error of the last 20 iterations, squared, over the noise's variance, from which on the machine has changed; and
the iterations that then count as known, which decide on how much is tried."""
PROCESS_NOISE, CHANGE_NOISE = 0.01, 0.1
"""Share of the prior's variance that coefficients may wander by within `window` iterations, and when the machine
changed."""
CELL_ITERATIONS, CELL_WINDOW = 12.0, 150.0
RL_STEP_DRAFTS = np.array([100.0, *([32.0] * NUM_BANDS)])[:, None, None]
"""Drafts that what was known of a drafter counts for at most, in all bands together and in one of them, in a new
RL step: the target has moved, and training the drafter."""
NO_PROMISE = 0.01
"""Least total promise of the other strategies for which the exploration share of time is used up."""
_TOKENS_PER_SECOND = Reward("paper")
_WARM_UP = 4.0
_CLIP = 4.0

_Iteration = tuple[int, int, float, float, float, int, Sequence[float]]
"""Strategy, batch, context per request, tokens drafted, seconds (0: they teach nothing), every how many drafts, what
those kept."""


class Adaptive(Selector, kind="adaptive"):
    """The strategy with the most expected tokens per second, by costs and acceptance that it learns: it needs no file.

    Strategies are no speculation and chains of 1 to `max_depth` tokens of each of the `drafters`. An iteration with b
    requests, contexts that sum to S, depth d and n tokens to verify takes

        base + per_request*b + per_token*n + far_token*max(0, n - 128) + per_context*S
          + [if drafting]  drafting_k + level_k*d                                        k the drafter

    seconds, as in `LinearCosts`. Recursive least squares on relative errors learn the coefficients, which are taken to
    wander (Ljung and Soderstrom 1983, section 2.6.2). A drafter that finds no match drafts less than d: n is known of
    what was verified, and expected by the share of b*d that was drafted, per band of batch sizes. Errors beyond 4
    standard deviations count as 4; where they lean to one side the machine has changed, and more is tried for a while.
    Deviations of a strategy at batches of a band (padding, a kernel's step) are a factor per strategy and band, drawn
    towards 1 while few of its iterations are known.

    Tokens are 1 plus the sum of survival, the product of the chances to keep each drafted token, counted per drafter
    and position as in `Goodput`, per band of batch sizes and drawn towards all bands together. Iterations with that
    drafter forget over `window`, and a new RL step leaves little of what is known, since the target has moved.

    A strategy that loses the share gap of an iteration's time against the best is tried with probability
    exploration * u / gap, where u weighs how likely it is to be the better one after all and sums to 1 at most:
    inverse-gap weighting (Foster and Rakhlin 2020, SquareCB), spent on what is unknown. By its own estimates that costs
    at most the share `exploration` of the time, more in the first few hundred iterations. Bringing in drafters,
    `switch_s` seconds once an RL step, waits until plain decoding has lost as much, which is at most twice the best of
    both.

    Outcomes are learned in blocks, when strategies are looked at again: in most iterations nothing is calculated. A
    decision is O(strategies), whatever the batch. The outcome may come one choice late, as in vLLM: it is filed under
    the batch that it names.

    >>> adaptive = Adaptive(["ngram"], max_depth=2, rng=np.random.default_rng(0))
    >>> [str(strategy) for strategy in adaptive.strategies]
    ['none', 'ngram:1', 'ngram:2']
    """

    by_arm = True

    def __init__(
        self,
        drafters: Sequence[str] = ("ngram",),
        max_depth: int = 8,
        window: int = 500,
        exploration: float = 0.002,
        switch_s: float = 0.0,
        *,
        rng: np.random.Generator,
    ):
        names = tuple(drafters)
        if not names or len(set(names)) < len(names) or NO_SPECULATION.drafter in names:
            raise ConfigError(f"adaptive: drafters are names, each once and without 'none', got {', '.join(names)}")
        if max_depth < 1 or window < 2:
            raise ConfigError(f"adaptive: max_depth must be at least 1, window at least 2: got {max_depth}, {window}")
        if not 0.0 <= exploration <= 0.5 or not 0.0 <= switch_s < float("inf"):
            raise ConfigError(
                f"adaptive: exploration is a share of the time up to 0.5 and switch_s seconds from 0 up, got "
                f"{exploration} and {switch_s}"
            )
        self.drafters = names
        self.max_depth = max_depth
        self.window = window
        self.exploration = exploration
        self.switch_s = switch_s
        self.rng = rng
        depths = range(1, max_depth + 1)
        self.strategies = (NO_SPECULATION, *(Strategy.chain(name, depth) for name in names for depth in depths))
        self._index = {strategy: i for i, strategy in enumerate(self.strategies)}
        self._fixed = _features(len(names), max_depth)
        self._forget = 1.0 - 1.0 / window
        means, spreads = _prior(len(names))
        self._most_variance = float((spreads**2).sum())
        self._process_noise = np.diag(spreads**2) * (PROCESS_NOISE / window)
        self._change_noise = np.diag(spreads**2) * CHANGE_NOISE
        # Coefficients in units of `scale_`, the first iteration's seconds, and their covariance.
        self.coef_, self.covariance_ = means, np.diag(spreads**2)
        self.scale_ = 0.0
        self.noise_, self.bias_ = 0.04, 0.0
        # Per strategy and band: sum of relative errors, and of iterations.
        self.errors_ = np.zeros((2, NUM_BANDS, len(self.strategies)))
        # Per drafter and position: drafts that got there, and that were kept; the first row is of all bands.
        self.drafts_ = np.zeros((len(names), NUM_BANDS + 1, 2, max_depth))
        self.iterations_, self.since_change_ = 0, 0
        self.rl_step_: int | None = None
        self.context_per_request_ = 0.0
        self.lost_s_ = 0.0
        # Per drafter, in all bands and in each: tokens drafted, and asked for.
        self.offered_ = np.zeros((len(names), NUM_BANDS + 1, 2))
        # Observed iterations that are not learned yet.
        self.pending_: list[_Iteration] = []
        # The last look: batch, iterations since, index of the best, cumulative chances of the others, its loss.
        self.look_batch_, self.look_age_, self.best_ = 0, 0, 0
        self.chances_ = [0.0] * len(self.strategies)
        self.loss_s_ = 0.0

    def choose(self, state: StepState) -> Choice:
        batch = max(state.batch, 1)
        self.context_per_request_ = state.context_tokens / batch
        if state.rl_step != self.rl_step_:
            self._new_rl_step(state.rl_step)
        due = min(EVERY, AT_FIRST + self.since_change_ // 16)
        if self.look_age_ >= due or 20 * abs(batch - self.look_batch_) > batch:
            self._look(batch, state.context_tokens)
        self.look_age_ += 1
        self.since_change_ += 1
        u = float(self.rng.random())
        if self.lost_s_ < self.switch_s:
            # Renting until the rent has cost as much as buying loses at most twice the best of both.
            self.lost_s_ += self.loss_s_
            if self.lost_s_ < self.switch_s:
                return Choice(NO_SPECULATION)
        chances = self.chances_
        total = chances[-1]
        if u < total:
            i = bisect_right(chances, u)
            return Choice(self.strategies[i], chances[i] - (chances[i - 1] if i else 0.0))
        return Choice(self.strategies[self.best_], 1.0 - total)

    def seconds(self, batch: int, context_tokens: float) -> Floats:
        """Expected seconds of an iteration by strategy, in order; 1-scaled before the first was measured."""
        return self._seconds(self._rows_at(batch, context_tokens), batch) * (self.scale_ or 1.0)

    def tokens(self, batch: int) -> Floats:
        """Expected tokens per request and iteration by strategy, in order, the bonus token included."""
        return self._tokens(_band(batch))[0]

    def _rows(self, arms: slice | Ints, batch: int | Ints, context_tokens: float | Floats, tokens: Floats) -> Floats:
        """Factors of the coefficients (strategies, coefficients), at one batch for all or one for each strategy."""
        rows: Floats = self._fixed[arms].copy()
        rows[:, 1] = batch / 32.0
        rows[:, 2] = context_tokens * 1e-5
        rows[:, 3] = tokens / 64.0
        rows[:, 4] = np.maximum(tokens - FAR_TOKENS, 0.0) / 64.0
        return rows

    def _rows_at(self, batch: int, context_tokens: float) -> Floats:
        """Rows of all strategies, at the tokens to verify that are to be expected of each."""
        share = (self.offered_[:, 0, 0] + PRIOR_DRAFTS) / (self.offered_[:, 0, 1] + PRIOR_DRAFTS)
        weight = np.minimum(self.offered_[:, 0, 1], BAND_DRAFTS) + PRIOR_DRAFTS
        drafted, requested = self.offered_[:, _band(batch) + 1].T
        share = (drafted + weight * share) / (requested + weight)
        tokens = np.ones(len(self.strategies))
        tokens[1:] += (share[:, None] * np.arange(1, self.max_depth + 1)).ravel()
        return self._rows(slice(None), batch, context_tokens, batch * tokens)

    def _seconds(self, rows: Floats, batch: int) -> Floats:
        sums, counts = self.errors_[:, _band(batch)]
        expected = rows @ self.coef_
        seconds: Floats = np.maximum(expected, max(0.1 * float(expected[0]), 1e-3)) * (
            1.0 + sums / (counts + CELL_ITERATIONS)
        )
        return seconds

    def _tokens(self, band: int) -> tuple[Floats, Floats]:
        """Expected tokens by strategy, and the variance of their logarithm."""
        reached, kept = self.drafts_[:, 0, 0], self.drafts_[:, 0, 1]
        chance = (kept + PRIOR_DRAFTS * PRIOR_CHANCE) / (reached + PRIOR_DRAFTS)
        drafts = np.minimum(reached, BAND_DRAFTS) + PRIOR_DRAFTS
        reached = self.drafts_[:, band + 1, 0] + drafts
        chance = (self.drafts_[:, band + 1, 1] + drafts * chance) / reached
        survival = np.cumprod(chance, axis=1)
        variance = np.cumsum((1.0 - chance) / (chance * reached), axis=1)
        tokens = np.ones(len(self.strategies))
        spread = np.zeros(len(self.strategies))
        tokens[1:] += np.cumsum(survival, axis=1).ravel()
        spread[1:] = (1.0 - 1.0 / tokens[1:]) ** 2 * variance.ravel()
        return tokens, spread

    def _look(self, batch: int, context_tokens: float) -> None:
        """Find the best strategy and the chances of the others, after learning; let coefficients wander."""
        if self.pending_:
            self._learn()
        if float(self.covariance_.trace()) < self._most_variance:
            self.covariance_ += self.look_age_ * self._process_noise
            if self.bias_ * self.bias_ > CHANGE * self.noise_:
                self._machine_changed()
        rows = self._rows_at(batch, context_tokens)
        seconds = self._seconds(rows, batch)
        tokens, variance = self._tokens(_band(batch))
        variance += self.noise_ * ((rows @ self.covariance_) * rows).sum(axis=1) / seconds**2
        rates = tokens / seconds
        best = int(rates.argmax())
        gap = 1.0 - rates / rates[best]
        spread = np.sqrt(variance + variance[best])
        promise = spread * np.exp(-0.5 * np.minimum(gap / spread, 8.0) ** 2)
        promise[best] = 0.0
        iterations = 1.0 + self.iterations_
        budget = min(self.exploration + _WARM_UP / (iterations * iterations / 128.0 + iterations), 0.5)
        chances = np.minimum(
            budget * promise / ((float(promise.sum()) + NO_PROMISE) * np.maximum(gap, 1e-3) * seconds / seconds[best]),
            MOST_OFTEN if iterations > 50 else 0.5 / len(rates),
        )
        chances[best] = 0.0
        self.chances_ = np.cumsum(chances).tolist()
        self.best_, self.look_batch_, self.look_age_ = best, batch, 0
        self.loss_s_ = self.scale_ * float(seconds[0] * max(0.0, 1.0 - rates[0] / rates[best]))

    def _machine_changed(self) -> None:
        """Let the coefficients of time move, and explore as at the start."""
        self.covariance_ += self._change_noise
        self.errors_ *= 0.2
        self.bias_ = 0.0
        self.iterations_ = min(self.iterations_, LOOK_AROUND)
        self.since_change_ = 0

    def _new_rl_step(self, rl_step: int) -> None:
        if self.rl_step_ is not None:
            self.drafts_ *= RL_STEP_DRAFTS / np.maximum(self.drafts_[:, :, :1, :1], RL_STEP_DRAFTS)
            self.offered_ *= RL_STEP_DRAFTS[:, 0] / np.maximum(self.offered_[:, :, 1:], RL_STEP_DRAFTS[:, 0])
        self.rl_step_, self.lost_s_, self.look_age_, self.since_change_ = rl_step, 0.0, EVERY, 0

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        strategy = choice.strategy
        i = self.best_ if strategy is self.strategies[self.best_] else self._index.get(strategy)
        if i is None or outcome.batch < 1:
            return
        self.iterations_ += 1
        accepted = outcome.accepted if i else ()
        every = max(len(accepted) - 1, 0) // MOST_COUNTED + 1
        drafted = float(sum(outcome.drafted) if outcome.drafted else strategy.draft_depth * outcome.batch)
        elapsed_s = 0.0 if outcome.had_prefill else outcome.elapsed_s
        context = self.context_per_request_
        self.pending_.append((i, outcome.batch, context, drafted, elapsed_s, every, accepted[::every]))
        if len(self.pending_) >= 2 * EVERY:
            self._learn()

    def _learn(self) -> None:
        """Learn from all that was observed since the last time: in a block, which takes a fraction of one by one."""
        pending, self.pending_ = self.pending_, []
        drafts: dict[tuple[int, int, int], list[Sequence[float]]] = {}
        for i, batch, _, drafted, _, every, accepted in pending:
            if len(accepted):
                drafts.setdefault((i, _band(batch), every), []).append(accepted)
                self._count_offered(i, batch, drafted)
        for (i, band, every), parts in drafts.items():
            self._count(i, band, every, parts)
        if timed := [row for row in pending if row[4] > 0.0]:
            self._time(timed)

    def _count_offered(self, i: int, batch: int, drafted: float) -> None:
        drafter, depth = divmod(i - 1, self.max_depth)
        for row in (0, _band(batch) + 1):
            self.offered_[drafter, row] = self._forget * self.offered_[drafter, row] + (drafted, batch * (depth + 1))

    def _count(self, i: int, band: int, every: int, parts: list[Sequence[float]]) -> None:
        """Count what was kept of drafts of the i-th strategy, an iteration in each of the parts."""
        drafter, depth = divmod(i - 1, self.max_depth)
        depth += 1
        times = Counter(chain.from_iterable(parts))
        some, often = np.array(list(times), np.float64), np.array(list(times.values()), np.float64) * every
        alive = np.concatenate([[often.sum()], often @ kept_by_position(some, depth)])
        forget = self._forget ** len(parts)
        for row in (0, band + 1):
            counts = self.drafts_[drafter, row]
            counts *= forget
            counts[0, :depth] += alive[:-1]
            counts[1, :depth] += alive[1:]

    def _time(self, timed: list[_Iteration]) -> None:
        """A step of recursive least squares on the relative errors of several iterations."""
        arms, batch, context, drafted, elapsed = (np.array(column) for column in list(zip(*timed, strict=True))[:5])
        self.scale_ = self.scale_ or float(elapsed[0])
        elapsed = elapsed / self.scale_
        rows = self._rows(arms, batch, context * batch, batch + drafted)
        expected = np.maximum(rows @ self.coef_, 0.05 * elapsed)
        errors = elapsed / expected - 1.0
        most = _CLIP * self.noise_**0.5
        cut = np.minimum(np.maximum(errors, -most), most)
        # Relative errors: both sides of the equation over what was expected.
        rows /= expected[:, None]
        along = rows @ self.covariance_
        gain = np.linalg.solve(along @ rows.T + np.eye(len(rows)), along).T
        change = gain @ cut
        self.coef_ = self.coef_ + change
        self.covariance_ -= gain @ along
        self.covariance_ = (self.covariance_ + self.covariance_.T) / 2.0
        residuals = cut - rows @ change
        squares = float(np.minimum(errors * errors, 9.0 * self.noise_ + 1e-6).mean())
        self.noise_ = max(self.noise_ + (squares - self.noise_) * (1.0 - 0.98 ** len(cut)), 1e-4)
        self.bias_ += (float(cut.mean()) - self.bias_) * (1.0 - 0.95 ** len(cut))
        cells = np.array([_band(b) for b in batch.tolist()]) * len(self.strategies) + arms
        for values, new in zip(self.errors_.reshape(2, -1), (residuals, np.ones(len(residuals))), strict=True):
            np.multiply.at(values, cells, 1.0 - 1.0 / CELL_WINDOW)
            np.add.at(values, cells, new)

    def reward(self, choice: Choice, outcome: StepOutcome) -> float | None:
        """Tokens per second of the iteration, None where it teaches nothing about time."""
        return _TOKENS_PER_SECOND(choice.strategy, outcome) if choice.strategy in self._index else None

    def state_dict(self) -> Json:
        return super().state_dict() | {
            "arrays": {name: getattr(self, name).tolist() for name in _ARRAYS},
            "values": {name: getattr(self, name) for name in _VALUES},
            "pending": [[*row, list(map(float, accepted))] for *row, accepted in self.pending_],
        }

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        for name in _ARRAYS:
            setattr(self, name, np.array(state["arrays"][name], np.float64))
        for name in _VALUES:
            setattr(self, name, state["values"][name])
        self.chances_ = list(self.chances_)
        self.pending_ = [tuple(row) for row in state["pending"]]


_ARRAYS = ("coef_", "covariance_", "errors_", "drafts_", "offered_")
_VALUES = (
    "scale_", "noise_", "bias_", "iterations_", "since_change_", "rl_step_", "context_per_request_", "lost_s_",
    "look_batch_", "look_age_", "best_", "chances_", "loss_s_",
)  # fmt: skip


def _band(batch: int) -> int:
    return min(batch.bit_length(), NUM_BANDS) - 1


def _features(num_drafters: int, max_depth: int) -> Floats:
    """Constant factors of the coefficients, (strategies, coefficients); `Adaptive._rows` fills in the rest.

    Coefficients are base, per_request, per_context, per_token, far_token, then drafting and level of each drafter.
    """
    fixed = np.zeros((1 + num_drafters * max_depth, 5 + 2 * num_drafters))
    fixed[:, 0] = 1.0
    for i in range(1, len(fixed)):
        drafter, depth = divmod(i - 1, max_depth)
        fixed[i, 5 + 2 * drafter : 7 + 2 * drafter] = 1.0, depth + 1
    return fixed


def _prior(num_drafters: int) -> tuple[Floats, Floats]:
    """Mean and spread of the coefficients over the seconds of a plain iteration: memory-bound, drafting cheap.

    Per request of 32, per 64 tokens, per 100,000 tokens of context. Spreads are in standard deviations of the noise, as
    the covariance is.
    """
    means = np.array([0.9, 0.05, 0.1, 0.05, 0.0, *([0.1, 0.02] * num_drafters)])
    spreads = np.array([0.5, 0.3, 2.0, 0.5, 0.5, *([0.3, 0.06] * num_drafters)])
    return means, spreads * 5.0
