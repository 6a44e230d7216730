"""The joint fit of engine profiles: it finds what made the data, pools what is thin, and is what ships."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.presets.measurements import COLUMNS
from bench.presets.profile_fit import PRIORS, Design, Param, fit, predict, uncertainty
from bench.presets.profiles import (
    ENGINES,
    SetErrors,
    fitted,
    pooled,
    pooled_by_fold,
    set_errors,
    shipped,
    shipped_errors,
)
from tltlab.costs.profiles import MeasurementSet, profiles
from tltlab.hardware import model


def servers() -> pd.DataFrame:
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


TRUE: dict[Param, float] = {
    ("step_s", "family", "one"): -0.5, ("step_s", "family", "other"): 0.5, ("layer_s", "family", "other"): 0.3,
    ("memory", "gpu", "H200"): -0.05, ("sd_base_s", "", ""): 0.4, ("expert_layer_s", "family", "one"): 0.3,
    ("per_request_s", "", ""): 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> pd.DataFrame:
    table = servers()
    return table.assign(measured=predict(table, TRUE))


def test_the_fit_predicts_what_known_terms_made(made: pd.DataFrame):
    error = predict(made, fit(made)) / made["measured"] - 1
    assert np.abs(error).max() < 0.02


def test_an_engine_that_was_not_seen_is_predicted_by_what_the_others_share(made: pd.DataFrame):
    one = made["family"] == "one"
    values = fit(made[~one])
    assert not any(level == "family" and value == "one" for _, level, value in values)
    unseen = np.abs(predict(made[one], values) / made.loc[one, "measured"] - 1)
    untouched = np.abs(predict(made[one], {}) / made.loc[one, "measured"] - 1)
    assert unseen.median() < untouched.median()


def test_what_a_fit_leaves_open_shrinks_with_its_rows_and_is_the_prior_s_where_there_are_none(made: pd.DataFrame):
    one = made.iloc[:1]
    design = Design.of(one)
    # Of a single row it has a closed form: prior and measurement, each with its precision.
    prior = ((design.slopes(np.zeros(len(design.params))) * design.spread) ** 2).sum()
    exact = one.assign(measured=predict(one, {}))
    alone = uncertainty(exact, dict.fromkeys(design.params, 0.0), one)
    assert alone == pytest.approx([np.sqrt(prior / (1 + prior / 0.05**2))], rel=1e-3)
    values = fit(made)
    assert uncertainty(made, values, one)[0] < alone[0]
    assert uncertainty(made, values, one.assign(family="new"))[0] > 2 * uncertainty(made, values, one)[0]


def test_a_row_alone_moves_terms_little(made: pd.DataFrame):
    """A single row 5 % off is no reason for a term to leave its typical value by much."""
    alone = made.iloc[:1].assign(measured=predict(made.iloc[:1], {}) * 1.05)
    for (term, level, _), deviation in fit(alone).items():
        assert abs(deviation) < getattr(PRIORS[term], level or "shared")


def test_the_profiles_that_ship_are_those_of_the_fit(shared_data: Path):
    found, ships, sets = shipped(fitted(shared_data)), profiles(), set_errors(fitted(shared_data))
    assert sorted(found.engines) == sorted(ships.engines) == sorted(ENGINES)
    for name, engine in found.engines.items():
        for term, value in engine.model_dump(exclude={"measured", "left_out"}).items():
            expected = getattr(ships.engines[name], term)
            assert expected == (pytest.approx(value, rel=0.05) if isinstance(value, float) else value)
        assert [e.fitted.num_points for _, e in sets[name]] == [e.fitted.num_points for e in shipped_errors()[name]]
    for name, rates in found.gpus.items():
        assert ships.gpus[name].model_dump() == pytest.approx(rates.model_dump(), rel=0.02)


def test_inside_the_fit_every_dense_model_is_within_5_percent(shared_data: Path):
    for sets in set_errors(fitted(shared_data)).values():
        for one, errors in sets:
            if errors.fitted.num_points > 1 and "A3B" not in one.model and "A22B" not in one.model:
                assert abs(errors.fitted.bias) < 0.05, one
                assert errors.fitted.median < 0.07, one


def shipped_sets() -> dict[str, list[tuple[MeasurementSet, SetErrors]]]:
    errors = shipped_errors()
    return {name: list(zip(engine.measured, errors[name], strict=True)) for name, engine in profiles().engines.items()}


def test_the_errors_that_ship_are_pooled_from_those_of_the_sets():
    sets = shipped_sets()
    for name, engine in profiles().engines.items():
        for kind, experts in (("dense", False), ("experts", True)):
            assert engine.left_out[kind] == pooled_by_fold(sets, name, experts)
        for one, errors in sets[name]:
            assert one.fitted == (errors.fitted.median, errors.fitted.most)


def test_left_out_errors_that_ship_are_within_what_is_promised():
    found = {
        (engine, one.model, one.gpu, one.draft_depth is None): errors.left_out["model"]
        for engine, sets in shipped_sets().items()
        for one, errors in sets
        if "model" in errors.left_out
    }
    speculating = {tuple(names): errors for (*names, plain), errors in found.items() if not plain}
    assert len(speculating) == 4
    assert all(errors.median < 0.14 for (engine, *_), errors in speculating.items() if engine == "sglang")
    assert abs(found["vllm", "Llama-3.1-70B", "H100", True].bias) < 0.15
    assert abs(found["tensorrt-llm", "Llama-3.1-8B", "H100", True].bias) < 0.06


def share_within(errors: tuple[float, float, float], bound: float) -> float:
    return float(np.interp(bound, [0.0, *errors], [0.0, 0.5, 0.9, 1.0]))


def test_pooled_errors_are_a_quantile_of_all_sets():
    sets = [(0.1, 0.2, 0.3), (0.02, 0.05, 0.4)]
    bound = pooled(sets, 0.8)
    assert np.mean([share_within(one, bound) for one in sets]) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize("fold", ["model", "gpu", "engine"])
def test_intervals_of_dense_models_hold_for_sets_that_they_were_not_made_of(fold: str):
    """Each set of measurements against the interval that the others give."""
    every, held = shipped_sets(), []
    for name, sets in every.items():
        for out, errors in sets:
            if out.draft_depth or model(out.model).experts or fold not in errors.left_out:
                continue
            without = every | {name: [pair for pair in sets if pair[0] is not out]}
            held.append(share_within(errors.left_out[fold].spread, pooled_by_fold(without, name, False)[fold][1]))
    assert len(held) == 15
    assert 0.9 <= np.mean(held) <= 0.95
