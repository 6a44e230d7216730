"""Predicted against measured: the errors that the README states, and the presets that come from the same fit."""

import pytest

from bench.presets.roofline import fitted, presets, rows
from tltlab.costs.load import load_costs


@pytest.fixture(scope="module")
def table(shared_data):
    return rows(shared_data).set_index("what")


def test_constants_hold_for_both_tlt_and_vllm(table):
    errors = table["mean_abs_error"]
    assert errors["Fig. 13: depth x tokens to verify, speed-up"] < 0.02
    assert errors["Table 4: batch x tokens to verify, speed-up"] < 0.05
    assert errors["within the KV capacity"] < 0.03
    assert table["n_points"]["Fig. 13: depth x tokens to verify, speed-up"] == 36


def test_a_tp_that_was_left_out_is_predicted(table, shared_data):
    held_out = table.loc["each TP left out"]
    assert held_out["mean_abs_error"] < 0.05
    assert not held_out["used_for_fit"]
    folds = fitted(shared_data).cross_validation.query("fold == 'fold tp'")
    assert folds["num_points"].tolist() == [26, 30, 30]


def test_rows_beyond_the_kv_capacity_are_apart(table):
    assert table["n_points"]["within the KV capacity"] == 86
    assert table["n_points"]["beyond the KV capacity"] == 4
    assert not table["used_for_fit"]["beyond the KV capacity"]


def test_table_4_fits_a_long_context_better(table):
    long, short = (
        table.loc["Table 4 above batch 1, speed-up"],
        table.loc["Table 4 above batch 1, context held at 2,048"],
    )
    assert long["n_points"] == short["n_points"] == 12
    assert long["mean_abs_error"] == pytest.approx(0.040, abs=0.002)
    assert short["mean_abs_error"] == pytest.approx(0.084, abs=0.002)
    assert "the most allowed" in long["note"]


def test_presets_that_ship_are_those_of_fit(shared_data):
    for name, made in presets(shared_data).items():
        shipped = load_costs(name)
        assert shipped.notes == made.notes
        assert shipped.evidence.error(speculates=True) == pytest.approx(made.evidence.error(speculates=True), rel=0.02)
        assert shipped.evidence.parameter == pytest.approx(made.evidence.parameter, rel=0.05)
        assert shipped.kv_capacity_tokens == made.kv_capacity_tokens
        for term, value in made.constants.model_dump().items():
            assert getattr(shipped.constants, term) == pytest.approx(value, rel=0.02)
