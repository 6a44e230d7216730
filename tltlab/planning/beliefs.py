"""Beliefs about the lengths of responses that have not ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from tltlab.arrays import Flags, Floats, Ints
from tltlab.errors import ConfigError
from tltlab.lengths.fit import MAX_RESPONSES
from tltlab.traces.trace import Trace

from .rollout import RolloutState, Shape

MOST_KEPT = 4096
"""Lengths of earlier RL steps that are kept of all prompts together."""
MOST_OWN = 16
"""Lengths of earlier RL steps that are kept of a prompt."""
ROUNDS = 9
"""Rounds of the fit of what responses to a prompt share."""
FEW_SHARE, FEW = 0.3, 4
"""The share that is assumed before the fit, and the number of prompts that it counts for."""
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.95
_EXCEEDED = np.append(np.geomspace(1e-3, 20.0, 511), np.inf)
_CELLS, _FURTHEST = 4096, 8.0
_NEAR = 1e-12
_SAME = 1e-9


class LengthBelief:
    """What is known of the lengths of unfinished responses: a quantile model of all, shrunk to a prompt's own.

    All lengths known, those of earlier RL steps and those ended in this rollout, make one distribution, in which the
    responses that run are lower bounds (Kaplan and Meier 1958), so that early ends do not make it short. The score z of
    a length is the standard normal quantile of its place there. Responses to a prompt share a part of it:

        z = b + e,    b ~ N(0, r),    e ~ N(0, 1 - r)

    so that b is expected at w times the mean score of the n that are known of the prompt, w = n / (n + (1 - r) / r).
    These are its lengths of earlier RL steps and its ended siblings; running siblings are lower bounds. The share r is
    fitted in each call, the most likely b given. A request's score is believed normal around its b, above the score of
    the tokens that it has generated; quantiles of the score are read as lengths again. A request without history and
    siblings so has the distribution of all.

    Beyond the longest that has ended, responses are believed to end at the rate per token at which they did from half
    of that length on, and at the cap at the latest. Before any has ended, any length up to the cap is as likely.

    >>> belief = LengthBelief({"p": [900, 1000, 1100], "q": [100, 150, 120]})
    """

    def __init__(self, history: Mapping[str, Sequence[int]] = {}) -> None:
        """Take response lengths in tokens of earlier RL steps, by prompt id. ConfigError for NaN and below 0."""
        self._own: dict[str, Floats] = {}
        self._kept: Floats = np.zeros(0)
        self.add(history)

    def add(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Learn the response lengths, by prompt id, of an RL step that has ended. ConfigError as above."""
        known = {prompt: _checked(prompt, values) for prompt, values in lengths.items()}
        for prompt, new in known.items():
            self._own[prompt] = _thinned(np.append(self._own.get(prompt, new[:0]), new), MOST_OWN)
        self._kept = _thinned(np.concatenate([self._kept, *known.values()]), MOST_KEPT)

    def __call__(self, state: RolloutState, quantiles: Floats) -> Floats:
        """Tokens that each request still generates, by request and quantile (0 to 1), from 1 to those up to its cap."""
        # SciPy takes a while to import, and most commands ask for no belief.
        from scipy.special import ndtr, ndtri

        if not len(state):
            return np.zeros((0, len(quantiles)))
        number: dict[str, int] = {}
        prompt = np.array([number.setdefault(key[1], len(number)) for key in state.keys])
        age = np.asarray(state.generated_tokens, np.float64)
        ended = np.fromiter(state.ended.values(), np.float64, len(state.ended))
        times, survival = _survival(np.append(ended, self._kept), age, float(state.max_response_tokens.max()))
        alive = np.clip(_beyond(times, survival, age, "right"), _NEAR, 1 - _NEAR)
        own, owner = self._known(state, ended, number)
        middle = (_beyond(times, survival, own, "left") + _beyond(times, survival, own, "right")) / 2
        score = -ndtri(np.clip(middle, _NEAR, 1 - _NEAR))
        mean, spread = _shared(score, owner, -ndtri(alive), prompt, len(number))
        left = ndtr(np.maximum((ndtri(alive) + mean) / spread, -30.0))
        scores = mean[:, None] - spread[:, None] * ndtri(left[:, None] * (1.0 - quantiles))
        found: Floats = np.clip(times[_first(-ndtri(survival), scores)] - age[:, None], 1.0, state.left_tokens[:, None])
        return found

    def _known(self, state: RolloutState, ended: Floats, number: Mapping[str, int]) -> tuple[Floats, Ints]:
        """Lengths of the running prompts, of earlier RL steps and of this one, and the number of each one's prompt."""
        siblings = np.fromiter((number.get(key[1], -1) for key in state.ended), np.int64, len(ended))
        earlier = [self._own.get(prompt, self._kept[:0]) for prompt in number]
        owner = np.repeat(np.arange(len(number)), [len(lengths) for lengths in earlier])
        known = siblings >= 0
        return np.concatenate([ended[known], *earlier]), np.append(siblings[known], owner)


def _checked(prompt: str, lengths: Sequence[int]) -> Floats:
    values = np.asarray(lengths, np.float64)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ConfigError(f"lengths of prompt {prompt!r}: each must be a number of tokens, at least 0")
    return values


def _thinned(lengths: Floats, most: int) -> Floats:
    """The lengths in order, or `most` of them, as many from each part of the order."""
    ordered = np.sort(lengths)
    if len(ordered) <= most:
        return ordered
    return ordered[((np.arange(most) + 0.5) * len(ordered) / most).astype(np.int64)]


def _survival(lengths: Floats, ages: Floats, cap: float) -> tuple[Floats, Floats]:
    """Rising lengths and the share of responses that are longer than each; the last share is 0.

    `lengths` have ended, responses of `ages` run on.
    """
    times, ends = np.unique(lengths, return_counts=True)
    running = len(ages) - np.searchsorted(np.sort(ages), times)
    at_risk = running + np.cumsum(ends[::-1])[::-1]
    survival = np.cumprod(1.0 - ends / at_risk, dtype=np.float64)
    last, beyond = (times[-1], survival[-1]) if len(times) else (0.0, 1.0)
    if beyond == 0.0:
        return times, survival
    cap = max(cap, last + 1.0)
    half = last / 2
    if (recent := np.count_nonzero(lengths > half)) == 0:
        left = np.linspace(1.0, 0.0, 512)
        return cap * (1.0 - left), left
    rate = recent / (np.clip(np.append(lengths, ages), half, last) - half).sum()
    later, left = np.minimum(last + _EXCEEDED / rate, cap), np.exp(-_EXCEEDED)
    return np.append(times, later), np.append(survival, beyond * left)


def _beyond(times: Floats, survival: Floats, lengths: Floats, side: Literal["left", "right"]) -> Floats:
    """Share of responses that are longer than each length, with `side` left that are no shorter."""
    shares: Floats = np.append(1.0, survival)[np.searchsorted(times, lengths, side)]
    return shares


def _first(levels: Floats, scores: Floats) -> Ints:
    """Index of the first of rising levels, the last infinite, that is no less than each score.

    Search in a table of evenly spaced scores, as binary search of half a million takes 50 ms: between two of its
    entries one step is made.
    """
    step = 2 * _FURTHEST / _CELLS
    table = np.searchsorted(levels, np.arange(_CELLS) * step - _FURTHEST - _SAME)
    cell = np.clip((scores + _FURTHEST) / step, 0, _CELLS - 1).astype(np.int64)
    found: Ints = table[cell]
    found += levels[found] < scores - _SAME
    return found


def _shared(score: Floats, owner: Ints, bound: Floats, prompt: Ints, num: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the score of each running response, from what others of its prompt tell.

    `score` is of the ended ones, each of the prompt numbered `owner`; `bound` is a lower bound on that of each running
    one, of `prompt`. A running one stands for a score at its expectation beyond the bound; its own is taken out again.
    """
    from scipy.special import erfcx

    share, shared = FEW_SHARE, np.zeros(num)
    count = np.bincount(owner, minlength=num)
    total = np.bincount(owner, score, minlength=num)
    for _ in range(ROUNDS):
        noise = math.sqrt(1.0 - share)
        over = (bound - shared[prompt]) / noise
        excess = math.sqrt(2.0 / math.pi) / erfcx(over / math.sqrt(2.0))
        weight = excess * (excess - over)
        precision = 1.0 / share + (count + np.bincount(prompt, weight, minlength=num)) / noise**2
        others = precision[prompt] - weight / noise**2
        mean, spread = shared[prompt] - excess / noise / others, np.sqrt(noise**2 + 1.0 / others)
        pull = (total - count * shared + noise * np.bincount(prompt, excess, minlength=num)) / noise**2
        shared = shared + (pull - shared / share) / precision
        share = float((shared**2 + 1.0 / precision).sum() + FEW * FEW_SHARE) / (num + FEW)
        share = min(max(share, _LEAST_SHARE), _MOST_SHARE)
    return mean, spread


def judge(trace: Trace) -> dict[str, Any]:
    """How well lengths of a trace are predicted by what a rollout knows of them; None where it has nothing to tell.

    `siblings_share`, `last_epoch_share`: share of the variance of log length within RL steps that the mean of a
    response's siblings explains, and that of its prompt when it last came (squared correlations, 0 below 0).

    `coverage`, `median_error_tokens`: of a `LengthBelief` that has seen the RL steps before, once half of an RL step's
    responses have ended, all having begun together at one pace. How many of the others end between its 10 and 90 %
    quantiles, and how far its median of the tokens left is off; means over the RL steps. `pooled_...`: the same where
    it is not known which prompt a length belongs to. Aborted responses are left out.
    """
    belief, last = LengthBelief(), pd.Series(dtype=float)
    siblings, epochs = np.zeros(3), np.zeros(3)
    halves = []
    most = MAX_RESPONSES * len(trace.rl_steps) // max(1, trace.num_rows("outcomes"))
    for step in trace.select(trace.rl_steps[-max(1, most) :]).iter_rl_steps():
        rows = step.outcomes
        rows = rows[(rows["response_tokens"] >= 1) & (rows["finish_reason"] != "abort")]
        if rows.empty:
            continue
        log = np.log(rows["response_tokens"])
        groups = log.groupby(rows["prompt_id"])
        size = groups.transform("size")
        siblings += _products((groups.transform("sum") - log) / (size - 1).where(size > 1), log)
        epochs += _products(rows["prompt_id"].map(last), log)
        tokens = rows["response_tokens"].to_numpy(np.float64)
        runs = tokens > np.sort(tokens)[(len(tokens) - 1) // 2]
        if runs.any():
            cap = float(step.workload["max_response_tokens"].max())
            figures = [_half(belief, tokens, runs, whose, cap) for whose in (rows["prompt_id"], range(len(runs)))]
            halves.append(np.concatenate(figures))
        by_prompt = rows["response_tokens"].groupby(rows["prompt_id"])
        belief.add({str(prompt): lengths.tolist() for prompt, lengths in by_prompt})
        last = groups.mean().combine_first(last)
    names = ("coverage", "median_error_tokens", "pooled_coverage", "pooled_median_error_tokens")
    means = np.mean(halves, axis=0).tolist() if halves else [None] * len(names)
    shares = {"siblings_share": _explained(siblings), "last_epoch_share": _explained(epochs)}
    return shares | dict(zip(names, means, strict=True))


def _products(predictor: pd.Series[float], log: pd.Series[float]) -> Floats:
    """Sums of squares and of the product of the two, less their means where both are known."""
    both = pd.DataFrame({"x": predictor, "y": log}).dropna()
    x, y = (both - both.mean()).to_numpy(np.float64).T
    return np.array([x @ x, x @ y, y @ y])


def _explained(products: Floats) -> float | None:
    xx, xy, yy = products.tolist()
    return max(0.0, xy) ** 2 / (xx * yy) if xx * yy > 0 else None


def _half(belief: LengthBelief, tokens: Floats, runs: Flags, prompts: Iterable[Any], cap: float) -> tuple[float, float]:
    """Coverage and median error of those that still run when the others have ended."""
    keys = [(0, prompt, i, 0) for i, prompt in enumerate(prompts)]
    age, left = np.full(int(runs.sum()), tokens[~runs].max()), tokens[runs]
    state = RolloutState(
        now_s=0.0, rl_step=0, active=Shape(engines=1, gpus=1), keys=[keys[i] for i in np.flatnonzero(runs)],
        worker=np.zeros(len(age), np.int64), prompt_tokens=np.zeros(len(age)), generated_tokens=age,
        max_response_tokens=np.full(len(age), cap), ended={keys[i]: int(tokens[i]) for i in np.flatnonzero(~runs)},
    )  # fmt: skip
    low, middle, high = state.generated_tokens + belief(state, np.array([0.1, 0.5, 0.9])).T
    return float(((low <= left) & (left <= high)).mean()), float(np.median(np.abs(middle - left)))
