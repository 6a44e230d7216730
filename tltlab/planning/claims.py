"""Claims of papers about their systems, to compare with simulated results.

Baselines, models and workloads differ from paper to paper: a claim is shown with a figure of the same kind, not ranked.
"""

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


_ROWS = TypeAdapter(tuple[Claim, ...]).validate_json((files("tltlab.planning") / "claims.json").read_text("utf-8"))
CLAIMS: dict[str, Claim] = {claim.system: claim for claim in _ROWS}
"""By the name of the row in `tltlab.planning.systems.SYSTEMS`; systems that claim no speed-up have none."""
