"""Fits acceptance that grows with finished siblings to drafts."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tltlab.acceptance.by_request import SiblingAcceptance
from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.traces.schema import KEY

CELL_TOKENS = 16
"""Drafts that begin within so many tokens of each other are counted together."""
MIN_DRAFTS = 32


def _check(drafts: pd.DataFrame) -> None:
    wrong = drafts[(drafts["accepted"] < 0) | (drafts["accepted"] > drafts["reach"])]
    if len(wrong):
        row = wrong.iloc[0]
        raise ConfigError(
            f"drafts: accepted {row['accepted']} of response {tuple(row[list(KEY)])} is outside [0, {row['reach']}]"
        )


def fit_siblings(drafts: pd.DataFrame, drafter: str) -> SiblingAcceptance:
    """Fit the growth curve to drafts with `num_siblings`, weighted least squares on counted chances.

    Raises ConfigError without `num_siblings`, below MIN_DRAFTS drafts, or for an accepted length outside [0, reach].
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    _check(drafts)
    rows = drafts[drafts["drafter"] == drafter]
    if "num_siblings" not in rows or len(rows) < MIN_DRAFTS:
        raise ConfigError(
            f"drafter {drafter!r} has {len(rows)} drafts with a known number of finished siblings, "
            f"at least {MIN_DRAFTS} are needed"
        )
    table = pd.DataFrame(
        {
            "siblings": rows["num_siblings"].to_numpy(np.float64),
            "stretch": rows["generated_tokens"].to_numpy() // CELL_TOKENS,
            "position": rows["generated_tokens"].to_numpy(np.float64),
            "tried": np.minimum(rows["accepted"].to_numpy() + 1.0, rows["reach"].to_numpy()),
            "kept": rows["accepted"].to_numpy(np.float64),
        }
    )
    by = table.groupby(["siblings", "stretch"], as_index=False)
    cells = by.agg(position=("position", "mean"), tried=("tried", "sum"), kept=("kept", "sum"))
    siblings, position = np.asarray(cells["siblings"]), np.asarray(cells["position"])
    tried = np.asarray(cells["tried"], np.float64)
    rate = np.asarray(cells["kept"], np.float64) / tried

    def model(p: Floats) -> SiblingAcceptance:
        low, gap = 1.0 / (1.0 + np.exp(-np.clip(p[:2], -30, 30)))
        return SiblingAcceptance(
            drafter=drafter,
            alone=float(low),
            most=float(low + gap * (1.0 - low)),
            exponent=float(np.exp(np.clip(p[2], -3, 2))),
            own_tokens=float(np.exp(np.clip(p[3], 0, 10))),
        )

    # One draft's tokens are kept or lost together more often than apart; the weights need only the right proportions.
    weight = np.sqrt(tried)
    start = np.array([-1.0, 0.0, -0.7, 4.0])

    def residuals(p: Floats) -> Floats:
        error: Floats = weight * (model(p).alpha(siblings, position) - rate)
        return error

    return model(least_squares(residuals, start, x_scale="jac", max_nfev=2000).x)
