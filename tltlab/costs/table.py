"""A measured table as cost model: a few knots, and the roofline's shape between and beyond them; and its fits.

A table is fitted to a grid of measured iterations, or to a recorded trace. A piecewise linear curve that never falls is
its first value plus ramps, one between each two knots, with coefficients that are not negative. So is a sum of such
curves: isotonic smoothing and regression at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from tltlab.arrays import Floats
from tltlab.config import FrozenModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.hardware import Positive, gpu, model
from tltlab.records import Json, frozen
from tltlab.strategy import Strategy

from .base import CostModel, DraftingIteration, Seconds, padded
from .evidence import CalibratedRange
from .linear import measured_drafting
from .roofline import Hardware, rounded_max
from .samples import Iterations, non_negative

LEAST_S = 1e-9
DIP = 0.05
"""How far a knot may lie below the one before it, as a share of that: noise, lifted to it. More is an error."""
KNEE = 4.0
"""Power of `IdealForward`'s rounded maximum: at most 19 % above the larger of both, where they are equal."""


class TokenKnot(FrozenModel):
    """Work that depends on the tokens in the batch (matrix products, all-reduces) takes `seconds` at `tokens`."""

    tokens: Positive
    seconds: Positive


class AttentionKnot(FrozenModel):
    """Attention of `batch` requests takes fixed_s + per_context_s * (sum of their contexts)."""

    batch: PositiveInt
    fixed_s: Seconds = 0.0
    per_context_s: Seconds = 0.0


@frozen
class IdealForward:
    """Seconds of a perfect forward: reading the weights, or computing, whichever takes longer, with a rounded knee.

    The fourth power rounds it as matrix products do. Predicting the time at 256 tokens from those at 64 and 1,024 over
    measured H100 kernels errs 9 % (median); with the sharp maximum 10 %, with plain interpolation of times 21 %.
    """

    memory_s: float
    compute_s: float

    @classmethod
    def of(cls, hardware: Hardware) -> IdealForward:
        device, weights = gpu(hardware.gpu), model(hardware.model).weight_params
        return cls(
            memory_s=2 * weights / (hardware.tp * device.hbm_bytes_per_s),
            compute_s=2 * weights / (hardware.tp * device.peak_flops),
        )

    def at(self, tokens: float) -> float:
        return rounded_max(self.memory_s, self.compute_s * tokens, KNEE)


class TableCosts(CostModel):
    """Measured seconds at knots. b requests, v tokens to verify each, contexts summing to S, draft depth d take

        forward(b*v) + fixed(b) + per_context(b)*S + base_s + per_request_s*b
          + [if drafting]              sd_base_s + d*(draft_level_s + draft_level_per_request_s*b)
          + [a drafter loaded, d = 0]  sd_idle_s

    `forward` is through the knots of that name. With a `roofline` the utilisation, ideal time over measured, is
    interpolated in the logarithm of the tokens and stays constant beyond the knots, so that what was not measured still
    bends where the hardware does (AIConfigurator, arXiv 2601.06288). Without, it is piecewise linear, constant
    below the knots, and beyond them continues with the slope of the last doubling. `attention` gives `fixed` and,
    linear in b between the knots, the seconds that a token of context in every request takes, per_context(b)*b.

    With `network_levels` the levels are those of a drafter with weights, and model-free ones pay `sd_base_s` alone. A
    block drafter counts as one level.

    So times grow with v, S and d, and with b at the same context per request. A knot that falls by no more than `DIP`
    is noise and lifted to the one before; more is refused. `calibrated` is the span of the knots where not given.
    """

    kind: Literal["table"] = "table"
    forward: Annotated[tuple[TokenKnot, ...], Field(min_length=1)]
    attention: Annotated[tuple[AttentionKnot, ...], Field(min_length=1)]
    roofline: Hardware | None = None
    base_s: Seconds = 0.0
    per_request_s: Seconds = 0.0
    sd_base_s: Seconds | None = None
    sd_idle_s: Seconds | None = None
    draft_level_s: Seconds | None = None
    draft_level_per_request_s: Seconds | None = None
    network_levels: bool = False
    prefill_per_token_s: Seconds | None = None

    @field_validator("forward")
    @classmethod
    def _growing_forward(cls, knots: tuple[TokenKnot, ...]) -> tuple[TokenKnot, ...]:
        seconds = _running_maximum("tokens", [k.tokens for k in knots], "seconds", [k.seconds for k in knots])
        return tuple(k.model_copy(update={"seconds": s}) for k, s in zip(knots, seconds, strict=True))

    @field_validator("attention")
    @classmethod
    def _growing_attention(cls, knots: tuple[AttentionKnot, ...]) -> tuple[AttentionKnot, ...]:
        batch = [float(k.batch) for k in knots]
        per_request = [k.batch * k.per_context_s for k in knots]
        fixed = _running_maximum("batch", batch, "fixed_s", [k.fixed_s for k in knots])
        monotone = _running_maximum("batch", batch, "batch * per_context_s", per_request)
        grown = []
        for knot, fixed_s, before, after in zip(knots, fixed, per_request, monotone, strict=True):
            slope = knot.per_context_s if after == before else after / knot.batch
            grown.append(AttentionKnot(batch=knot.batch, fixed_s=fixed_s, per_context_s=slope))
        return tuple(grown)

    @model_validator(mode="after")
    def _covers_its_knots(self) -> TableCosts:
        if self.calibrated is None:
            span = CalibratedRange(
                batch=(self.attention[0].batch, self.attention[-1].batch),
                verified_tokens=(self.forward[0].tokens, self.forward[-1].tokens),
            )
            object.__setattr__(self, "calibrated", span)  # The model is frozen, and not yet in anyone's hands.
        return self

    @property
    def tensor_parallel(self) -> int:
        return self.roofline.tp if self.roofline else 1

    def iteration(
        self,
        strategy: Strategy,
        *,
        tokens_to_verify: float | None = None,
        drafter_loaded: bool = False,
        drafters: Drafters = STANDARD,
    ) -> TableIteration:
        passes = drafters.network_passes(strategy) if self.network_levels else drafters.passes(strategy)
        draft_fixed = draft_per_request = 0.0
        fixed = self.base_s + self.once_s(strategy, drafter_loaded)
        if passes:
            draft_fixed = passes * self.need("draft_level_s")
            draft_per_request = passes * self.need("draft_level_per_request_s")
        return TableIteration(
            fixed_s=fixed,
            per_request_s=self.per_request_s,
            forward=self._forward(),
            attention_fixed=_line([k.batch for k in self.attention], [k.fixed_s for k in self.attention]),
            attention_context=Polyline(
                xs=(0.0, *(float(k.batch) for k in self.attention)),
                ys=(0.0, *(k.batch * k.per_context_s for k in self.attention)),
                beyond=self.attention[-1].per_context_s,
            ),
            draft_fixed_s=draft_fixed,
            draft_per_request_s=draft_per_request,
            tokens_to_verify=float(strategy.tokens_to_verify) if tokens_to_verify is None else tokens_to_verify,
            graph_sizes=self.graph_sizes or (),
        )

    def prefill_s(self, tokens: float) -> float:
        return self.need("prefill_per_token_s") * tokens

    def _forward(self) -> Curve:
        tokens, seconds = [k.tokens for k in self.forward], [k.seconds for k in self.forward]
        if self.roofline is None:
            return _line(tokens, seconds)
        ideal = IdealForward.of(self.roofline)
        excess = tuple(math.log(s / ideal.at(m)) for m, s in zip(tokens, seconds, strict=True))
        return Utilisation(xs=tuple(tokens), ys=tuple(seconds), excess=excess, ideal=ideal)


@frozen
class Polyline:
    """Piecewise linear through (xs, ys): constant below, of slope `beyond` above."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    beyond: float

    def at(self, x: float) -> float:
        i = bisect_right(self.xs, x)
        if i == 0:
            return self.ys[0]
        if i == len(self.xs):
            return self.ys[-1] + self.beyond * (x - self.xs[-1])
        share = (x - self.xs[i - 1]) / (self.xs[i] - self.xs[i - 1])
        return self.ys[i - 1] + share * (self.ys[i] - self.ys[i - 1])


@frozen
class Utilisation:
    """Through (xs, ys), with the logarithm of measured over ideal time, `excess`, linear in the logarithm of x."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    excess: tuple[float, ...]
    ideal: IdealForward

    def at(self, x: float) -> float:
        i = bisect_right(self.xs, x)
        if i in (0, len(self.xs)):
            return self.ideal.at(x) * math.exp(self.excess[min(i, len(self.xs) - 1)])
        share = math.log(x / self.xs[i - 1]) / math.log(self.xs[i] / self.xs[i - 1])
        seconds = self.ideal.at(x) * math.exp((1 - share) * self.excess[i - 1] + share * self.excess[i])
        # Where utilisation rises towards a knot before the ridge the product would dip; bounded it never falls.
        return min(max(seconds, self.ys[i - 1]), self.ys[i])


Curve = Polyline | Utilisation
"""Seconds as a function of tokens or requests."""


@frozen
class TableIteration(DraftingIteration):
    """Seconds of one iteration under one strategy, read from the table."""

    fixed_s: float
    per_request_s: float
    forward: Curve
    attention_fixed: Curve
    attention_context: Curve

    def added_s(self, batch: int, prompt_tokens: float, apart_s: float) -> float:
        """By the forward's curve where a roofline shapes it: a line through knots does not extrapolate so far."""
        if not isinstance(self.forward, Utilisation):
            return apart_s
        tokens = padded(batch * self.tokens_to_verify, self.graph_sizes)
        alone_s = self.forward.at(tokens)
        return min(max(self.forward.at(tokens + prompt_tokens), apart_s) - alone_s, apart_s)

    def without_context_s(self, batch: int) -> float:
        forward = self.forward.at(padded(batch * self.tokens_to_verify, self.graph_sizes))
        return (
            self.fixed_s + self.per_request_s * batch + forward + self.attention_fixed.at(batch) + self.draft_s(batch)
        )

    def context_slope_s(self, batch: int) -> float:
        return self.attention_context.at(batch) / batch


def _line(xs: list[float] | list[int], ys: list[float]) -> Polyline:
    """Through the knots, then with the slope of the last doubling: the slope of the last knots alone would be noise."""
    line = Polyline(xs=tuple(float(x) for x in xs), ys=tuple(ys), beyond=0.0)
    half = max(xs[0], xs[-1] / 2)
    slope = (ys[-1] - line.at(half)) / (xs[-1] - half) if len(xs) > 1 else 0.0
    return Polyline(xs=line.xs, ys=line.ys, beyond=slope)


def _running_maximum(axis: str, at: list[float], name: str, values: list[float]) -> list[float]:
    """The running maximum of `values`; a ValueError that names the knot where they fall by more than noise."""
    for before, after in pairwise(at):
        if not after > before:
            raise ValueError(f"knot {axis} = {after:g} after {before:g}: give knots in ascending order, each once")
    highest = 0.0
    monotone = []
    for x, value in zip(at, values, strict=True):
        if value < (1.0 - DIP) * highest:
            raise ValueError(
                f"knot {axis} = {x:g}: {name} falls to {value:.4g} from {highest:.4g} at a smaller {axis}, "
                f"more than noise ({DIP:.0%}); measure it again or leave the knot out"
            )
        # Equal up to rounding is equal: a table that was lifted reads back as it was written.
        monotone.append(value if value >= (1.0 - 1e-12) * highest else highest)
        highest = max(highest, value)
    return monotone


def fit(rows: Iterations, hardware: Hardware | None = None) -> TableCosts:
    """A table of measured iterations, to which a roofline may give its shape between the knots.

    Iterations that prefilled nothing have one non-negative least-squares fit of relative errors, in which times can
    only grow with tokens, with batch and with context: noise that falls is smoothed. Drafting is a base and a time per
    level, so depths between those that were measured are interpolated. Prefill is the median over the rows that have it
    of the seconds that the rest of the iteration leaves. Raises ConfigError for a single context per batch, which shows
    nothing of attention.
    """
    decoding, prefilled = rows.where(rows.prefill == 0), rows.where(rows.prefill > 0)
    costs = _decoding(decoding, hardware)
    if len(prefilled):
        rest_s = costs.predict(replace(prefilled, prefill=np.zeros(len(prefilled))))
        each_s = max(float(np.median((prefilled.seconds - rest_s) / prefilled.prefill)), 0.0)
        update: Json = {"prefill_per_token_s": each_s}
    else:
        update = {"notes": (*costs.notes, "no iteration prefilled: prefill_per_token_s is null")}
    return costs.model_copy(update=update)


def _decoding(rows: Iterations, hardware: Hardware | None) -> TableCosts:
    if not len(rows):
        raise ConfigError("there are no measured iterations to make a table of")
    batch, tokens, context = rows.batch, rows.verified, rows.context
    if np.unique(np.unique(np.stack([batch, context]), axis=1)[0], return_counts=True)[1].max() < 2:
        raise ConfigError("measured iterations have one context_tokens per batch: measure each at two or more")
    forward_at, batch_at = np.unique(tokens), np.unique(batch)
    context_at = np.concatenate([[0.0], batch_at])
    columns = {"forward": np.ones_like(tokens)} | _ramps("forward", tokens, forward_at)
    # Seconds per token of context in every request grow with the requests; the context is the sum over these.
    columns |= {name: ramp * context / batch for name, ramp in _ramps("context", batch, context_at).items()}
    columns |= _ramps("fixed", batch, batch_at)
    notes: list[str] = []
    drafts, bends = bool(rows.spec.any()), list[dict[str, float]]()
    if drafts:
        columns |= {"sd_base_s": rows.spec.astype(np.float64)}
        columns |= {"draft_level_s": rows.next_depth, "draft_level_per_request_s": rows.next_depth * batch}
        # Every batch and depth has different tokens: a curve through all of them would leave no time for drafting.
        # Among the curves that fit the measurements, the straightest is taken: that with knots near the lines through
        # their neighbours, in shares of the median seconds of the rows there.
        for low, middle, high in zip(forward_at, forward_at[1:], forward_at[2:], strict=False):
            share = (middle - low) / (high - low)
            typical_s = float(np.median(rows.seconds[tokens == middle]))
            bends.append({f"forward {middle:g}": (1 - share) / typical_s, f"forward {high:g}": -share / typical_s})
    coefficients = non_negative(columns, rows.seconds, small=bends)
    terms: Json = dict(measured_drafting(coefficients, notes)) if drafts else {}
    slopes = _values_at(coefficients, "context", context_at)[1:] / batch_at
    seconds = np.maximum(_values_at(coefficients, "forward", forward_at), LEAST_S)
    fixed = _values_at(coefficients, "fixed", batch_at)
    return TableCosts(
        forward=tuple(TokenKnot(tokens=float(m), seconds=float(s)) for m, s in zip(forward_at, seconds, strict=True)),
        attention=tuple(
            AttentionKnot(batch=int(b), fixed_s=float(f), per_context_s=float(s))
            for b, f, s in zip(batch_at, fixed, slopes, strict=True)
        ),
        calibrated=rows.covered,
        notes=tuple(notes),
        roofline=hardware,
        **terms,
    )


def _ramps(name: str, x: Floats, knots: Floats) -> dict[str, Floats]:
    return {f"{name} {high:g}": np.clip((x - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)}


def _values_at(coefficients: dict[str, float | None], name: str, knots: Floats) -> Floats:
    """The curve's values at the knots: sums of its ramps up to there."""
    return np.cumsum([coefficients.get(name) or 0.0, *(coefficients.get(f"{name} {x:g}") or 0.0 for x in knots[1:])])
