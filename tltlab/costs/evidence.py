"""What speaks for a prediction: how near it is to a measurement, and errors on what was left out of its fit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tltlab.config import FrozenModel


class Evidence(FrozenModel):
    """What speaks for a prediction: the errors of its profile on what was left out of the fit, and how near that is.

    `unmeasured` names what of GPU, model and weights' type the engine was never measured with, or "together" where each
    was measured but not with the others; `speculation` is whether it was measured speculating. `left_out` is by
    what was left out: absolute relative errors, their median and what nine in ten do not exceed.
    """

    engine: str
    unmeasured: tuple[str, ...] = ()
    speculation: bool = True
    left_out: dict[str, tuple[float, float]] = Field(default_factory=dict)

    @property
    def distance(self) -> Literal["measured together", "interpolated", "never measured"]:
        if not self.unmeasured:
            return "measured together"
        return "interpolated" if self.unmeasured == ("together",) else "never measured"

    def __str__(self) -> str:
        """In one line: the distance, then errors on what was left out of the fit."""
        missing = [] if self.unmeasured == ("together",) else [*self.unmeasured]
        missing += [] if self.speculation else ["speculation"]
        what = f" ({', '.join(missing)})" if missing else ""
        errors = [f"{fold} {median:.1%} (90%: {most:.0%})" for fold, (median, most) in self.left_out.items()]
        tail = f"; median error on what was left out of its fit, by {', '.join(errors)}" if errors else ""
        return f"{self.distance} with {self.engine}{what}{tail}"
