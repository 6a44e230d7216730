"""Intervals: their coverage, what they do not depend on, their defined edges; pairs that differ; Kendall's tau; ICC."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, t

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.stats import (
    intraclass_correlation,
    kendall_tau,
    mean_of_few,
    non_overlapping_pairs,
    paired_interval,
    paired_ratio,
    student_margin,
)

TIMES = st.lists(st.floats(0.5, 100), min_size=2, max_size=12)


def interval(a, b, seed=0, **options):
    return paired_interval(a, b, rng=np.random.default_rng(seed), **options)  # type: ignore[arg-type]


def covered(truth, num_pairs, trials=200):
    """Share of intervals that hold the truth, on pairs of lognormal step times with a common part."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(trials):
        common = rng.lognormal(0, 0.6, num_pairs)
        a = common * rng.lognormal(-0.02, 0.2, num_pairs) * 1.5
        b = common * rng.lognormal(-0.02, 0.2, num_pairs)
        found = interval(a, b, seed=trial, level=0.9, num_resamples=300)
        hits += found.low <= truth <= found.high
    return hits / trials


def test_truth_is_covered_about_as_often_as_promised():
    assert 0.80 <= covered(1.5, 40) <= 0.96


def test_a_ratio_of_few_pairs_has_students_interval():
    rng = np.random.default_rng(2)
    hits = {"t": 0, "bca": 0}
    for _ in range(300):
        common = rng.lognormal(0, 0.3, 5)
        a, b = 1.5 * common * rng.normal(1, 0.1, 5), common * rng.normal(1, 0.1, 5)
        for name, found in {
            "t": paired_ratio(a, b, rng=rng),
            "bca": paired_interval(a, b, num_resamples=200, rng=rng),
        }.items():
            hits[name] += found.low <= 1.5 <= found.high
    assert hits["t"] >= 0.92 * 300 > hits["bca"]
    many = np.arange(1.0, 11.0), np.arange(2.0, 12.0)
    assert paired_ratio(*many, rng=np.random.default_rng(0)) == interval(*many)
    assert math.isnan(paired_ratio([1.0], [2.0], rng=rng).low)
    assert paired_ratio([0.0, 9.0], [1.0, 1.0], rng=rng).low == 0.0


def test_pairs_make_it_narrower_than_their_shuffle():
    rng = np.random.default_rng(0)
    common = rng.lognormal(0, 1, 60)
    a, b = common * 1.2, common * rng.normal(1, 0.02, 60)
    paired, shuffled = interval(a, b), interval(a, rng.permutation(b))
    assert paired.high - paired.low < 0.1 * (shuffled.high - shuffled.low)


@given(TIMES, st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_change_of_unit_leaves_the_ratio(a, unit):
    b = [1 + x * 0.9 + i % 3 for i, x in enumerate(a)]
    plain = interval(a, b, num_resamples=200)
    scaled = interval([x * unit for x in a], [x * unit for x in b], num_resamples=200)
    assert scaled == plain


@given(TIMES)
def test_the_interval_holds_between_the_extreme_pairs(a):
    b = [1 + x * 0.9 + i % 3 for i, x in enumerate(a)]
    ratios = np.array(a) / np.array(b)
    found = interval(a, b, num_resamples=200)
    assert ratios.min() - 1e-9 <= found.low <= found.high <= ratios.max() + 1e-9


@pytest.mark.parametrize(
    ("a", "b", "value"), [([3.0, 1.0, 8.5], [3.0, 1.0, 8.5], 1.0), ([0.3, 0.9, 2.1], [0.1, 0.3, 0.7], 3.0)]
)
def test_constant_pairs_have_no_interval_width(a, b, value):
    found = interval(a, b)
    assert found.low == found.high == found.estimate == pytest.approx(value)


def test_resamples_on_one_side_fall_back_to_percentiles():
    found = interval([1.0, 1.0], [1.0, 2.0], num_resamples=1)
    assert math.isfinite(found.low)
    assert math.isfinite(found.high)


def test_single_pair_has_estimate_and_no_interval():
    found = interval([3.0], [2.0])
    assert found.estimate == 1.5
    assert np.isnan([found.low, found.high]).all()


def test_the_seed_and_the_level_make_the_interval():
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(0, 1, 30), rng.lognormal(0, 1, 30)
    assert interval(a, b, seed=7) == interval(a, b, seed=7) != interval(a, b, seed=8)
    widths = [(i := interval(a, b, level=level)).high - i.low for level in (0.5, 0.9, 0.99)]
    assert widths == sorted(widths)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        ([], [], {}, ("pair",)),
        ([1.0], [1.0, 2.0], {}, ("length",)),
        ([[1.0]], [[1.0]], {}, ("flat",)),
        ([1.0, math.nan], [1.0, 2.0], {}, ("finite",)),
        ([1.0, 2.0], [1.0, 0.0], {}, ()),
        ([-1.0, 2.0], [1.0, 2.0], {}, ()),
        ([1.0, 2.0], [1.0, 2.0], {"level": 1.0}, ("level",)),
        ([1.0, 2.0], [1.0, 2.0], {"num_resamples": 0}, ("num_resamples",)),
    ],
)
def test_bad_input_is_a_sentence(a, b, options, message):
    with refused(ConfigError, naming=message):
        interval(a, b, **options)


def test_a_means_interval_covers_it_as_promised():
    rng = np.random.default_rng(0)
    spans = [mean_of_few(rng.normal(7.0, 2.0, 5)) for _ in range(2000)]
    assert np.mean([span.low <= 7.0 <= span.high for span in spans]) == pytest.approx(0.95, abs=0.015)


def test_a_single_measurement_has_no_interval():
    mean = mean_of_few([3.0])
    assert np.isnan([mean.low, mean.high]).all()
    assert non_overlapping_pairs([(mean.low, mean.high), (9.0, 10.0)]) == []


def test_over_all_pairs_tau_is_the_usual_one():
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = rng.random(7), rng.random(7)
        pairs = [(i, j) for i in range(7) for j in range(i + 1, 7)]
        assert kendall_tau(a, b, pairs) == pytest.approx(kendalltau(a, b).statistic)


def test_tau_asks_only_the_pairs_that_differ():
    spans = [(1.0, 1.4), (1.3, 1.6), (2.0, 2.1), (5.0, 6.0)]
    pairs = non_overlapping_pairs(spans)
    assert (0, 1) not in pairs
    assert len(pairs) == 5
    measured = [sum(span) / 2 for span in spans]
    assert kendall_tau(measured, [1.5, 1.2, 2.0, 5.5], pairs) == 1.0
    assert kendall_tau(measured, [4.0, 3.0, 2.0, 1.0], pairs) == -1.0
    assert kendall_tau(measured, [2.0, 2.0, 2.0, 2.0], pairs) == 0.0
    assert kendall_tau(measured, measured, []) is None


def test_few_values_are_no_surer_than_their_error():
    assert student_margin(2.0, 4, 0.9) == pytest.approx(2.0 * t.ppf(0.95, 4), rel=1e-12)
    assert mean_of_few([1.0, 1.0, 1.0]).low == 1.0
    assert mean_of_few([1.0, 1.0, 1.0], least_error=0.1).high == pytest.approx(1.0 + student_margin(0.1, 2))


def test_the_intraclass_correlation_is_the_groups_share():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4000, 1)) * 2 + rng.normal(size=(4000, 4))
    between, within = 4 * values.mean(axis=1).var(ddof=1), values.var(axis=1, ddof=1).mean()
    assert intraclass_correlation(between, within, 4) == pytest.approx(0.8, abs=0.02)
    assert intraclass_correlation(1.0, 2.0, 4) == 0.0
    assert intraclass_correlation(0.0, 0.0, 4) is None
