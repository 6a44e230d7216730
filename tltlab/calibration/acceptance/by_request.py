"""Fits acceptance that differs by request to drafts: levels with drift, and growth with finished siblings."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

from tltlab.acceptance.by_request import CurveAcceptance, KnownLevel, RequestCurve, SiblingAcceptance, progress
from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError
from tltlab.traces.schema import KEY

CELL_TOKENS = 16
"""Drafts of one request that begin within so many tokens of each other are counted together."""
MIN_DRAFTS = 32
_MOST_DEPTHS = 8
_ROUNDS = 60


def fit_requests(drafts: pd.DataFrame) -> CurveAcceptance:
    """Levels, spread and drift of each drafter in `drafts` (columns as in traces.drafts).

    A logistic model with a normal level per request: the mode of the joint likelihood for the levels, given the spread;
    the spread by EM, which adds each level's own uncertainty (Breslow and Clayton 1993, penalised quasi-likelihood).
    Raises ConfigError for a drafter with fewer than MIN_DRAFTS drafts or an accepted length outside [0, reach].
    """
    _check(drafts)
    curves = {str(name): _curve(str(name), rows) for name, rows in drafts.groupby("drafter", sort=True)}
    if not curves:
        raise ConfigError("there are no drafts to fit acceptance to")
    return CurveAcceptance(curves=curves)


def _check(drafts: pd.DataFrame) -> None:
    wrong = drafts[(drafts["accepted"] < 0) | (drafts["accepted"] > drafts["reach"])]
    if len(wrong):
        row = wrong.iloc[0]
        raise ConfigError(
            f"drafts: accepted {row['accepted']} of response {tuple(row[list(KEY)])} is outside [0, {row['reach']}]"
        )


def _curve(drafter: str, rows: pd.DataFrame) -> RequestCurve:
    if len(rows) < MIN_DRAFTS:
        raise ConfigError(f"drafter {drafter!r} has {len(rows)} drafts, a curve needs at least {MIN_DRAFTS}")
    request = rows.groupby(list(KEY), sort=True).ngroup().to_numpy().astype(np.int64)
    depths = min(int(rows["reach"].max()), _MOST_DEPTHS)
    cells = _cells(rows, request, depths)
    logits, drift, spread, levels = _mixed_logit(cells, depths, int(request.max()) + 1)
    keys = rows[list(KEY)].drop_duplicates().sort_values(list(KEY)).itertuples(index=False, name=None)
    known_levels = tuple(
        KnownLevel(rl_step=int(a), prompt_id=str(b), sample=int(c), turn=int(d), level=float(level))
        for (a, b, c, d), level in zip(keys, levels.tolist(), strict=True)
    )
    return RequestCurve(
        keep_logits=tuple(logits.tolist()), drift=drift, spread=spread, known=known_levels, num_drafts=len(rows)
    )


def _cells(rows: pd.DataFrame, request: Ints, depths: int) -> pd.DataFrame:
    """Tokens tried and kept, counted by request, stretch of positions and place in the draft (from 0)."""
    accepted, most = rows["accepted"].to_numpy(np.int64), rows["reach"].to_numpy(np.int64)
    tried = np.minimum(accepted + 1, most)
    of = np.repeat(np.arange(len(rows)), tried)
    place = np.arange(tried.sum()) - np.repeat(np.cumsum(tried) - tried, tried)
    position = rows["generated_tokens"].to_numpy(np.float64)[of]
    table = pd.DataFrame(
        {
            "request": request[of],
            "stretch": position // CELL_TOKENS,
            "place": np.minimum(place, depths - 1),
            "tried": 1,
            "kept": place < accepted[of],
            "progress": progress(position),
        }
    )
    by = table.groupby(["request", "stretch", "place"], as_index=False)
    return by.agg(tried=("tried", "sum"), kept=("kept", "sum"), progress=("progress", "mean"))


def _mixed_logit(cells: pd.DataFrame, depths: int, num_requests: int) -> tuple[Floats, float, float, Floats]:
    request, place = cells["request"].to_numpy(), cells["place"].to_numpy()
    tried, kept = cells["tried"].to_numpy(np.float64), cells["kept"].to_numpy(np.float64)
    fixed = np.concatenate([np.eye(depths)[place], cells["progress"].to_numpy()[:, None]], axis=1)
    beta, level, variance = np.zeros(depths + 1), np.zeros(num_requests), 1.0
    # A weak prior on the chances keeps a place where everything, or nothing, was kept finite.
    prior = np.full(depths + 1, 0.05)

    def per_request(values: Floats) -> Floats:
        total: Floats = np.bincount(request, values, minlength=num_requests).astype(np.float64)
        return total

    for _ in range(_ROUNDS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(fixed @ beta + level[request], -30, 30)))
        weight = tried * chance * (1.0 - chance)
        pull = kept - tried * chance
        diagonal = per_request(weight) + 1.0 / variance
        cross = np.stack([per_request(weight * column) for column in fixed.T], axis=1)
        gradient = fixed.T @ pull - prior * beta
        level_gradient = per_request(pull) - level / variance
        schur = fixed.T @ (weight[:, None] * fixed) + np.diag(prior) - cross.T @ (cross / diagonal[:, None])
        step = np.linalg.solve(schur, gradient - cross.T @ (level_gradient / diagonal))
        level_step = (level_gradient - cross @ step) / diagonal
        beta, level = beta + np.clip(step, -2, 2), level + np.clip(level_step, -2, 2)
        updated = max(float(np.mean(level**2 + 1.0 / diagonal)), 1e-6)
        moved = max(float(np.abs(step).max()), abs(updated - variance))
        variance = updated
        if moved < 1e-6:
            break
    return beta[:-1], float(beta[-1]), float(np.sqrt(variance)), level


def fit_siblings(drafts: pd.DataFrame, drafter: str) -> SiblingAcceptance:
    """Fit the growth curve to drafts with `num_siblings`, weighted least squares on counted chances.

    Raises ConfigError without `num_siblings`, below MIN_DRAFTS drafts, or for an accepted length outside [0, reach].
    """
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
