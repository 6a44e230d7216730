"""The shipped curve of draft trees is the fit to TLT's published accept lengths, and foresees cells left out of it."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

from tltlab.acceptance.curves import TreeAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.strategy import Strategy

SHIPPED = load_acceptance("tlt-qwen2.5-32b")
TERMS = ("late_miss", "onset_levels", "onset_shape", "pruned", "best_top_k", "top_k_penalty")
START = (0.12, 5.0, 2.5, 0.2, 8.0, 0.2)
LEAST, MOST = (0, 1e-3, 1e-3, 0, 1e-3, 0), (1, 1e3, 1e3, 1, 1e3, 1e3)


def strategies(cells):
    rows = cells[["draft_depth", "top_k", "tokens_to_verify"]].astype(int).itertuples(index=False, name=None)
    return [Strategy("any", *row) for row in rows]


def fitted(cells):
    """The curve of least squared relative errors; where one top_k or two were measured its effect stays out."""
    count = 6 if cells["top_k"].nunique() > 2 else 4

    def model(values):
        given = (*np.clip(values, LEAST[:count], MOST[:count]).tolist(), 8.0, 0.0)
        return TreeAcceptance(**dict(zip(TERMS, given, strict=False)))

    return model(least_squares(lambda p: errors(model(p), cells), START[:count], x_scale="jac", max_nfev=2000).x)


def errors(model, cells):
    found = np.array([1.0 + model.curve(strategy).sum() for strategy in strategies(cells)])
    return found / cells["accept_length"].to_numpy(np.float64) - 1.0


def left_out(cells, column):
    """Errors where each value of `column` is left out of the fit in turn."""
    parts = [cells[column] == value for value in sorted(cells[column].unique())]
    return np.abs(np.concatenate([errors(fitted(cells[~part]), cells[part]) for part in parts]))


def test_tlt_errs_one_percent_on_held_out_cells(shared_data):
    cells = pd.read_csv(shared_data / "tlt_sd_tables.csv").rename(columns={"topk": "top_k"})
    cells = cells[cells["accept_length"].notna()]
    curve = fitted(cells)
    off = np.abs(errors(curve, cells))
    assert len(off) == 42
    assert off.mean() < 0.005
    assert off.max() < 0.02
    tree = Strategy("eagle", 16, 8, 128)
    assert curve.curve(tree) == pytest.approx(SHIPPED.curve(tree), rel=1e-3)
    figure = cells[cells["table"] == "fig13"]
    by_depth, by_verify = left_out(figure, "draft_depth"), left_out(figure, "tokens_to_verify")
    assert by_depth.mean() < 0.01
    assert by_depth.max() < 0.03
    assert by_verify.mean() < 0.007
    assert by_verify.max() < 0.02
