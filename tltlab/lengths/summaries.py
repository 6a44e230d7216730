"""Summaries of response lengths, as papers print them: measured on a trace, read from text, and turned into a law."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.records import frozen

from .model import LengthModel, normal_weights, straight_through

TAIL_REQUESTS = 32
"""TLT's threshold: at or below so many running requests its engine starts to speculate."""

KEYS = "p1 to p99.99, mean, max, cap, cut, tail, responses, group, prompt_share"
DEFAULTS = {"responses": 512.0, "group": 8.0, "prompt_share": 0.65, "cap": 32768.0}
"""Values where a summary is not given: those of TLT's script for 8 GPUs; the share of TailSieve (arXiv 2608.22788)."""

_NORMAL = NormalDist()
_SCORES = np.linspace(-9.0, 9.0, 3601)
_WORST = math.log(1.25)
"""Summaries that the nearest law misses by a larger factor contradict each other."""
_APART = 0.1


@frozen
class Summaries:
    """Published summaries of response lengths, in tokens, as they were cut at `cap`.

    `quantiles` has percentages and tokens. `cut` is the share of responses cut at the cap, `max` the mean over RL steps
    of the longest response. `tail` is the share of an RL step's makespan in which at most 32 (`TAIL_REQUESTS`) of its
    `responses` still run, where all start at once and decode a token an iteration: 1 - E[33rd longest] / E[longest].
    TLT counts running requests on one engine, so for the tail of an engine `responses` are those of the engine. A
    share of *seconds* is smaller, for iterations are shorter in the tail. A prompt has `group` responses, and explains
    `prompt_share` of the variance of log length. None means unknown.
    """

    quantiles: Mapping[float, float] = field(default_factory=dict)
    mean: float | None = None
    max: float | None = None
    cap: float | None = None
    cut: float | None = None
    tail: float | None = None
    responses: float | None = None
    group: float | None = None
    prompt_share: float | None = None

    def given(self) -> dict[str, float]:
        """The summaries that are known, by key.

        >>> Summaries(quantiles={50.0: 1500.0}, cap=20480.0, cut=0.02).given()
        {'p50': 1500.0, 'cap': 20480.0, 'cut': 0.02}
        """
        named = {f"p{level:g}": tokens for level, tokens in sorted(self.quantiles.items())}
        others = {name: getattr(self, name) for name in ("mean", "max", "cap", "cut", "tail", *_ABOUT)}
        return named | {name: value for name, value in others.items() if value is not None}

    def __str__(self) -> str:
        return ",".join(f"{name}={value:.6g}" for name, value in self.given().items())


_ABOUT = ("responses", "group", "prompt_share")
_LENGTHS = ("mean", "max", "cap")


def read_summaries(text: str) -> Summaries:
    """Read `p50=1500,p75=4000,cap=20480,cut=0.02`. Raises ConfigError.

    >>> read_summaries("p50=1500,cap=20480").given()
    {'p50': 1500.0, 'cap': 20480.0}
    """
    quantiles: dict[float, float] = {}
    others: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (each.strip() for each in part.partition("="))
        try:
            value = float(number)
            level = float(name[1:]) if name[:1] == "p" and name != "prompt_share" else None
        except ValueError:
            raise ConfigError(f"summaries: {part!r} is no key=number; the keys are {KEYS}") from None
        if (level is None and name not in (*_LENGTHS, *_ABOUT, "cut", "tail")) or not math.isfinite(value):
            raise ConfigError(f"summaries: {part!r} is not known; the keys are {KEYS}")
        if name in others or level in quantiles:
            raise ConfigError(f"summaries: {name} is given twice")
        if level is None:
            others[name] = value
        else:
            quantiles[level] = value
    return Summaries(quantiles=quantiles, **others)


def summaries_of(outcomes: pd.DataFrame, *, cap: int | None, prompt_share: float | None) -> Summaries:
    """Summaries of a trace's `outcomes`; the tail where RL steps have more than 32 responses."""
    tokens = outcomes.loc[outcomes["response_tokens"] >= 1, "response_tokens"].to_numpy()
    if not len(tokens):
        return Summaries()
    steps = [np.sort(part.to_numpy())[::-1] for _, part in outcomes.groupby("rl_step")["response_tokens"]]
    longest = sum(float(step[0]) for step in steps)
    after = [float(step[TAIL_REQUESTS]) for step in steps if len(step) > TAIL_REQUESTS]
    groups = outcomes.groupby(["rl_step", "prompt_id"], sort=False).ngroups
    return Summaries(
        quantiles={level: float(np.percentile(tokens, level)) for level in (10.0, 50.0, 75.0, 90.0, 99.0)},
        mean=float(tokens.mean()),
        max=longest / len(steps),
        cap=None if cap is None else float(cap),
        cut=float((outcomes["finish_reason"] == "length").mean()),
        tail=1 - sum(after) / longest if len(after) == len(steps) else None,
        responses=float(max(1, round(len(outcomes) / len(steps)))),
        group=float(max(1, round(len(outcomes) / groups))),
        prompt_share=prompt_share,
    )


def from_summaries(summaries: Summaries) -> tuple[LengthModel, dict[str, tuple[float, float]]]:
    """A law with these summaries, and for each that was fitted (given, found).

    Log length is straight between knots of the normal score: at the quantiles given, at the share that is cut, and one
    each for the tail, the longest response and the mean beyond them. More summaries than knots are met by
    least squares of the logarithms; summaries that no law meets to 25 % contradict each other. Raises ConfigError.

    >>> law, found = from_summaries(read_summaries("p50=1500,p75=2500,cap=20480,cut=0.01"))
    >>> [round(law.quantile(p)) for p in (0.5, 0.75, 0.99)], round(law.cap_mass(), 3)
    ([1500, 2500, 20480], 0.01)
    """
    _check(summaries)
    from scipy.optimize import least_squares

    law = _Law(summaries)
    start = law.start()
    steps = np.maximum(np.diff(start), 1e-3)
    least = np.concatenate([[-np.inf], np.zeros(len(steps))])
    optimum = least_squares(law.misfit, np.concatenate([start[:1], steps]), bounds=(least, np.inf), xtol=1e-12)
    logs = np.cumsum(optimum.x)
    found = law.found(logs)
    for name, (given, fitted) in found.items():
        off = (1 - fitted) / (1 - given) if name == "tail" else fitted / given if given else 1.0
        if not abs(math.log(max(off, 1e-9))) < _WORST:
            raise ConfigError(
                f"summaries {summaries} contradict each other: the nearest law that is straight between its knots "
                f"has {name} {fitted:.4g} where {given:g} is given"
            )
    assumed = [f"{name} {DEFAULTS[name]:g}" for name in DEFAULTS if getattr(summaries, name) is None]
    notes = [f"fitted to published summaries: {summaries}"]
    notes.append("given and found: " + ", ".join(f"{n} {a:.5g} {b:.5g}" for n, (a, b) in found.items()))
    notes += [f"assumed: {', '.join(assumed)}"] if assumed else []
    top, tokens = law.levels[-1], math.exp(logs[-1])
    notes.append(
        f"extrapolated from the last two quantiles beyond {tokens:.0f} tokens (all but {1 - top:.2g} of responses)"
    )
    model = LengthModel(
        quantiles=tuple((level, math.exp(log)) for level, log in zip(law.levels, logs.tolist(), strict=True)),
        prompt_share=law.value("prompt_share"),
        max_response_tokens=round(law.value("cap")),
        notes=tuple(notes),
    )
    return model, found


def _check(given: Summaries) -> None:
    """Raise ConfigError for values that are impossible, alone or together."""

    def refuse(what: str) -> None:
        raise ConfigError(f"summaries {given}: {what}")

    quantiles = dict(sorted(given.quantiles.items()))
    for name, value in given.given().items():
        if name[1:].replace(".", "").isdigit() and not 0 < float(name[1:]) < 100:
            refuse(f"{name} has no percentage between 0 and 100")
        if name not in ("cut", "tail", "prompt_share") and value < 1:
            refuse(f"{name} must be at least 1")
    for name in ("cut", "tail"):
        if (share := getattr(given, name)) is not None and not 0 <= share < 1:
            refuse(f"{name} is a share, from 0 to below 1")
    if given.prompt_share is not None and not 0 <= given.prompt_share <= 1:
        refuse("prompt_share is a share, from 0 to 1")
    if sum(1 for name in given.given() if name not in (*_ABOUT, "cap")) < 2:
        refuse(f"two of quantiles, mean, max, cut and tail are needed; the keys are {KEYS}")
    for (low, less), (high, more) in pairwise(quantiles.items()):
        if less > more:
            refuse(f"p{low:g} is above p{high:g}")
    cap, cut = given.cap, given.cut or 0.0
    num = given.responses or DEFAULTS["responses"]
    if cut and cap is None:
        refuse("cut needs the cap")
    if given.tail is not None and num <= TAIL_REQUESTS:
        refuse(f"the tail is what runs with {TAIL_REQUESTS} requests or fewer, so responses must be more than that")
    lengths = {f"p{level:g}": tokens for level, tokens in quantiles.items()}
    lengths |= {name: value for name in ("mean", "max") if (value := getattr(given, name)) is not None}
    for name, tokens in lengths.items():
        if tokens > (cap or DEFAULTS["cap"]):
            refuse(f"{name} is above the cap" + ("" if cap else f" of {DEFAULTS['cap']:g} that is assumed; give cap"))
        if given.max is not None and tokens > given.max and (name == "mean" or float(name[1:]) < 100 * (1 - 2 / num)):
            refuse(f"{name} is above max")
    for level, tokens in quantiles.items():
        if cap is not None and cut and (tokens < 0.999 * cap) != (level / 100 < 1 - cut) and abs(tokens / cap - 1) > 0:
            refuse(f"p{level:g} and cut contradict each other: all but {cut:g} end below the cap")
    if given.mean is not None and quantiles:
        edges = [0.0, *(level / 100 for level in quantiles), 1.0]
        values = [0.0, *quantiles.values(), cap or math.inf]
        least = sum((b - a) * low for (a, b), low in zip(pairwise(edges), values[:-1], strict=True))
        most = sum((b - a) * high for (a, b), high in zip(pairwise(edges), values[1:], strict=True))
        if not least <= given.mean <= most:
            refuse(f"with these quantiles the mean is between {least:.0f} and {most:.0f}")


class _Law:
    """Log tokens at knots as the unknowns of a fit to summaries."""

    def __init__(self, given: Summaries):
        self._given = given
        self._log_cap = math.log(self.value("cap"))
        num, cut = self.value("responses"), given.cut or 0.0
        self._quantiles = {level / 100: math.log(tokens) for level, tokens in sorted(given.quantiles.items())}
        self._below = {p: y for p, y in self._quantiles.items() if given.cap is None or y < self._log_cap - 1e-9}
        levels = [*self._below, *([1 - cut] if cut else [])]
        if given.tail is not None:
            levels.append(1 - (TAIL_REQUESTS + 0.5) / num)
        if given.max is not None:
            levels.append(1 - 0.56 / num)
        if given.mean is not None and max(levels, default=0) < 0.97:
            levels.append(0.99)
        levels += [0.5] if len(levels) < 2 else []
        kept: list[float] = []
        for level in levels:
            far = all(abs(_NORMAL.inv_cdf(level) - _NORMAL.inv_cdf(other)) > _APART for other in kept)
            if (far or level in self._below) and (not cut or level <= 1 - cut):
                kept.append(level)
        self.levels = sorted(kept) if len(kept) > 1 else sorted({*kept, 0.5, 0.9})[:2]
        self._knots = np.array([_NORMAL.inv_cdf(level) for level in self.levels])
        self._mean = normal_weights(_SCORES)
        self._longest = self._weights_of_longest(num)
        self._after = _weights_of_rank(num, TAIL_REQUESTS + 1)

    def value(self, name: str) -> float:
        value = getattr(self._given, name)
        return DEFAULTS[name] if value is None else float(value)

    def start(self) -> Floats:
        known = self._below | ({1 - self._given.cut: self._log_cap} if self._given.cut else {})
        if len(known) < 2:
            middle = math.log(self._given.mean or math.exp(self._log_cap) / 8)
            known = {0.5: middle, 0.9: middle + 1} if not known else known | {0.5: min(*known.values(), middle)}
        scores = [_NORMAL.inv_cdf(level) for level in sorted(known)]
        logs = [known[level] for level in sorted(known)]
        slope = max((logs[-1] - logs[0]) / (scores[-1] - scores[0]), 0.1) if len(scores) > 1 else 1.0
        inside = np.interp(self._knots, scores, logs)
        off = np.maximum(self._knots - scores[-1], 0) + np.minimum(self._knots - scores[0], 0)
        beyond: Floats = inside + slope * off
        return beyond

    def misfit(self, unknowns: Floats) -> Floats:
        """Logarithms of found / given; faintly, how much the slope changes, which decides where nothing else does."""
        logs = np.cumsum(unknowns)
        off = [self._at(logs, p) - y for p, y in self._below.items()]
        off += [min(self._at(logs, p) - y, 0.0) for p, y in self._quantiles.items() if p not in self._below]
        if self._given.cut:
            off.append(self._at(logs, 1 - self._given.cut) - self._log_cap)
        elif self._given.cut is not None:
            off.append(max(self._at(logs, 1 - 1e-4) - self._log_cap, 0.0))
        for name, (given, found) in self._whole(logs).items():
            off.append(math.log((1 - found) / (1 - given)) if name == "tail" else math.log(found / given))
        slopes = np.diff(logs) / np.diff(self._knots)
        return np.array([*off, *(1e-4 * np.diff(slopes))])

    def found(self, logs: Floats) -> dict[str, tuple[float, float]]:
        """(given, found) of each summary by key."""
        tokens = {
            f"p{100 * p:g}": (math.exp(y), math.exp(min(self._at(logs, p), self._log_cap)))
            for p, y in self._quantiles.items()
        }
        if self._given.cut is not None:
            scores = np.linspace(-9.0, 9.0, 180_001)
            reached = int(np.searchsorted(self._line(logs, scores), self._log_cap - 1e-9))
            above = 1 - _NORMAL.cdf(float(scores[reached])) if reached < len(scores) else 0.0
            tokens["cut"] = (self._given.cut, above)
        return tokens | self._whole(logs)

    def _whole(self, logs: Floats) -> dict[str, tuple[float, float]]:
        lengths = np.exp(np.minimum(self._line(logs, _SCORES), self._log_cap))
        longest = float(self._longest @ lengths)
        found = {
            "mean": float(self._mean @ lengths), "max": longest, "tail": 1 - float(self._after @ lengths) / longest,
        }  # fmt: skip
        return {n: (given, value) for n, value in found.items() if (given := getattr(self._given, n)) is not None}

    def _at(self, logs: Floats, level: float) -> float:
        return float(self._line(logs, np.array([_NORMAL.inv_cdf(level)]))[0])

    def _line(self, logs: Floats, scores: Floats) -> Floats:
        return straight_through(self._knots, logs, scores)

    def _weights_of_longest(self, num: float) -> Floats:
        """Chances of the longest response's score; the responses of a prompt share a part of theirs."""
        from scipy.special import log_ndtr

        share, group = min(self.value("prompt_share"), 0.999), min(self.value("group"), num)
        prompts = np.linspace(-8.0, 8.0, 321)
        own = (_SCORES[:, None] - math.sqrt(share) * prompts) / math.sqrt(1 - share)
        within = np.exp(group * log_ndtr(own)) @ normal_weights(prompts)
        weights: Floats = np.diff(np.minimum(within, 1.0) ** (num / group), prepend=0.0)
        weights /= weights.sum()
        return weights


def _weights_of_rank(num: float, rank: int) -> Floats:
    """Chances of the score of the `rank`-th longest of `num` independent responses."""
    from scipy.special import log_ndtr

    if num <= rank:
        return np.where(np.arange(len(_SCORES)) == 0, 1.0, 0.0)
    logs = -(_SCORES**2) / 2 + (num - rank) * log_ndtr(_SCORES) + (rank - 1) * log_ndtr(-_SCORES)
    weights: Floats = np.exp(logs - logs.max())
    weights /= weights.sum()
    return weights
