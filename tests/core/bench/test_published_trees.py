"""The fit of the tree curve, and how close it comes to the published accept lengths."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tltlab.acceptance.load import load_acceptance
from tltlab.bench.published.trees import fit_tree, leave_out_error, tree_error
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

SHIPPED = load_acceptance("tlt-qwen2.5-32b")


def tree(depth: int, top_k: int, verify: int) -> Strategy:
    """All nodes where there are fewer than asked for."""
    return Strategy("eagle", depth, top_k, min(verify, 1 + top_k + (depth - 1) * top_k**2))


def cells(noise: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    grid = [(d, k, v) for d in (4, 8, 12) for k in (7, 10, 16) for v in (16, 64, 128)]
    table = pd.DataFrame(grid, columns=["draft_depth", "top_k", "tokens_to_verify"])
    exact = np.array([SHIPPED.tokens_per_iteration(tree(*row)) for row in grid])
    return table.assign(accept_length=exact * (1 + noise * rng.normal(size=len(grid))))


def test_a_fit_finds_the_curve_that_made_the_data():
    assert tree_error(fit_tree(cells()), cells()).worst < 1e-4
    fitted = fit_tree(cells(noise=0.005), drafter="eagle")
    assert tree_error(fitted, cells()).mean < 0.005
    assert fitted.drafter == "eagle"
    assert fitted.calibrated is not None
    assert fitted.calibrated.tokens_to_verify == (16, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accept_length": 13.5}, r"outside \[1, depth \+ 1\]"),
        ({"accept_length": 0.5}, r"outside \[1, depth \+ 1\]"),
        ({"accept_length": np.nan}, r"outside \[1, depth \+ 1\]"),
    ],
)
def test_accept_lengths_outside_the_draft_are_refused(change: dict[str, float], message: str):
    table = cells()
    table.loc[26, list(change)] = list(change.values())
    with pytest.raises(ConfigError, match=message):
        fit_tree(table)


def test_a_fit_needs_its_columns_and_more_rows_than_parameters():
    with pytest.raises(ConfigError, match="top_k is missing"):
        fit_tree(cells().drop(columns="top_k"))
    with pytest.raises(ConfigError, match="4 parameters here, got 3"):
        fit_tree(cells().head(3))


def test_tlt_within_one_percent_on_cells_that_the_fit_left_out(shared_data: Path):
    table = pd.read_csv(shared_data / "tlt_sd_tables.csv").rename(columns={"topk": "top_k"})
    table = table[table["accept_length"].notna()]
    fitted = fit_tree(table)
    found = tree_error(fitted, table)
    assert found.num_cells == 42
    assert found.mean < 0.005
    assert found.worst < 0.02
    assert fitted.survival(tree(16, 8, 128)) == pytest.approx(SHIPPED.survival(tree(16, 8, 128)), rel=1e-3)
    figure = table[table["table"] == "fig13"]
    by_depth, by_verify = leave_out_error(figure, "draft_depth"), leave_out_error(figure, "tokens_to_verify")
    assert by_depth.mean < 0.01
    assert by_depth.worst < 0.03
    assert by_verify.mean < 0.007
    assert by_verify.worst < 0.02
