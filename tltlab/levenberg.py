"""Damped least squares for a handful of parameters (Levenberg 1944, Marquardt 1963)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def least_squares(
    residuals: Callable[[FloatArray], FloatArray], start: FloatArray, *, num_steps: int = 200
) -> FloatArray:
    """The parameters near `start` with the least sum of squared residuals, the Jacobian taken by differences.

    >>> least_squares(lambda p: p * [1.0, 2.0] - [3.0, 6.0], np.array([1.0])).round(6)
    array([3.])
    """
    at = np.asarray(start, np.float64)
    here = residuals(at)
    damping = 1e-3
    for _ in range(num_steps):
        steps = 1e-6 * np.maximum(1e-3, np.abs(at))
        jacobian = np.stack(
            [(residuals(at + step) - residuals(at - step)) / (2 * step.sum()) for step in np.diag(steps)], axis=1
        )
        gradient, curvature = jacobian.T @ here, jacobian.T @ jacobian
        scale = np.diag(np.diag(curvature) + 1e-12)
        for _ in range(30):
            moved = at - np.linalg.solve(curvature + damping * scale, gradient)
            there = residuals(moved)
            if np.isfinite(there).all() and there @ there < here @ here:
                break
            damping *= 4.0
        else:
            return at
        gained = float(here @ here - there @ there)
        at, here, damping = moved, there, max(damping / 8.0, 1e-12)
        if gained <= 1e-14 * float(here @ here):
            return at
    return at
