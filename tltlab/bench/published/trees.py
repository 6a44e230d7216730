"""Fits the curve of `TreeAcceptance` to published accept lengths of draft trees, and its errors on what it left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from tltlab.acceptance.trees import TreeAcceptance, TreeRange
from tltlab.arrays import Floats
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeError:
    """Absolute relative errors of accept lengths: `mean` and `worst` over `num_cells`."""

    mean: float
    worst: float
    num_cells: int


_START = np.array([0.12, 5.0, 2.5, 0.2, 8.0, 0.2])
_COLUMNS = ("draft_depth", "top_k", "tokens_to_verify", "accept_length")


def fit_tree(cells: pd.DataFrame, drafter: str | None = None) -> TreeAcceptance:
    """Fit the curve to measured accept lengths (bonus included), least squares on relative errors.

    `cells` has the columns draft_depth, top_k, tokens_to_verify and accept_length, one row per measurement. Where only
    one top_k was measured its effect is unknown and stays out. Raises ConfigError for a column that is missing, an
    accept length outside [1, depth + 1], or fewer rows than parameters.
    """
    table = _checked(cells)
    start = _start(table)
    branching = len(start) == len(_START)
    strategies = _strategies(table)
    measured = table["accept_length"].to_numpy(np.float64)
    spans = {name: (int(table[name].min()), int(table[name].max())) for name in _COLUMNS[:3]}

    def model(p: Floats) -> TreeAcceptance:
        late, levels, shape, pruned = np.clip(p[:4], [0, 1e-3, 1e-3, 0], [1, 1e3, 1e3, 1])
        best, penalty = (max(float(p[4]), 1e-3), max(float(p[5]), 0.0)) if branching else (8.0, 0.0)
        return TreeAcceptance(
            late_miss=float(late),
            onset_levels=float(levels),
            onset_shape=float(shape),
            pruned=float(pruned),
            best_top_k=best,
            top_k_penalty=penalty,
            calibrated=TreeRange(**spans),
        )

    def residuals(p: Floats) -> Floats:
        held = model(p)
        found = np.array([1.0 + held.survival(s).sum() for s in strategies])
        error: Floats = found / measured - 1.0
        return error

    found = least_squares(residuals, start, x_scale="jac", max_nfev=2000)
    return model(found.x).model_copy(update={"drafter": drafter})


def tree_error(model: TreeAcceptance, cells: pd.DataFrame) -> TreeError:
    """The model against measured cells."""
    table = cells.assign(drafter="any")
    found = np.array([1.0 + model.model_copy(update={"drafter": None}).survival(s).sum() for s in _strategies(table)])
    return _error(found, table["accept_length"].to_numpy(np.float64))


def leave_out_error(cells: pd.DataFrame, column: str) -> TreeError:
    """Each value of `column` left out in turn, the curve fitted to the rest and asked for what was left out."""
    found, measured = [], []
    for value in sorted(cells[column].unique()):
        held = cells[cells[column] == value]
        model = fit_tree(cells[cells[column] != value])
        found += [1.0 + model.survival(s).sum() for s in _strategies(held)]
        measured += held["accept_length"].tolist()
    return _error(np.array(found), np.array(measured))


def _error(found: Floats, measured: Floats) -> TreeError:
    error = np.abs(found / measured - 1.0)
    return TreeError(mean=float(error.mean()), worst=float(error.max()), num_cells=len(error))


def _strategies(table: pd.DataFrame) -> Sequence[Strategy]:
    rows = table[["draft_depth", "top_k", "tokens_to_verify"]].astype(int).itertuples(index=False, name=None)
    return [Strategy("any", *row) for row in rows]


def _start(cells: pd.DataFrame) -> Floats:
    """Where the fit begins; the effect of top_k shows in more than two of its values."""
    return _START if cells["top_k"].nunique() > 2 else _START[:4]


def _checked(cells: pd.DataFrame) -> pd.DataFrame:
    if missing := [name for name in _COLUMNS if name not in cells]:
        raise ConfigError(f"accept lengths of trees need the columns {', '.join(_COLUMNS)}; {missing[0]} is missing")
    most = np.minimum(cells["draft_depth"], cells["tokens_to_verify"] - 1) + 1
    wrong = cells[~cells["accept_length"].between(1, most)]
    if len(wrong):
        row = wrong.iloc[0]
        raise ConfigError(
            f"accept_length {row['accept_length']} of depth {int(row['draft_depth'])} is outside [1, depth + 1]: "
            f"it counts the bonus token"
        )
    num_parameters = len(_start(cells))
    if len(cells) < num_parameters:
        raise ConfigError(f"a tree curve has {num_parameters} parameters here, got {len(cells)} measurements")
    return cells
