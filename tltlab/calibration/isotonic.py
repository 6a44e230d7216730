"""Curves that only grow, as columns of a non-negative fit: isotonic smoothing and regression at once.

A piecewise linear curve that never falls is its first value plus ramps, one between each two knots, with coefficients
that are not negative. So is a sum of such curves, and a fit of one needs no more than non-negative least squares.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from sklearn.linear_model import LinearRegression

from tltlab.arrays import Floats
from tltlab.costs.table import AttentionKnot, TokenKnot

from .robust import identified

LEAST_S = 1e-9


def forward_columns(tokens: Floats, knots: Floats) -> dict[str, Floats]:
    """Seconds that grow with the tokens: a constant and the ramps."""
    return {"forward": np.ones_like(tokens)} | _ramps("forward", tokens, knots)


def fixed_columns(batch: Floats, knots: Floats) -> dict[str, Floats]:
    """Seconds that grow with the requests, from nothing at the first knot."""
    return _ramps("fixed", batch, knots)


def context_columns(batch: Floats, context: Floats, knots: Floats) -> dict[str, Floats]:
    """Seconds per token of context in every request, growing with the requests; `context` is the sum over these."""
    ramps = _ramps("context", batch, np.concatenate([[0.0], knots]))
    return {name: ramp * context / batch for name, ramp in ramps.items()}


def forward_knots(found: dict[str, float | None], at: Floats) -> tuple[TokenKnot, ...]:
    """The fitted curve of `forward_columns`."""
    seconds = np.maximum(_risen(found, "forward", at), LEAST_S)
    return tuple(TokenKnot(tokens=float(m), seconds=float(s)) for m, s in zip(at, seconds, strict=True))


def attention_knots(
    found: dict[str, float | None], at: Floats, per_context_s: float | None = None
) -> tuple[AttentionKnot, ...]:
    """The fitted curves of `fixed_columns` and `context_columns`, or one slope for all batches in place of these."""
    fixed = _risen(found, "fixed", at)
    slopes = _risen(found, "context", np.concatenate([[0.0], at]))[1:] / at
    if per_context_s is not None:
        slopes = np.full_like(at, per_context_s)
    return tuple(
        AttentionKnot(batch=int(b), fixed_s=float(f), per_context_s=float(s))
        for b, f, s in zip(at, fixed, slopes, strict=True)
    )


def non_negative(columns: dict[str, Floats], y: Floats, known: Floats | float = 0.0) -> dict[str, float | None]:
    """Non-negative coefficients of least relative error of `known` + columns against y.

    None for a column that is a combination of those before it.
    """
    used = identified({name: column / y for name, column in columns.items()})
    x = np.column_stack([columns[name] / y for name in used])
    scale = np.linalg.norm(x, axis=0)
    found = LinearRegression(positive=True, fit_intercept=False).fit(x / scale, (y - known) / y).coef_ / scale
    return dict.fromkeys(columns) | {name: float(c) for name, c in zip(used, found, strict=True)}


def _ramps(name: str, x: Floats, knots: Floats) -> dict[str, Floats]:
    return {f"{name} {high:g}": np.clip((x - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)}


def _risen(found: dict[str, float | None], name: str, knots: Floats) -> Floats:
    """The curve's values at the knots: sums of its ramps up to there."""
    return np.cumsum([found.get(name) or 0.0, *(found.get(f"{name} {x:g}") or 0.0 for x in knots[1:])])
