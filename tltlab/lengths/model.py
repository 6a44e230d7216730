"""How long responses are: quantiles of length, the prompt's share in them, the cap, and drift over RL steps."""

import math
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, field_validator

from tltlab.arrays import Floats
from tltlab.config import FrozenModel, Share, StoredModel, faults_in
from tltlab.errors import ConfigError
from tltlab.files import read_json

Growth = Annotated[float, Field(gt=-1, allow_inf_nan=False)]

_NORMAL = NormalDist()
_SCORES = np.linspace(-12.0, 12.0, 6001)


class ParetoTail(FrozenModel):
    """Lengths beyond a threshold: their excess in tokens is generalised Pareto (Pickands 1975; Coles 2001, chapter 4),

        P(excess > x) = (1 + shape x / scale)^(-1 / shape),        exp(-x / scale) at shape 0.

    `shape_error` is the standard error of the shape, None where it was not estimated. Beyond a higher threshold, `by`
    tokens up, the excess has the same shape and the scale `scale + shape * by`. With `most` no excess is larger (the
    law is that of those below), and the tail is a family: each RL step has a shape `drawn` from what is known of it.

    >>> tail = ParetoTail(scale=1000.0, shape=0.25)
    >>> round(float(tail.excess(np.array([math.log(100)]))[0]))
    8649
    """

    scale: float = Field(gt=0, allow_inf_nan=False)
    shape: float = Field(gt=-1, lt=1)
    shape_error: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    most: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    def excess(self, rarity: Floats) -> Floats:
        """Excess in tokens that a share e^-rarity of those beyond the threshold exceed."""
        # The limit at 0 is reached before that.
        shape = self.shape if abs(self.shape) > 1e-9 else 1e-9
        if self.most is not None:
            beyond = max(1 + shape * self.most / self.scale, 0.0) ** (-1 / shape)
            rarity = -np.log(beyond + (1 - beyond) * np.exp(-rarity))
        return np.asarray(self.scale / shape * np.expm1(shape * rarity), np.float64)


class LengthModel(StoredModel):
    """Response lengths of RL rollouts: any marginal, a Gaussian copula for what samples of a prompt share.

    The response to a prompt with score u (standard normal, of the prompt in its epoch) has the score
    z = sqrt(prompt_share) u + sqrt(1 - prompt_share) e, e standard normal, and in RL step t, counted from 0, the length

        log L = m + t log(1 + median_growth) + h(z),   h(z) = (q(z) - m) * ((1 + tail_growth)^t where z > 0, else 1)

    with m = q(0); q is log length against z, through `quantiles` (pairs of probability and tokens) and straight between
    and beyond them, so two quantiles are a log-normal and a steeper end is a heavier tail. Beyond the last one a `tail`
    takes over where there is one: a rollout ends with its few longest responses, and a line through two quantiles
    invents them. L is rounded, at least 1, and cut at `max_response_tokens`. `prompt_share` is the intraclass
    correlation of z; before the cut and for a log-normal also that of log L. From one epoch to the next a prompt's u
    keeps the correlation `prompt_memory`. Prompts have log-normal lengths; `prompt_length_correlation` is the
    correlation of their log with u. `notes` name the sources of the values.

    >>> model = LengthModel(quantiles=((0.5, 800), (0.9, 3200)), prompt_share=0.9, max_response_tokens=16384)
    >>> round(model.quantile(0.5)), round(model.quantile(0.99)), round(model.cap_mass(), 4)
    (800, 9908, 0.0026)
    """

    format: Literal["tltlab-lengths"] = "tltlab-lengths"
    version: Literal[1] = 1
    quantiles: tuple[tuple[float, float], ...] = Field(min_length=2)
    tail: ParetoTail | None = None
    prompt_share: Share
    max_response_tokens: int = Field(ge=1, lt=2**31)
    median_growth: Growth = 0.0
    tail_growth: Growth = 0.0
    prompt_memory: Share = 0.9
    prompt_tokens_median: float = Field(default=128.0, ge=0, lt=2**31)
    prompt_tokens_sigma: float = Field(default=0.0, ge=0, le=5)
    prompt_length_correlation: float = Field(default=0.0, ge=-1, le=1)
    notes: tuple[str, ...] = ()

    @field_validator("quantiles")
    @classmethod
    def _rising(cls, quantiles: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        levels, tokens = np.asarray(quantiles, float).T
        if not ((levels > 0) & (levels < 1)).all() or not (np.diff(levels) > 0).all():
            raise ValueError("probabilities must rise and lie between 0 and 1")
        if not (np.isfinite(tokens) & (tokens > 0)).all() or not (np.diff(tokens) >= 0).all():
            raise ValueError("tokens must be above 0 and not fall")
        return quantiles

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the JSON file that `write` makes. Raises ConfigError."""
        value = read_json(Path(path))
        if not isinstance(value, dict) or value.get("format") != "tltlab-lengths":
            raise ConfigError(f"{path} is not a model of lengths: it has no format 'tltlab-lengths'")
        value.pop("step_scores", None)  # Of earlier versions.
        return cls._checked(value, str(path))

    def with_changes(
        self, *, median: float | None = None, sigma: float | None = None, **fields: float | int | None
    ) -> Self:
        """The same model with other fields; None leaves one as it is. Raises ConfigError.

        `sigma` replaces quantiles and tail by a log-normal of the same median, `median` scales all of them.
        """
        if median is not None and not 0 < median < math.inf:
            raise ConfigError(f"median is {median}, it must be above 0")
        if sigma is not None and not 0 <= sigma <= 20:
            raise ConfigError(f"sigma is {sigma}, it must be from 0 to 20")
        new = self.model_dump() | {name: value for name, value in fields.items() if value is not None}
        middle = self.quantile(0.5)
        if sigma is not None:
            new["quantiles"] = tuple((p, middle * math.exp(sigma * _NORMAL.inv_cdf(p))) for p in (0.5, 0.9))
            new["tail"] = None
        if median is not None:
            new["quantiles"] = tuple((p, tokens * median / middle) for p, tokens in new["quantiles"])
            for name in ("scale", "most"):
                if new["tail"] and new["tail"][name] is not None:
                    new["tail"][name] *= median / middle
        return self._checked(new, "lengths")

    def drawn(self, rng: np.random.Generator) -> Self:
        """The same model with one of its family of tails."""
        tail = self.tail
        if tail is None or tail.most is None or tail.shape_error is None:
            return self
        shape = np.clip(rng.normal(tail.shape, tail.shape_error), -0.5, 0.95)
        return self.model_copy(update={"tail": tail.model_copy(update={"shape": float(shape)})})

    def log_tokens(self, scores: Floats, rl_step: int = 0) -> Floats:
        """Log length, neither rounded nor cut, at standard normal scores."""
        middle = self._straight(np.zeros(1))[0]
        above: Floats = self._straight(scores) - middle
        if self.tail_growth:
            above = np.where(above > 0, above * (1 + self.tail_growth) ** rl_step, above)
        moved: Floats = middle + rl_step * math.log1p(self.median_growth) + above
        return moved

    def quantile(self, probability: float, rl_step: int = 0) -> float:
        """Length in tokens before the cut that a share `probability` of the responses does not exceed."""
        log_tokens = float(self.log_tokens(np.array([_NORMAL.inv_cdf(probability)]), rl_step)[0])
        return math.exp(log_tokens) if log_tokens < 700 else math.inf

    def cap_mass(self, rl_step: int = 0) -> float:
        """Share of the responses that are cut in an RL step."""
        return float(
            normal_weights(_SCORES) @ (self.log_tokens(_SCORES, rl_step) >= math.log(self.max_response_tokens))
        )

    @classmethod
    def _checked(cls, value: object, origin: str) -> Self:
        with faults_in(origin):
            return cls.model_validate(value)

    @cached_property
    def _knots(self) -> tuple[Floats, Floats]:
        """Scores and log tokens."""
        scores = np.array([_NORMAL.inv_cdf(level) for level, _ in self.quantiles])
        return scores, np.log([tokens for _, tokens in self.quantiles])

    def _straight(self, scores: Floats) -> Floats:
        knots, logs = self._knots
        straight = straight_through(knots, logs, scores)
        if self.tail is not None and len(beyond := np.flatnonzero(scores > knots[-1])):
            # Only the logarithm of the normal's upper tail keeps its digits that far out.
            rarity = _log_beyond(float(knots[-1])) - np.array([_log_beyond(z) for z in scores[beyond].tolist()])
            straight[beyond] = np.log(math.exp(logs[-1]) + self.tail.excess(rarity))
        return straight


def normal_weights(scores: Floats) -> Floats:
    """Weights of evenly spaced scores in means over a standard normal."""
    density = np.exp(-(scores**2) / 2)
    return np.asarray(density / density.sum(), np.float64)


def straight_through(knots: Floats, logs: Floats, scores: Floats) -> Floats:
    """Values at `scores` of the straight pieces between knots, the first and the last of which go on beyond them."""
    slopes = np.diff(logs) / np.diff(knots)
    piece = np.clip(np.searchsorted(knots, scores) - 1, 0, len(slopes) - 1)
    return np.asarray(logs[piece] + slopes[piece] * (scores - knots[piece]), np.float64)


def _log_beyond(score: float) -> float:
    """Logarithm of the chance that a standard normal exceeds `score`."""
    return math.log(math.erfc(score / math.sqrt(2)) / 2)


REGIMES = {
    name: LengthModel.model_validate_json((files("tltlab.lengths") / "regimes" / f"{name}.json").read_text("utf-8"))
    for name in ("base-rl", "reasoning", "production", "long-tail")
}
"""Models of lengths by name: a base model early in RL, where the prompt does not decide length; reasoning models, where
it does; a reasoning model in production; and what is published of TLT's rollouts, whose longest responses reach the cap
while three in four stay far below. Drift is 0: no public rollouts span enough RL steps to fit it."""


def of_regime(regime: str) -> LengthModel:
    """Return a regime of REGIMES by name. Raises ConfigError."""
    if regime not in REGIMES:
        raise ConfigError(f"no regime {regime!r}; there are: {', '.join(sorted(REGIMES))}")
    return REGIMES[regime]
