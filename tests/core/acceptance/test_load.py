"""Acceptance models: means, distributions, files and their limits."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.acceptance.base import ConstantAcceptance, GeometricAcceptance, from_survival, scaled
from tltlab.acceptance.load import SHIPPED, load_acceptance
from tltlab.acceptance.measured import FittedAcceptance, FittedDepth, copied_runs
from tltlab.calibration.acceptance.measured import equal_chain
from tltlab.errors import ConfigError
from tltlab.strategy import NO_SPECULATION, Strategy

MEASURED = {
    2: FittedDepth(accepted=(0.6, 0.1, 0.3), drafted=1.0),
    4: FittedDepth(accepted=(0.5, 0.2, 0.1, 0.1, 0.1), drafted=2.0, num_samples=10),
}
FITTED = FittedAcceptance(drafters_by_depth={"ngram": MEASURED, "learned": MEASURED})


def chain(depth: int) -> Strategy:
    return Strategy.chain("ngram", depth)


def test_reach_is_what_an_iteration_can_accept():
    shapes = [chain(4), Strategy("ngram", 4, 1, 3), Strategy("learned", 4, 8, 48), Strategy("learned", 4, 2, 3)]
    assert [strategy.reach for strategy in (*shapes, NO_SPECULATION)] == [4, 2, 4, 2, 0]


def test_constant_yields_the_same_every_time_but_no_more_than_was_drafted():
    model = ConstantAcceptance(tokens=3.25)
    assert model.tokens_per_iteration(chain(4)) == 3.25
    assert model.distribution(chain(4)).tolist() == [0, 0, 0.75, 0.25, 0]
    assert ConstantAcceptance(tokens=9).tokens_per_iteration(chain(2)) == 3


@given(st.floats(0, 0.99), st.integers(1, 16))
def test_geometric_mean_is_leviathans(alpha: float, depth: int):
    expected = (1 - alpha ** (depth + 1)) / (1 - alpha)
    assert GeometricAcceptance(alpha=alpha).tokens_per_iteration(chain(depth)) == pytest.approx(expected)


def test_a_measured_depth_is_returned_as_measured():
    assert FITTED.distribution(chain(2)).tolist() == [0.6, 0.1, 0.3]
    assert FITTED.num_drafted(chain(4)) == 2.0


def test_a_depth_between_is_the_next_larger_one_cut_short():
    assert FITTED.distribution(Strategy.chain("learned", 3)) == pytest.approx([0.5, 0.2, 0.1, 0.2])
    assert FITTED.num_drafted(chain(3)) == 1.5
    assert FITTED.distribution(Strategy("learned", 4, 1, 2)) == pytest.approx([0.6, 0.4])


def test_beyond_the_fit_nothing_is_known():
    with refused(ConfigError, naming=("4",)):
        FITTED.tokens_per_iteration(Strategy.chain("learned", 5))
    with refused(ConfigError, naming=("eagle",)):
        FITTED.tokens_per_iteration(Strategy.chain("eagle", 2))
    with refused(ConfigError, naming=("tree",)):
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
    names = r"constant:A, geometric:ALPHA, 'trace', tlt-qwen2.5-32b, tlt-qwen2.5-32b-fresh, seer-siblings "
    with pytest.raises(ConfigError, match=names + r"\(-fresh: with an assumed effect of the drafter's age"):
        load_acceptance("tlt")


@given(st.floats(0, 1), st.integers(1, 16))
def test_survival_says_the_same_as_the_distribution_which_sums_to_one(alpha: float, depth: int):
    model = GeometricAcceptance(alpha=alpha)
    p = model.distribution(chain(depth))
    assert (len(p), p.sum()) == (depth + 1, pytest.approx(1))
    assert from_survival(model.curve(chain(depth))) == pytest.approx(p, abs=1e-12)
    assert 1 + model.curve(chain(depth)).sum() == pytest.approx(model.tokens_per_iteration(chain(depth)))


@given(st.floats(0.01, 1), st.floats(0, 3), st.integers(1, 16))
def test_scaling_multiplies_every_chance_up_to_one(alpha: float, ratio: float, depth: int):
    kept = scaled(GeometricAcceptance(alpha=alpha).curve(chain(depth)), ratio)
    assert kept == pytest.approx(min(1.0, alpha * ratio) ** np.arange(1, depth + 1))


@pytest.mark.parametrize("source", ["constant:0.5", "geometric:1.5", "geometric:often", "constant:nan", "golden", {}])
def test_nonsense_is_refused(source: str):
    with pytest.raises(ConfigError):
        load_acceptance(source)


@pytest.mark.parametrize("accepted", [(0.5, 0.4), (0.5, 0.5, 0.0, 0.0)])
def test_a_distribution_must_fit_its_depth(accepted: tuple[float, ...]):
    value = {"kind": "fitted", "drafters": {"ngram": {"2": {"accepted": accepted, "drafted": 1}}}}
    with refused(ConfigError, naming=("drafters",)):
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
    with refused(ConfigError, naming=("max_batch",)):
        load_acceptance({"kind": "by-batch", "bands": bands})


# Drafters that copy text, at depths that were not measured


def walked(runs: np.ndarray, depth: int) -> np.ndarray:
    """P(accepted = j) of drafts of `depth` along runs of text that can be copied, each followed by one that cannot."""
    counts = np.zeros(depth + 1)
    while len(runs):
        counts += np.bincount(np.minimum(runs, depth), minlength=depth + 1)
        runs = runs[runs > depth] - depth - 1
    return counts / counts.sum()


@pytest.mark.parametrize(("measured", "asked"), [(8, 1), (8, 3), (4, 2), (5, 4), (2, 8), (3, 7)])
def test_copies_at_another_depth_are_those_of_the_same_runs(measured: int, asked: int):
    # Most runs never begin; one that does goes on with chance .8, so two tokens of it tell the rest.
    rng = np.random.default_rng(0)
    runs = np.where(rng.random(60_000) < 0.7, 0, rng.geometric(0.2, 60_000))
    true = walked(runs, asked)
    found = copied_runs(walked(runs, measured).tolist(), asked)
    assert found == pytest.approx(true, abs=0.006)
    if measured > asked:
        p = walked(runs, measured)
        cut = np.append(p[:asked], p[asked:].sum())
        tokens = [1 + float(q @ np.arange(asked + 1)) for q in (cut, true)]
        assert tokens[0] < 0.98 * tokens[1]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(1, 16))
def test_copies_have_a_distribution_whatever_was_measured(counts: list[int], depth: int):
    counts[0] += 1
    p = copied_runs((np.array(counts) / sum(counts)).tolist(), depth)
    assert p.shape == (depth + 1,)
    assert p.sum() == pytest.approx(1.0)
    assert (p > -1e-9).all()
    same = copied_runs((np.array(counts) / sum(counts)).tolist(), len(counts) - 1)
    assert same.shape == (len(counts),)


def test_real_copies_at_another_depth_are_met_within_a_percent(shared_data):
    rows = pd.read_parquet(shared_data / "accept_traces_llama31_8b.parquet")
    for _, texts in rows.groupby("dataset"):
        kept = [(np.asarray(positions) - 1).tolist() for positions in texts["acc_ngram"]]

        def drafts(depth: int, kept: list[list[int]] = kept) -> np.ndarray:
            counts = [0] * (depth + 1)
            for positions in kept:
                at = 0
                while at < len(positions):
                    accepted = min(positions[at], depth)
                    counts[accepted] += 1
                    at += accepted + 1
            return np.array(counts) / sum(counts)

        true = {depth: drafts(depth) for depth in (1, 2, 4, 8)}
        for measured, asked in ((8, 4), (8, 1), (4, 2), (2, 8), (4, 8)):
            tokens = [1 + float(p @ np.arange(asked + 1)) for p in (copied_runs(true[measured], asked), true[asked])]
            assert tokens[0] == pytest.approx(tokens[1], rel=0.006)


def test_a_learned_drafter_is_cut_short_and_copies_are_marked_as_not_measured():
    cell = FittedDepth(accepted=(0.6, 0.0, 0.0, 0.0, 0.4), drafted=4.0)
    model = FittedAcceptance(drafters_by_depth={name: {4: cell} for name in ("ngram", "learned")})
    one, eight = (Strategy.chain("ngram", depth) for depth in (1, 8))
    assert model.distribution(Strategy.chain("learned", 1)).tolist() == [0.6, 0.4]
    assert model.distribution(one).round(2).tolist() == [0.37, 0.63]
    assert model.tokens_per_iteration(eight) > model.tokens_per_iteration(Strategy.chain("ngram", 4))
    assert [model.outside(s) for s in (one, eight, Strategy.chain("ngram", 4), Strategy.chain("learned", 1))] == [
        ["draft_depth"], ["draft_depth"], [], [],
    ]  # fmt: skip
    for strategy in (Strategy.chain("learned", 5), Strategy.chain("ngram", 17)):
        with refused(ConfigError, naming=("4",)):
            model.distribution(strategy)
