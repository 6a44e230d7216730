"""Lengths predicted from prompts, history and siblings, of responses that may be cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from tltlab.errors import ConfigError
from tltlab.experiments.simulated import lengths as experiment
from tltlab.lengths.predict import LengthPredictor, features, is_cut

TRACES = Path(__file__).parents[3] / "traces"


def rows() -> pd.DataFrame:
    """Two prompts in two RL steps, two samples each; the last one is cut."""
    return pd.DataFrame(
        {
            "rl_step": [0, 0, 0, 0, 1, 1, 1, 1],
            "prompt_id": ["a", "a", "b", "b", "a", "a", "b", "b"],
            "prompt_tokens": [9, 9, 19, 19, 9, 9, 19, 19],
            "response_tokens": [10, 1000, 100, 100, 20, 50, 80, 512],
            "finish_reason": ["stop"] * 7 + ["length"],
        }
    )


def test_features_are_of_what_is_known_then():
    found = features(rows(), 50.0, ("prompt",))
    assert found[:, 1] == pytest.approx(np.log1p([9, 9, 19, 19] * 2))
    mean, number, cut = features(rows(), 0.0, ("history",))[:, 1:].T
    assert np.isnan(mean[:4]).all(), "nothing comes before the first RL step"
    assert mean[4:] == pytest.approx(np.log([100.0] * 4))
    assert number[4:].tolist() == [2, 2, 2, 2]
    assert cut[4:].tolist() == [0, 0, 0, 0]
    share, lengths = features(rows(), 50.0, ("siblings",))[:, 1:].T
    assert share.tolist() == [0, 1, 0, 0, 1, 1, 0, 0], "a response is no sibling of its own"
    assert lengths[[1, 4, 5]] == pytest.approx(np.log([10.0, 50.0, 20.0]))
    assert np.isnan(lengths[[0, 2, 3, 6, 7]]).all()
    assert is_cut(rows()).tolist() == [False] * 7 + [True]
    with pytest.raises(ConfigError, match="cannot be predicted from 'weather'"):
        features(rows(), 0.0, ("weather",))


def test_what_is_cut_is_taken_for_longer_than_it_looks():
    rng = np.random.default_rng(0)
    whole = rng.geometric(1 / 400, 1000).astype(float)
    cut = whole > 500
    x = np.zeros((1000, 1))
    seen = np.minimum(whole, 500.0)
    naive = float(seen[~cut].mean())
    (found,) = LengthPredictor().fit(x, seen, cut).predict(np.zeros((1, 1)))
    assert naive < 0.75 * seen.mean()
    assert found == pytest.approx(seen.mean(), rel=0.05), "the mean up to the cap, 500 of those that are cut"


def test_hazards_are_chances_and_a_feature_without_a_value_is_no_fault():
    rng = np.random.default_rng(1)
    x = np.column_stack([np.full(300, np.nan), rng.standard_normal(300)])
    tokens = np.exp(5.0 + x[:, 1])
    fitted = LengthPredictor(num_intervals=6, max_iter=20).fit(x, tokens, np.zeros(300, bool))
    hazards = fitted.hazards(x[:5])
    assert hazards.shape == (5, 6)
    assert ((hazards >= 0) & (hazards <= 1)).all()
    low, high = fitted.predict(np.array([[np.nan, -1.5], [np.nan, 1.5]]))
    assert high > 3 * low
    assert fitted.predict(x).tolist() == clone(fitted).fit(x, tokens, np.zeros(300, bool)).predict(x).tolist()
    with pytest.raises(ConfigError, match="no response ended by itself"):
        LengthPredictor().fit(x, tokens, np.ones(300, bool))


def test_the_experiment_gives_the_share_of_the_clairvoyant_gain_that_each_knowledge_reaches():
    settings = experiment.LengthsSettings(names=("tiny",), traces=TRACES, rl_steps=1)
    result = experiment.run(settings, folder=Path(), seed=0, progress=lambda text: None)
    found = result.rows.set_index("knows")
    drafts = found[found["moment"] == experiment.DRAFTS]
    found = found[found["moment"] != experiment.DRAFTS]
    assert len(drafts) == 1
    assert drafts["rollout_s"].iloc[0] < found["rollout_s"].max(), "with drafts for all it is faster than with none"
    assert set(found["moment"]) == {experiment.BEFORE, experiment.MID}
    assert (found["clairvoyant_saves"] > 0).all()
    assert (found["share"].dropna() <= 1.5).all()
    assert found["rank"]["generated"] == 0.0, "of nothing but that they still run there is no order"
    assert "of what true lengths save" in result.verdict


def test_where_there_is_nothing_to_gain_there_is_no_share():
    row = {
        "moment": experiment.BEFORE,
        "knows": "prompt",
        "trace": "t",
        "share": float("nan"),
        "clairvoyant_saves": 0.0,
    }
    assert "before the rollout there is nothing to gain" in experiment.verdict(pd.DataFrame([row]))
