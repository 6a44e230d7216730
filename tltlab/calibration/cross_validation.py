"""The one way in which fits are tested: made to a part of the data, asked for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.costs.evidence import LEVEL
from tltlab.stats import student_margin

from .residuals import worker_sums

MOST_FOLDS = 8
_LEAST = 0.01
"""Predictions of less than this share of what was measured are as far off as this one."""


Predictor = Callable[[pd.DataFrame], Floats]
Learner = Callable[[pd.DataFrame], Predictor]
"""Fits to data and returns what predicts a value per row; both raise ConfigError where the data do not identify it."""


def held_out_predictions(learn: Learner, rows: pd.DataFrame) -> pd.Series[float]:
    """Each row predicted from a fit to the rows of other RL steps; NaN where there are none."""
    predictions = pd.Series(np.nan, rows.index)
    for rl_step in rows["rl_step"].unique():
        out = rows["rl_step"] == rl_step
        if not out.all():
            predictions[out] = learn(rows[~out])(rows[out])
    return predictions


def relative_errors(rows: pd.DataFrame, predicted: str = "predicted_s") -> pd.Series[float]:
    """How far a column is from `measured_s`, as shares of it."""
    return (rows[predicted] - rows["measured_s"]).abs() / rows["measured_s"].clip(lower=1e-9)


def step_folds(rl_steps: Sequence[int], most: int = MOST_FOLDS) -> dict[str, list[int]]:
    """RL steps in at most `most` runs of neighbours, each to be left out once; none where there is one step only.

    >>> step_folds([0, 1, 2, 5], 2)
    {'RL steps 0-1': [0, 1], 'RL steps 2-5': [2, 5]}
    """
    if len(rl_steps) < 2 or most < 2:
        return {}
    parts = [part.tolist() for part in np.array_split(np.asarray(rl_steps), min(most, len(rl_steps)))]
    return {f"RL step {p[0]}" if len(p) == 1 else f"RL steps {p[0]}-{p[-1]}": p for p in parts}


def held_out_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of iterations that the fit had not seen, a row per fold and one for all of them, "overall".

    `rows` has `fold`, `measured_s`, `predicted_s` (nan where the rest of the data could not predict) and, of a trace,
    `rl_step` and `worker`. Found: `fold`, `num`, `mean_abs_relative_error`, and the same of sums per RL step and worker
    with their `sums_bias`, nan where there are none.
    """
    errors = []
    for name, part in [*rows.groupby("fold", sort=False), ("overall", rows)] if len(rows) else []:
        valid = part[part["predicted_s"].notna()]
        row = {"fold": name, "num": len(part), "mean_abs_relative_error": relative_errors(valid).mean()}
        if "worker" in rows:
            sums = worker_sums(valid)
            total = valid["predicted_s"].sum() / valid["measured_s"].sum() - 1.0 if len(valid) else np.nan
            size = sums["bias"].abs().mean()
            row |= {"num_sums": len(sums), "sums_mean_abs_relative_error": size, "sums_bias": total}
        errors.append(row)
    columns = ["fold", "num", "mean_abs_relative_error", "num_sums", "sums_mean_abs_relative_error", "sums_bias"]
    return pd.DataFrame(errors).reindex(columns=columns)


def error_quantiles(errors: pd.Series[float] | Floats) -> tuple[float, float]:
    """Median of relative errors' sizes, and what the next one does not exceed with a probability of 90 %.

    An error's size is a factor less 1, as in `Evidence`: predicting half is as far off as predicting twice. With nine
    errors or more it is the order statistic of conformal prediction (Vovk et al. 2005). With fewer it is Student's
    bound from their root mean square, as the largest of few is exceeded too often.

    >>> error_quantiles(np.array([0.01] * 18 + [0.02]))
    (0.01, 0.01)
    """
    relative = np.maximum(np.asarray(errors, np.float64), _LEAST - 1.0)
    size = np.sort(np.expm1(np.abs(np.log1p(relative))))
    rank = math.ceil((len(size) + 1) * LEVEL)
    if rank <= len(size):
        most = size[rank - 1]
    else:
        most = student_margin(float(np.sqrt(np.mean(size**2) * (1 + 1 / len(size)))), len(size), LEVEL)
    return float(np.median(size)), float(most)
