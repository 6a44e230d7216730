"""Claims of papers about their systems, to compare with simulated results.

Baselines, models and workloads differ from paper to paper: a claim is shown with a figure of the same kind, not ranked.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

from pydantic import TypeAdapter

from tltlab.records import frozen

Of = Literal["RL step", "rollout", "tokens per second"]
"""Quantity of the speed-up: time of the whole RL step or of the rollout, or generated tokens per second."""


@frozen
class Claim:
    """Times as fast, from `least` to `most` over a paper's settings, against `baseline`.

    `responses_per_worker` and `cap` (tokens) are those of its workload, None where the paper does not state them.
    """

    system: str
    of: Of
    least: float
    most: float
    baseline: str
    setting: str
    source: str
    responses_per_worker: int | None = None
    cap: int | None = None

    def against(self, speed_up: float, low: float, high: float) -> str:
        """In a word where a speed-up with its interval lies: below, within or above the claim, or open.

        >>> CLAIMS["tlt"].against(1.2, 1.1, 1.3), CLAIMS["tlt"].against(1.6, 1.4, 1.8)
        ('below', 'open')
        """
        if self.least <= speed_up <= self.most:
            return "within"
        if low != low:
            return "below" if speed_up < self.least else "above"
        if high < self.least:
            return "below"
        return "above" if low > self.most else "open"


_ROWS = TypeAdapter(tuple[Claim, ...]).validate_json((files("tltlab.planning") / "claims.json").read_text("utf-8"))
CLAIMS: dict[str, Claim] = {claim.system: claim for claim in _ROWS}
"""By the name of the row in `tltlab.planning.systems.SYSTEMS`; systems that claim no speed-up have none."""


def difference(
    claim: Claim, speed_up: float, low: float, high: float, *, responses_per_worker: float, cap: int, of_same: bool
) -> str:
    """In a sentence how what is found differs from a claim, and what of the workload differs.

    `of_same`: whether the same kind of figure was found; without stage costs there is no RL step.

    >>> difference(CLAIMS["tlt"], 1.2, 1.1, 1.3, responses_per_worker=64, cap=32768, of_same=True)
    'below the claim of 1.7 to 2.1 x VeRL (RL step); 64 responses to a worker here, 256 there'
    """
    relation = {"within": "within", "below": "below", "above": "above", "open": "not distinguishable from"}
    verdict = relation[claim.against(speed_up, low, high)]
    span = f"{claim.least:g}" if claim.least == claim.most else f"{claim.least:g} to {claim.most:g}"
    parts = [f"{verdict} the claim of {span} x {claim.baseline} ({claim.of})"]
    if not of_same:
        parts.append(f"here the rollout's, as stage costs were not given: no {claim.of} is known")
    if claim.responses_per_worker is not None and abs(responses_per_worker / claim.responses_per_worker - 1.0) > 0.1:
        parts.append(f"{responses_per_worker:.0f} responses to a worker here, {claim.responses_per_worker} there")
    if claim.cap is not None and claim.cap != cap:
        parts.append(f"a cap of {cap} tokens here, {claim.cap} there")
    return "; ".join(parts)
