"""The joint fit of engine profiles: it finds what made the data, pools what is thin, and is what ships."""

import numpy as np
import pandas as pd
import pytest

from bench.presets.measurements import COLUMNS
from bench.presets.profile_fit import PRIORS, fit, predict
from bench.presets.profiles import ENGINES, Residuals, coverage, rows, shipped, validated
from tltlab.costs.profiles import profiles


def servers():
    """Iterations of two engines and three models, dense and with experts, plain and drafting."""
    grid = [
        {
            "family": family,
            "model": name,
            "gpu": gpu,
            "tp": tp,
            "batch": batch,
            "draft_depth": depth,
            "weights": weights,
        }
        for family in ("one", "other")
        for name, tp, weights in (
            ("Llama-3.1-8B", 1, "bf16"),
            ("Llama-3.3-70B", 4, "fp8"),
            ("Qwen3-30B-A3B", 1, "bf16"),
        )
        for gpu in ("H100", "H200")
        for batch in (1, 8, 64, 256)
        for depth in (0, 3)
    ]
    table = pd.DataFrame(grid).reindex(columns=[*COLUMNS, "family", "weights", "kv", "draft_vocab"])
    return table.assign(
        kind="iteration", source="made", version="1", kv="bf16", context_tokens=1000.0, top_k=1, measured=1.0,
        tokens_to_verify=1 + table["draft_depth"],
    )  # fmt: skip


EXPERTS = "A3B|A22B|DeepSeek|Kimi|gpt-oss|MiniMax|Ling"
TRUE = {
    ("step_s", "family", "one"): -0.5, ("step_s", "family", "other"): 0.5, ("layer_s", "family", "other"): 0.3,
    ("memory", "gpu", "H200"): -0.05, ("sd_base_s", "", ""): 0.4, ("expert_layer_s", "family", "one"): 0.3,
    ("per_request_s", "", ""): 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    table = servers()
    return table.assign(measured=predict(table, TRUE))


def test_the_fit_predicts_what_known_terms_made(made):
    error = predict(made, fit(made)) / made["measured"] - 1
    assert np.abs(error).max() < 0.02


def test_an_unseen_engine_is_predicted_from_the_others(made):
    one = made["family"] == "one"
    values = fit(made[~one])
    assert not any(level == "family" and value == "one" for _, level, value in values)
    unseen = np.abs(predict(made[one], values) / made.loc[one, "measured"] - 1)
    untouched = np.abs(predict(made[one], {}) / made.loc[one, "measured"] - 1)
    assert unseen.median() < untouched.median()


def test_a_row_alone_moves_terms_little(made):
    """A single row 5 % off is no reason for a term to leave its typical value by much."""
    alone = made.iloc[:1].assign(measured=predict(made.iloc[:1], {}) * 1.05)
    for (term, level, _), deviation in fit(alone).items():
        assert abs(deviation) < getattr(PRIORS[term], level or "shared")


def test_profiles_that_ship_are_those_of_fit(shared_data):
    found, ships = shipped(validated(shared_data)), profiles()
    assert sorted(found.engines) == sorted(ships.engines) == sorted(ENGINES)
    for name, engine in found.engines.items():
        for term, value in engine.model_dump(exclude={"measured"}).items():
            expected = getattr(ships.engines[name], term)
            assert expected == (pytest.approx(value, rel=0.05) if isinstance(value, float) else value)
        assert [one.source for one in engine.measured] == [one.source for one in ships.engines[name].measured]
    for name, rates in found.gpus.items():
        assert ships.gpus[name].model_dump() == pytest.approx(rates.model_dump(), rel=0.02)
    for kind, errors in found.errors.items():
        assert {name: most for name, (_, most) in ships.errors[kind].items()} == pytest.approx(
            {name: most for name, (_, most) in errors.items()}, rel=0.05
        )


def test_every_set_is_predicted_as_well_as_promised(shared_data):
    errors = rows(shared_data)
    sets = errors[errors["pooled"].eq(False) & (errors["source"] != "gpu time")].set_index("what")
    inside = sets[(sets["left_out"] == "") & ~sets.index.str.contains(EXPERTS) & (sets["n_points"] > 1)]
    assert (inside["bias"].abs() < 0.08).all()
    assert (inside["median_abs_error"] < 0.08).all()
    unseen = sets[sets["left_out"] == "model"]
    assert len(unseen[unseen["sign"].notna()]) == 6
    assert (unseen.loc[unseen["sign"].notna(), "median_abs_error"] < 0.17).all()
    served = unseen[unseen.index.str.contains(EXPERTS) & unseen.index.str.contains("AIConfigurator")]
    assert len(served) == 13
    assert served["median_abs_error"].median() < 0.12
    biases = unseen["bias"].abs()
    assert biases[biases.index.str.startswith("plain, Llama-3.1-70B")].lt(0.18).all()
    assert biases[biases.index.str.startswith("plain, Llama-3.1-8B bf16 on H100")].lt(0.06).all()


def test_intervals_hold_as_many_cells_as_they_say(shared_data):
    """Nine in ten of each kind and distance, each set of measurements against the interval that the others give."""
    found = coverage(shared_data)
    # Two sets of times between tokens say little of the next.
    classes = found[(found["left_out"].isin(["", "third"])) & (found["sets"] > 2)]
    assert len(classes) == 8
    assert classes["inside"].between(0.85, 0.95).all()
    folds = found[(found["asked"] == "plain") & (found["distance"] == "never measured")]
    assert len(folds) == 10
    assert folds["inside"].between(0.85, 0.96).all()
    for _, kind in found.groupby(["kind", "asked"]):
        widths = kind["width"].unique()
        assert list(widths) == sorted(widths)
        assert len(widths) == kind["distance"].nunique()


def residuals(**offs):
    table = pd.DataFrame([(name, off) for name, of in offs.items() for off in of], columns=["set", "off"])
    return Residuals(rows=table.assign(experts=False, asked="", weight=1.0, apart=True, fold="model"))


def test_the_tail_of_few_sets_is_smaller():
    """With one set 95 of 100 cells are within the bound, with many sets nearly 90."""
    hundred = [at / 100 for at in range(1, 101)]
    assert residuals(one=hundred).most() == pytest.approx(0.95)
    many = {f"set{at}": [value] for at, value in enumerate(hundred)}
    assert residuals(**many).most() == pytest.approx(0.91)
