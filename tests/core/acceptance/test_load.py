"""Acceptance models: means, distributions, files and their limits."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.acceptance.base import from_survival, scaled
from tltlab.acceptance.load import (
    SHIPPED,
    ConstantAcceptance,
    FittedAcceptance,
    FittedDepth,
    GeometricAcceptance,
    load_acceptance,
    reach,
)
from tltlab.calibration.acceptance.measured import equal_chain
from tltlab.errors import ConfigError
from tltlab.strategy import NO_SPECULATION, Strategy

FITTED = FittedAcceptance(
    drafters_by_depth={
        "ngram": {
            2: FittedDepth(accepted=(0.6, 0.1, 0.3), drafted=1.0),
            4: FittedDepth(accepted=(0.5, 0.2, 0.1, 0.1, 0.1), drafted=2.0, num_samples=10),
        }
    }
)


def chain(depth: int) -> Strategy:
    return Strategy.chain("ngram", depth)


def test_reach_is_what_an_iteration_can_accept():
    assert reach(chain(4)) == 4
    assert reach(Strategy("ngram", 4, 1, 3)) == 2
    assert reach(Strategy("learned", 4, 8, 48)) == 4
    assert reach(Strategy("learned", 4, 2, 3)) == 2
    assert reach(NO_SPECULATION) == 0


def test_constant_yields_the_same_every_time():
    model = ConstantAcceptance(tokens=3.25)
    assert model.tokens_per_iteration(chain(4)) == 3.25
    assert model.distribution(chain(4)).tolist() == [0, 0, 0.75, 0.25, 0]


def test_constant_cannot_accept_more_than_was_drafted():
    assert ConstantAcceptance(tokens=9).tokens_per_iteration(chain(2)) == 3


@given(st.floats(0, 0.99), st.integers(1, 16))
def test_geometric_mean_is_leviathans(alpha: float, depth: int):
    expected = (1 - alpha ** (depth + 1)) / (1 - alpha)
    assert GeometricAcceptance(alpha=alpha).tokens_per_iteration(chain(depth)) == pytest.approx(expected)


@given(st.floats(0, 1), st.integers(1, 16))
def test_a_distribution_sums_to_one(alpha: float, depth: int):
    p = GeometricAcceptance(alpha=alpha).distribution(chain(depth))
    assert len(p) == depth + 1
    assert p.sum() == pytest.approx(1)


def test_a_measured_depth_is_returned_as_measured():
    assert FITTED.distribution(chain(2)).tolist() == [0.6, 0.1, 0.3]
    assert FITTED.num_drafted(chain(4)) == 2.0


def test_a_depth_between_is_the_next_larger_one_cut_short():
    assert FITTED.distribution(chain(3)) == pytest.approx([0.5, 0.2, 0.1, 0.2])
    assert FITTED.num_drafted(chain(3)) == 1.5
    assert FITTED.distribution(Strategy("ngram", 4, 1, 2)) == pytest.approx([0.6, 0.4])


def test_beyond_the_fit_nothing_is_known():
    with pytest.raises(ConfigError, match="up to depth 4"):
        FITTED.tokens_per_iteration(chain(5))
    with pytest.raises(ConfigError, match="no drafter 'learned', only ngram"):
        FITTED.tokens_per_iteration(Strategy.chain("learned", 2))
    with pytest.raises(ConfigError, match="tree"):
        FITTED.tokens_per_iteration(Strategy("ngram", 2, 4, 8))


def test_a_fitted_file_reads_back(tmp_path: Path):
    assert load_acceptance(FITTED.write(tmp_path / "acceptance.json")) == FITTED


def test_models_by_name():
    assert load_acceptance("constant:2.5") == ConstantAcceptance(tokens=2.5)
    assert load_acceptance("geometric:0.7") == GeometricAcceptance(alpha=0.7)
    assert list(SHIPPED) == ["tlt-qwen2.5-32b", "tlt-qwen2.5-32b-fresh", "seer-siblings"]
    for name, model in SHIPPED.items():
        assert load_acceptance(name) is model
        assert load_acceptance(model.model_dump(mode="json")) == model
        assert any("arXiv" in note for note in model.notes)


def test_an_unknown_name_hears_which_there_are():
    with pytest.raises(
        ConfigError, match=r"constant:A, geometric:ALPHA, 'trace', tlt-qwen2.5-32b, tlt-qwen2.5-32b-fresh, seer"
    ):
        load_acceptance("tlt")


@given(st.floats(0, 1), st.integers(1, 16))
def test_survival_says_the_same_as_the_distribution(alpha: float, depth: int):
    model = GeometricAcceptance(alpha=alpha)
    p = model.distribution(chain(depth))
    assert from_survival(model.survival(chain(depth))) == pytest.approx(p, abs=1e-12)
    assert 1 + model.survival(chain(depth)).sum() == pytest.approx(model.tokens_per_iteration(chain(depth)))


@given(st.floats(0.01, 1), st.floats(0, 3), st.integers(1, 16))
def test_scaling_multiplies_every_chance_up_to_one(alpha: float, ratio: float, depth: int):
    kept = scaled(GeometricAcceptance(alpha=alpha).survival(chain(depth)), ratio)
    assert kept == pytest.approx(min(1.0, alpha * ratio) ** np.arange(1, depth + 1))


@pytest.mark.parametrize("source", ["constant:0.5", "geometric:1.5", "geometric:often", "constant:nan", "golden", {}])
def test_nonsense_is_refused(source: str):
    with pytest.raises(ConfigError):
        load_acceptance(source)


@pytest.mark.parametrize("accepted", [(0.5, 0.4), (0.5, 0.5, 0.0, 0.0)])
def test_a_distribution_must_fit_its_depth(accepted: tuple[float, ...]):
    value = {"kind": "fitted", "drafters": {"ngram": {"2": {"accepted": accepted, "drafted": 1}}}}
    with pytest.raises(ConfigError, match=r"drafters"):
        load_acceptance(value)


@given(st.floats(0, 1), st.integers(1, 12))
def test_a_mean_alone_gives_the_chain_that_has_it(share: float, depth: int):
    p = equal_chain(share * depth, depth)
    assert p.sum() == pytest.approx(1)
    assert p @ np.arange(depth + 1) == pytest.approx(share * depth, abs=1e-6)


def test_batch_sizes_have_bands_of_their_own():
    few, many = FittedDepth(accepted=(0.2, 0.8), drafted=1.0), FittedDepth(accepted=(0.7, 0.3), drafted=0.5)
    value = {
        "kind": "by-batch",
        "bands": [
            {"max_batch": 4, "drafters": {"ngram": {1: few.model_dump()}}},
            {"max_batch": None, "drafters": {"ngram": {1: many.model_dump()}}},
        ],
    }
    model = load_acceptance(value)
    assert [model.at(batch).tokens_per_iteration(chain(1)) for batch in (1, 4, 5, 500)] == [1.8, 1.8, 1.3, 1.3]
    assert model.drafters == ("ngram",)
    assert load_acceptance(model.model_dump(mode="json")) == model


@pytest.mark.parametrize("ends", [(), (4,), (8, 4, None), (None, 4)])
def test_bands_that_do_not_cover_every_batch_are_refused(ends: tuple[int | None, ...]):
    bands = [{"max_batch": end, "drafters": {}} for end in ends]
    with pytest.raises(ConfigError, match="max_batch must ascend"):
        load_acceptance({"kind": "by-batch", "bands": bands})
