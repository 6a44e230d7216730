"""Trees: what the curve promises, its fit, and how close it comes to the published accept lengths."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.acceptance.load import TreeAcceptance, load_acceptance
from tltlab.bench.published.trees import fit_tree, leave_out_error, tree_error
from tltlab.errors import ConfigError
from tltlab.strategy import Strategy

SHIPPED = load_acceptance("tlt-qwen2.5-32b")
MODELS = st.builds(
    TreeAcceptance,
    late_miss=st.floats(0, 1),
    onset_levels=st.floats(0.1, 20),
    onset_shape=st.floats(0.1, 6),
    pruned=st.floats(0, 1),
    best_top_k=st.floats(1, 16),
    top_k_penalty=st.floats(0, 1),
)


def tree(depth: int, top_k: int, verify: int) -> Strategy:
    """All nodes where there are fewer than asked for."""
    return Strategy("eagle", depth, top_k, min(verify, 1 + top_k + (depth - 1) * top_k**2))


@given(MODELS, st.integers(1, 16), st.integers(2, 16), st.integers(2, 128))
def test_a_tree_accepts_between_nothing_and_its_depth(model: TreeAcceptance, depth: int, top_k: int, verify: int):
    p = model.distribution(tree(depth, top_k, verify))
    assert len(p) == min(depth, verify - 1) + 1
    assert (p >= -1e-12).all()
    assert p.sum() == pytest.approx(1)
    mean = p @ np.arange(len(p))
    assert 0 <= mean <= depth
    assert model.tokens_per_iteration(tree(depth, top_k, verify)) == pytest.approx(1 + mean)


@given(MODELS, st.integers(1, 15), st.integers(2, 16), st.integers(17, 127))
def test_more_levels_or_more_nodes_never_accept_less(model: TreeAcceptance, depth: int, top_k: int, verify: int):
    now = model.tokens_per_iteration(tree(depth, top_k, verify))
    assert model.tokens_per_iteration(tree(depth + 1, top_k, verify)) >= now - 1e-12
    assert model.tokens_per_iteration(tree(depth, top_k, verify + 1)) >= now - 1e-12


@given(MODELS, st.integers(1, 12))
def test_a_chain_is_the_tree_with_one_branch_and_its_beginning_is_the_shorter_chain(model: TreeAcceptance, depth: int):
    whole = model.survival(Strategy.chain("eagle", 13))
    assert model.survival(Strategy.chain("eagle", depth)) == pytest.approx(whole[:depth])
    assert model.survival(Strategy("eagle", 13, 1, depth + 1)) == pytest.approx(whole[:depth])


def test_all_nodes_but_the_pending_one_are_drafted():
    assert SHIPPED.num_drafted(tree(8, 4, 48)) == 47


def test_the_shipped_curve_says_where_it_was_measured():
    assert SHIPPED.outside(tree(8, 8, 48)) == []
    assert SHIPPED.outside(Strategy.chain("eagle", 3)) == ["draft_depth", "top_k", "tokens_to_verify"]
    assert TreeAcceptance(late_miss=0, onset_levels=1, onset_shape=1, pruned=0).outside(tree(8, 8, 48)) != []


def test_the_shipped_curve_meets_published_points():
    # arXiv 2511.16665, figure 13 and table 1.
    assert SHIPPED.tokens_per_iteration(tree(8, 8, 48)) == pytest.approx(7.24, rel=0.01)
    assert SHIPPED.tokens_per_iteration(tree(12, 16, 64)) == pytest.approx(8.42, rel=0.01)


def test_a_model_for_one_drafter_refuses_another():
    model = SHIPPED.model_copy(update={"drafter": "eagle"})
    assert model.drafters == ("eagle",)
    with pytest.raises(ConfigError, match="no drafter 'other', only eagle"):
        model.distribution(Strategy("other", 8, 8, 48))


def test_it_reads_back_from_its_file(tmp_path: Path):
    assert load_acceptance(SHIPPED.write(tmp_path / "tree.json")) == SHIPPED


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
    with pytest.raises(ConfigError, match="6 parameters, got 3"):
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
