"""Beliefs about the lengths of responses that have not ended."""

import math
from bisect import bisect
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from tltlab.arrays import Floats, Ints
from tltlab.records import Json
from tltlab.state import Key
from tltlab.traces.trace import Trace

from .rollout import RolloutState, Shape

MOST_KEPT = 4096
"""Lengths of earlier RL steps that are kept of all prompts together."""
MOST_OWN = 16
"""Lengths that those of a prompt's earlier RL steps count for at most, so that older ones fade."""
ROUNDS = 4
"""Rounds of the fit of what responses to a prompt share."""
FIRST_SHARE, MOST_SHARE = 0.3, 0.85
"""The share of what they share that the fit begins with, and the most that is believed."""
MOST_JUDGED = 16
"""RL steps, the last ones of a trace, by which beliefs are judged."""
_SCORES = np.linspace(-8.0, 8.0, 513)
_WHOSE = {"all": "{step} {i}", "siblings": "{step} {prompt}", "history": "{prompt}"}


class LengthBelief:
    """Lengths of unfinished responses as far as they are known: a quantile model of all, shrunk to a prompt's own.

    Whoever runs rollouts makes one, hands it to planners as `RolloutState.belief`, and calls `add` with the lengths of
    each RL step once that is over, aborted responses left out. `LengthBelief(**belief.state_dict())` continues it.

    >>> belief = LengthBelief()
    >>> belief.add({(0, "p", 0, 0): 1000, (0, "p", 1, 0): 1100, (0, "q", 0, 0): 100, (0, "q", 1, 0): 150})

    All lengths known, those of earlier RL steps and those ended in this rollout, make one distribution, in which the
    responses that run are lower bounds (Kaplan and Meier 1958), so that early ends do not make it short. The score z of
    a length is the standard normal quantile of its place there. Responses to a prompt share a part of it:

        z = b + e,    b ~ N(0, r),    e ~ N(0, 1 - r)

    so that b is expected at w times the mean score of the n that are known of the prompt, w = n / (n + (1 - r) / r).
    These are its ended siblings and its lengths of earlier RL steps, these with their scores when they were added;
    running siblings are lower bounds. The share r is fitted in each call to all prompts ever seen, as those that still
    run are no fair sample, the most likely b given. A request's score is believed normal around its b, above the score
    of the tokens that it has generated; quantiles of the score are read as lengths again. A request without history and
    siblings so has the distribution of all.

    Beyond the longest that has ended, responses are believed to end at the rate per token at which they did from half
    of that length on, and at the cap at the latest. Before any has ended, any length up to the cap is as likely.
    """

    def __init__(
        self, lengths: Sequence[float] = (), prompts: Sequence[str] = (), known: Sequence[Sequence[float]] = ((), ())
    ):
        self._lengths: Floats = np.array(lengths, np.float64)
        self._number: dict[str, int] = {prompt: i for i, prompt in enumerate(prompts)}
        self._known: Floats = np.array(known, np.float64)

    def state_dict(self) -> Json:
        """The arguments of a belief that knows the same, as JSON types."""
        known = self._known.tolist()
        return {"lengths": self._lengths.tolist(), "prompts": list(self._number), "known": known}

    def add(self, ended: Mapping[Key, int]) -> None:
        """Learn the response lengths in tokens, by request, of an RL step that is over."""
        if ended:
            known, lengths, _, _ = self._learn(dict(sorted(ended.items())), self._number, np.zeros(0))
            self._known = known * np.minimum(1.0, MOST_OWN / np.maximum(known[0], 1.0))
            self._lengths = np.sort(lengths)[:: len(lengths) // MOST_KEPT + 1]

    def __call__(self, state: RolloutState, quantiles: Floats) -> Floats:
        """Tokens that each request still generates, by request and quantile (0 to 1).

        They may be below 1 or pass the cap, where `RolloutState.remaining` cuts them.
        """
        # SciPy takes a while to import, and most commands ask for no belief.
        from scipy.special import ndtr, ndtri

        if not (state.ended or self._number):
            return state.left_tokens[:, None] * quantiles
        number = self._number.copy()
        prompt = _numbers(state.keys, number)
        known, _, bound, length = self._learn(state.ended, number, state.generated_tokens)
        mean, spread = _shared(known, prompt, bound)
        left = ndtr(np.maximum((mean - bound) / spread, -30.0))[:, None]
        scores = mean[:, None] - spread[:, None] * ndtri(left * (1.0 - quantiles))
        remaining: Floats = np.interp(scores, _SCORES, length) - state.generated_tokens[:, None]
        return remaining

    def _learn(self, ended: Mapping[Key, int], number: dict[str, int], ages: Floats) -> tuple[Floats, ...]:
        """Return what is known where responses have `ended` and others run on that have generated `ages`.

        That is the number and the sum of the scores of each prompt (new ones are added to `number`), all lengths, the
        score of each age, and the length at each of `_SCORES`.
        """
        from scipy.special import ndtr, ndtri

        owner = _numbers(ended, number)
        lengths = np.maximum(1.0, np.append(np.fromiter(ended.values(), np.float64), self._lengths))
        times, place, ends = np.unique(lengths, return_inverse=True, return_counts=True)
        passed = np.searchsorted(times, ages, "right")
        gone = np.bincount(passed, minlength=len(ends)).cumsum()[: len(ends)]
        longer = np.append(1.0, np.cumprod(1.0 - ends / (len(ages) - gone + ends[::-1].cumsum()[::-1])))
        score = -ndtri((longer[1:] + longer[:-1]) / 2)[place[: len(owner)]]
        known = np.zeros((2, len(number)))
        known[:, : self._known.shape[1]] = self._known
        known += [np.bincount(owner, weights, len(number)) for weights in (np.ones(len(owner)), score)]
        last = times[-1]
        rate = np.count_nonzero(lengths > last / 2) / np.maximum(0.0, np.append(lengths, ages) - last / 2).sum()
        alive = longer[passed] * np.exp(-rate * np.maximum(0.0, ages - last))
        share = ndtr(-_SCORES)
        at = times[np.searchsorted(-longer[1:-1], -share)] + np.log(np.maximum(longer[-1] / share, 1.0)) / rate
        return known, lengths, -ndtri(np.clip(alive, 1e-300, 1 - 1e-12)), at


def _numbers(keys: Iterable[Key], number: dict[str, int]) -> Ints:
    """The number of each request's prompt; new ones are added."""
    return np.array([number.setdefault(key[1], len(number)) for key in keys], np.int64)


def _shared(known: Floats, prompt: Ints, bound: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the score of each running response, from others of its prompt.

    `known` are the number and the sum of the scores known of each prompt; `bound` is a lower bound on the score of each
    running one, of `prompt`. A bound stands for a score at its expectation beyond it; its own is taken out again.
    """
    from scipy.special import erfcx

    (count, total), num = known, known.shape[1]
    share, shared = FIRST_SHARE, np.zeros(num)
    for _ in range(ROUNDS):
        noise = math.sqrt(1.0 - share)
        over = (bound - shared[prompt]) / noise
        excess = math.sqrt(2.0 / math.pi) / erfcx(over / math.sqrt(2.0))
        weight = excess * (excess - over)
        precision = 1.0 / share + (count + np.bincount(prompt, weight, num)) / noise**2
        pull = (total - count * shared + noise * np.bincount(prompt, excess, num)) / noise**2
        shared = shared + (pull - shared / share) / precision
        share = min(float((shared**2 + 1.0 / precision).mean()), MOST_SHARE)
    others = precision[prompt] - weight / noise**2
    return shared[prompt] - excess / noise / others, np.sqrt(noise**2 + 1.0 / others)


def judge(trace: Trace) -> dict[Hashable, dict[str, float]]:
    """How well a `LengthBelief` predicts lengths of a trace, by what is known of a response.

    Known are lengths of the same RL step and of earlier ones: without their prompts (`all`), with the response's
    siblings told from others (`siblings`), and with its prompt's earlier lengths too (`history`).

    `coverage`, `median_error_tokens`: once half of an RL step's responses have ended, all having begun together at one
    pace: how many of the others end between the 10 and 90 % quantiles, and how far the median of the tokens left is
    off; means over the RL steps. Aborted responses are left out. Empty where lengths differ in no RL step.
    """
    beliefs = {known: LengthBelief() for known in _WHOSE}
    found = []
    for number, step in enumerate(trace.select(trace.rl_steps[-MOST_JUDGED:]).iter_rl_steps()):
        rows = step.outcomes[step.outcomes["finish_reason"] != "abort"].sort_values("response_tokens")
        prompts, tokens = rows["prompt_id"].tolist(), rows["response_tokens"].tolist()
        half = bisect(tokens, rows["response_tokens"].median())
        for known, whose in _WHOSE.items():
            keys = [(0, whose.format(step=number, i=i, prompt=p), i, 0) for i, p in enumerate(prompts)]
            if half < len(keys):
                cap = float(step.workload["max_response_tokens"].max())
                found.append((known, *_half(beliefs[known], keys, tokens, half, cap)))
            beliefs[known].add(dict(zip(keys, tokens, strict=True)))
    return (
        pd.DataFrame(found, columns=["known", "coverage", "median_error_tokens"])
        .groupby("known", sort=False)
        .mean()
        .T.to_dict()
    )


def _half(
    belief: LengthBelief, keys: Sequence[Key], tokens: Sequence[int], half: int, cap: float
) -> tuple[float, float]:
    """Coverage and median error of the responses from `half` on, when those before have ended; `tokens` rise."""
    left = np.array(tokens[half:], np.float64) - tokens[half - 1]
    state = RolloutState(
        now_s=0.0, rl_step=0, active=Shape(engines=1, gpus=1), keys=keys[half:], worker=np.zeros_like(left, np.int64),
        prompt_tokens=left, generated_tokens=np.full_like(left, tokens[half - 1]),
        max_response_tokens=np.full_like(left, cap), ended=dict(zip(keys[:half], tokens[:half], strict=True)),
        belief=belief,
    )  # fmt: skip
    low, middle, high = state.remaining(np.array([0.1, 0.5, 0.9])).T
    return float(((low <= left) & (left <= high)).mean()), float(np.median(np.abs(middle - left)))
