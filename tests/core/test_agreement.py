"""Intervals, pairs that differ, Kendall's tau; and what rollouts come to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from tltlab.agreement import kendall_tau, mean_interval, pairs_apart, pairs_apart_by_round
from tltlab.errors import ConfigError


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    spans = [mean_interval(rng.normal(7.0, 2.0, 5)) for _ in range(2000)]
    assert np.mean([low <= 7.0 <= high for low, high in spans]) == pytest.approx(0.95, abs=0.015)


def test_one_measurement_has_no_interval_and_is_apart_from_nothing():
    low, high = mean_interval([3.0])
    assert math.isnan(low)
    assert math.isnan(high)
    assert pairs_apart([(low, high), (9.0, 10.0)]) == []


def test_an_interval_needs_finite_measurements():
    for values in ([], [1.0, math.nan]):
        with pytest.raises(ConfigError, match="finite"):
            mean_interval(values)


def test_over_all_pairs_tau_is_the_usual_one():
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = rng.random(7), rng.random(7)
        pairs = [(i, j) for i in range(7) for j in range(i + 1, 7)]
        assert kendall_tau(a, b, pairs) == pytest.approx(kendalltau(a, b).statistic)


def test_tau_asks_only_the_pairs_that_differ():
    spans = [(1.0, 1.4), (1.3, 1.6), (2.0, 2.1), (5.0, 6.0)]
    pairs = pairs_apart(spans)
    assert (0, 1) not in pairs
    assert len(pairs) == 5
    measured = [sum(span) / 2 for span in spans]
    assert kendall_tau(measured, [1.5, 1.2, 2.0, 5.5], pairs) == 1.0
    assert kendall_tau(measured, [4.0, 3.0, 2.0, 1.0], pairs) == -1.0
    assert kendall_tau(measured, [2.0, 2.0, 2.0, 2.0], pairs) == 0.0
    assert kendall_tau(measured, measured, []) is None


def test_what_rounds_have_in_common_does_not_hide_a_difference_within_them():
    rounds = np.array([1.0, 3.0, 9.0, 2.0, 5.0])
    measured = np.stack([rounds, rounds + 0.1 + 0.01 * np.arange(5), rounds + 0.2 * np.array([1, -1, 1, -1, 0])])
    assert pairs_apart([mean_interval(row) for row in measured]) == []
    assert pairs_apart_by_round(measured) == [(0, 1)]
