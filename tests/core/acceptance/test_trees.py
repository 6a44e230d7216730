"""Trees: what the curve promises, its fit, and how close it comes to the published accept lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.acceptance.curves import TreeAcceptance
from tltlab.acceptance.load import load_acceptance
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


def tree(depth, top_k, verify):
    """All nodes where there are fewer than asked for."""
    return Strategy("eagle", depth, top_k, min(verify, 1 + top_k + (depth - 1) * top_k**2))


@given(MODELS, st.integers(1, 16), st.integers(2, 16), st.integers(2, 128))
def test_a_tree_accepts_between_nothing_and_its_depth(model, depth, top_k, verify):
    p = model.distribution(tree(depth, top_k, verify))
    assert len(p) == min(depth, verify - 1) + 1
    assert (p >= -1e-12).all()
    assert p.sum() == pytest.approx(1)
    mean = p @ np.arange(len(p))
    assert 0 <= mean <= depth
    assert model.tokens_per_iteration(tree(depth, top_k, verify)) == pytest.approx(1 + mean)


@given(MODELS, st.integers(1, 15), st.integers(2, 16), st.integers(17, 127))
def test_more_levels_or_more_nodes_never_accept_less(model, depth, top_k, verify):
    now = model.tokens_per_iteration(tree(depth, top_k, verify))
    assert model.tokens_per_iteration(tree(depth + 1, top_k, verify)) >= now - 1e-12
    assert model.tokens_per_iteration(tree(depth, top_k, verify + 1)) >= now - 1e-12


@given(MODELS, st.integers(1, 12))
def test_a_chain_is_the_tree_with_one_branch(model, depth):
    whole = model.curve(Strategy.chain("eagle", 13))
    assert model.curve(Strategy.chain("eagle", depth)) == pytest.approx(whole[:depth])
    assert model.curve(Strategy("eagle", 13, 1, depth + 1)) == pytest.approx(whole[:depth])


def test_the_shipped_curve_states_where_it_was_measured():
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
    with refused(ConfigError, naming=("other",)):
        model.distribution(Strategy("other", 8, 8, 48))
