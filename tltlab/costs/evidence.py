"""What speaks for a prediction: how near it is to a measurement, and errors on what was left out of its fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from tltlab.config import FrozenModel

Distance = Literal["measured together", "interpolated", "never measured"]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SPECULATING = ", speculating"
"""Ends the name of a fold whose errors are those of speed-ups, not of times."""
LEVEL = 0.9
_MOST_OVER = 0.75
"""Errors are those of predictions relative to what was measured: nothing is believed to take more than 4 times."""
_TOGETHER = "together"


class Evidence(FrozenModel):
    """What costs were measured with, and how far off they are where they were not.

    `engine` names the measurements. `unmeasured` is what of GPU, model and weights' type they lack, or "together" where
    each was measured but not with the others; `speculation` is whether there was any. Errors are absolute and relative,
    each as (median, what nine in ten do not exceed): `left_out` by what was left out of a fit ("model", "gpu", "engine"
    or parts of the data), `fitted` of the very measurements that are asked for. `parameter` is what nine in ten do not
    exceed for what the measurements leave open of the fit's parameters, by their posterior (Laplace): few may be met by
    luck. Names are "all" in the latter two; those that end in ", speculating" are of speed-ups. `draft_depth` is the
    span of the nearest measurements.
    """

    engine: str
    unmeasured: tuple[str, ...] = ()
    speculation: bool = True
    left_out: dict[str, tuple[Error, Error]] = Field(default_factory=dict)
    fitted: dict[str, tuple[Error, Error]] = Field(default_factory=dict)
    parameter: dict[str, Error] = Field(default_factory=dict)
    draft_depth: tuple[float, float] | None = None

    @property
    def distance(self) -> Distance:
        if not self.unmeasured:
            return "measured together"
        return "interpolated" if self.unmeasured == (_TOGETHER,) else "never measured"

    def error(self, *, speculates: bool = False, extrapolated: bool = False) -> float | None:
        """The relative error of an iteration's or a rollout's time that nine in ten predictions do not exceed.

        Of what was measured together it is the error of those measurements; of what was not, or where batches or drafts
        are `extrapolated` beyond them, that of leaving out what is missing; several such, and what is open of the
        parameters, are added up as independent ones. None where no error is known.
        """
        plain = self._with_parameters("", extrapolated)
        if not speculates or plain is None:
            return plain
        speedup = self.speedup_error(extrapolated=extrapolated)
        if speedup is None:
            return plain if self.speculation else None
        return math.hypot(plain, speedup)

    def speedup_error(self, *, extrapolated: bool = False) -> float | None:
        """The same of a speed-up: what the plain and the speculative time have in common cancels."""
        return self._with_parameters(SPECULATING, extrapolated)

    def interval(
        self, seconds: float, *, speculates: bool = False, extrapolated: bool = False
    ) -> tuple[float, float] | None:
        """Where the measured time lies with a probability of 90 %, were it measured; None where no error is known.

        >>> Evidence(engine="mine", left_out={"RL steps": (0.1, 0.25)}).interval(10.0)
        (8.0, 13.333333333333334)
        """
        return interval(seconds, self.error(speculates=speculates, extrapolated=extrapolated))

    def beyond(self, depths: Iterable[int]) -> list[str]:
        """What of a use lies beyond the nearest measurements: speculation at all, or its depth."""
        drafting = [depth for depth in depths if depth]
        if not drafting:
            return []
        if not self.speculation:
            return ["speculation"]
        span = self.draft_depth
        return ["draft depth"] if span and not all(span[0] <= depth <= span[1] for depth in drafting) else []

    def says(self, *, speculates: bool = False, beyond: Iterable[str] = ()) -> str:
        """In one line: the distance and the error to expect."""
        missing = [name for name in self.unmeasured if name != _TOGETHER]
        missing += [name.replace("_", " ") for name in beyond if name not in missing]
        distance = "never measured" if missing else self.distance
        gaps = f" ({', '.join(missing)})" if missing else ""
        error = self.error(speculates=speculates, extrapolated=bool(missing))
        expect = "how far off is not known" if error is None else f"nine in ten are off by less than {error:.0%}"
        return f"{distance} with {self.engine}{gaps}; {expect}"

    def to_json(self) -> dict[str, Any]:
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
        return self.says() + ("" if self.speculation else "; speculation was not measured with it") + tail

    def _with_parameters(self, kind: str, extrapolated: bool) -> float | None:
        """What nine in ten errors of times, or with SPECULATING of speed-ups, do not exceed."""
        most = self._most(kind, extrapolated)
        return None if most is None else round(math.hypot(most, self.parameter.get(f"all{kind}", 0.0)), 6)

    def _most(self, kind: str, extrapolated: bool) -> float | None:
        """The same of the errors that were met, in the fit or without what was left out of it."""
        fitted = self.fitted.get(f"all{kind}")
        unmeasured = self.unmeasured or ((_TOGETHER,) if extrapolated else ())
        if fitted is not None and not unmeasured:
            return fitted[1]
        errors = {
            name.removesuffix(SPECULATING): most
            for name, (_, most) in self.left_out.items()
            if name.endswith(SPECULATING) == bool(kind)
        }
        engine = errors.pop("engine", None)
        if kind and not self.speculation:
            # Only other engines speak for it.
            return engine
        if not errors:
            return None
        if not unmeasured:
            parts = [most for name, most in errors.items() if name not in ("model", "gpu")]
            return max(parts or errors.values())
        # The type of weights, and combinations, were left out by no fit of their own: the worst stands for them.
        return math.hypot(*(errors.get(name, max(errors.values())) for name in unmeasured))


def interval(value: float, error: float | None) -> tuple[float, float] | None:
    """Where a value lies that a prediction `value` misses by at most the relative `error`; None without one."""
    return None if error is None else (value / (1.0 + error), value / (1.0 - min(error, _MOST_OVER)))
