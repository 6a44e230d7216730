"""Evidence for a prediction: distance to the nearest measurement, and errors on data left out of the fit."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, field_validator

from tltlab.config import FrozenModel
from tltlab.records import Json

Distance = Literal["measured together", "interpolated", "never measured"]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Span = tuple[NonNegativeFloat, NonNegativeFloat]
SPECULATING = ", speculating"
"""Ends the name of a fold whose errors are those of speed-ups of iterations, not of times."""
GOODPUT = ", goodput"
"""The same of speed-ups in tokens per second of whole runs, whose prompts and last responses gain nothing."""
LEVEL = 0.9
_TOGETHER = "together"


class CalibratedRange(FrozenModel):
    """Ranges that the data of a fit covered, each as (least, most); None where the range is unknown.

    `batch` requests, `verified_tokens` batch times tokens to verify, `context_tokens` the sum over the batch.
    """

    batch: Span | None = None
    verified_tokens: Span | None = None
    context_tokens: Span | None = None

    @field_validator("batch", "verified_tokens", "context_tokens")
    @classmethod
    def _in_order(cls, span: Span | None) -> Span | None:
        if span is not None and span[0] > span[1]:
            raise ValueError(f"a range is (least, most), got {span[0]:g} before {span[1]:g}")
        return span

    def outside(self, *, batch: float, verified_tokens: float, context_tokens: float) -> list[str]:
        """Names of the quantities that lie outside what was measured.

        >>> CalibratedRange(batch=(1, 64)).outside(batch=100, verified_tokens=100, context_tokens=0)
        ['batch']
        """
        quantities = {"batch": batch, "verified_tokens": verified_tokens, "context_tokens": context_tokens}
        spans = {name: getattr(self, name) for name in quantities}
        return [name for name, span in spans.items() if span and not span[0] <= quantities[name] <= span[1]]


class Evidence(FrozenModel):
    """Measurements behind costs, and errors of the costs where nothing was measured.

    `engine` names the measurements. `unmeasured` is what of GPU, model and weights' type they lack, or "together" where
    each was measured but not with the others; `drafting_unmeasured` is the same of speed-ups (None: as `unmeasured`),
    `speculation` whether there was any. Errors are factors less 1, each as (median, what nine in ten do not exceed): a
    prediction that is off by 0.25 is 1.25 times what was measured, or that is 1.25 times the prediction. `left_out` has
    them by what was left out of a fit ("model", "gpu" or parts of the data), `fitted` those of measurements with the
    same GPU, model and type. `parameter` is what nine in ten do not exceed for what the measurements leave open of the
    fit's parameters, by their posterior (Laplace). Names are "all" in the latter two; names that end in `SPECULATING`
    or `GOODPUT` are for speed-ups. `draft_depth` is the span of the nearest measurements.
    `other_engines` are profiles that would do as well, as nobody named the engine.
    """

    engine: str
    unmeasured: tuple[str, ...] = ()
    drafting_unmeasured: tuple[str, ...] | None = None
    speculation: bool = True
    left_out: dict[str, tuple[Error, Error]] = Field(default_factory=dict)
    fitted: dict[str, tuple[Error, Error]] = Field(default_factory=dict)
    parameter: dict[str, Error] = Field(default_factory=dict)
    draft_depth: tuple[float, float] | None = None
    other_engines: tuple[str, ...] = ()

    @property
    def distance(self) -> Distance:
        """The distance of plain decoding to the nearest measurement."""
        return self.distance_of()

    def distance_of(self, *, speculates: bool = False, beyond: Sequence[str] = ()) -> Distance:
        """The distance of a use, of which `beyond` lies outside the measurements: the farther one of its parts."""
        lacking = self._lacking(speculates=speculates)
        if {*lacking, *beyond} - {_TOGETHER}:
            return "never measured"
        return "interpolated" if lacking else "measured together"

    def error(self, *, speculates: bool = False, extrapolated: bool = False) -> float | None:
        """The error of an iteration's or a rollout's time that nine in ten predictions do not exceed.

        For parts measured together it is the error of those measurements. For other parts, or batches or drafts
        `extrapolated` beyond them, it is the error of leaving out the missing part; where all parts were measured
        separately, it is the geometric mean of both. Several errors, and what is open of the parameters, are added up
        as independent ones. None where no error is known.
        """
        plain = self._with_parameters("", extrapolated)
        if not speculates or plain is None:
            return plain
        speedup = self._with_parameters(SPECULATING, extrapolated)
        if speedup is None:
            return plain if self.speculation else None
        return _added(plain, speedup)

    def speedup_error(self, *, extrapolated: bool = False) -> float | None:
        """The same of a rollout's speed-up: what the plain and the speculative time have in common cancels."""
        known = any(name.endswith(GOODPUT) for name in self.left_out)
        return self._with_parameters(GOODPUT if known else SPECULATING, extrapolated)

    def interval(
        self, seconds: float, *, speculates: bool = False, extrapolated: bool = False
    ) -> tuple[float, float] | None:
        """Where the measured time lies with a probability of 90 %, were it measured; None where no error is known.

        >>> Evidence(engine="mine", left_out={"RL steps": (0.1, 0.25)}).interval(10.0)
        (8.0, 12.5)
        """
        return interval(seconds, self.error(speculates=speculates, extrapolated=extrapolated))

    def beyond(self, depths: Iterable[int], *, blocks: bool = False) -> list[str]:
        """Parts of a use beyond the nearest measurements: speculation at all, its depth, or drafts in `blocks`.

        No set of the fit has a block drafter.
        """
        drafting = [depth for depth in depths if depth]
        if not drafting:
            return []
        if not self.speculation:
            return ["speculation"]
        span = self.draft_depth
        deeper = span is not None and not all(span[0] <= depth <= span[1] for depth in drafting)
        return [*(["draft depth"] if deeper else []), *(["block drafts"] if blocks else [])]

    def describe(self, *, speculates: bool = False, beyond: Sequence[str] = ()) -> str:
        """In one line: the distance and the error to expect."""
        gaps = [name for name in self.unmeasured if name != _TOGETHER]
        gaps += [name.replace("_", " ") for name in beyond if name not in gaps]
        lacking = [name for name in self._lacking(speculates=speculates) if name != _TOGETHER and name not in gaps]
        if lacking and self.speculation:
            gaps.append(f"speculation with this {', '.join(lacking)}")
        error = self.error(speculates=speculates, extrapolated=bool(beyond))
        expect = "how far off is not known" if error is None else f"nine in ten are off by less than {error:.0%}"
        named = f" ({', '.join(gaps)})" if gaps else ""
        return f"{self.distance_of(speculates=speculates, beyond=beyond)} with {self.engine}{named}; {expect}"

    def to_json(self) -> Json:
        """The keys of `evidence` in the commands' JSON."""
        derived = {
            "distance": self.distance,
            "says": str(self),
            "error": self.error(),
            "speedup_error": self.speedup_error(),
        }
        return self.model_dump(mode="json") | derived

    def __str__(self) -> str:
        """In one line: the distance, the error to expect, then errors on what was left out of the fit."""
        errors = [f"{fold} {median:.1%} (90%: {most:.0%})" for fold, (median, most) in self.left_out.items()]
        tail = f"; median error on what was left out of its fit, by {', '.join(errors)}" if errors else ""
        return self.describe() + ("" if self.speculation else "; speculation was not measured with it") + tail

    def _lacking(self, *, speculates: bool) -> tuple[str, ...]:
        """Parts of a use that the measurements lack."""
        drafting = self.unmeasured if self.drafting_unmeasured is None else self.drafting_unmeasured
        return tuple(dict.fromkeys((*self.unmeasured, *(drafting if speculates else ()))))

    def _with_parameters(self, kind: str, extrapolated: bool) -> float | None:
        """Upper bound of nine in ten errors of times, or with SPECULATING or GOODPUT of speed-ups."""
        most = self._most(kind, extrapolated)
        return None if most is None else _added(most, self.parameter.get(f"all{kind}", 0.0))

    def _most(self, kind: str, extrapolated: bool) -> float | None:
        """The same of the errors that were met, in the fit or without what was left out of it."""
        if kind and not self.speculation and self.drafting_unmeasured is None:
            return None
        fitted = self.fitted.get(f"all{kind}")
        unmeasured = self.drafting_unmeasured if kind and self.drafting_unmeasured is not None else self.unmeasured
        errors = {
            name.removesuffix(kind): most
            for name, (_, most) in self.left_out.items()
            if (name.endswith(kind) if kind else not name.endswith((SPECULATING, GOODPUT)))
        }
        missing = [name for name in unmeasured if name != _TOGETHER]
        if not errors:
            return None if fitted is None or unmeasured or extrapolated else fitted[1]
        worst = max(errors.values())
        if missing or extrapolated:
            # A part without a left-out fit of its own takes the worst error of the others.
            return _added(*(errors.get(name, worst) for name in missing or [_TOGETHER]))
        if fitted is None:
            parts = [most for name, most in errors.items() if unmeasured or name not in ("model", "gpu")]
            return max(parts or errors.values())
        if unmeasured:
            return round(math.expm1(math.sqrt(math.log1p(fitted[1]) * math.log1p(worst))), 6)
        return fitted[1]


def interval(value: float, error: float | None) -> tuple[float, float] | None:
    """Where a value lies that a prediction `value` misses by at most the factor 1 + `error`; None without one."""
    return None if error is None else (value / (1.0 + error), value * (1.0 + error))


def _added(*errors: float) -> float:
    """Independent errors, as one: their logarithms add up in squares."""
    return round(math.expm1(math.hypot(*map(math.log1p, errors))), 6)
