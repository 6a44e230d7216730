"""Policies over regimes: all of them against the best fixed strategy in hindsight."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench import contest
from bench.contest import ADAPTIVE, ORACLE, SOURCES, judged, verdict
from bench.regimes import best_fixed, lasting, regimes
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.policies.policy import load_policy

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture(scope="module")
def found():
    return {regime.name: regime for regime in regimes(TRACES, 2)}


@pytest.fixture(scope="module")
def of_tiny(found):
    return {row["policy"]: row for row in judged(found["tiny"], [0])}


def test_regimes_that_change_have_phases(found):
    assert len(found) >= 12
    assert {"tiny", "gcd-small", "subset-sum-small", "h100-smoke"} <= set(found)
    for name in ("drafter improves", "drafter goes stale", "machine slows down"):
        assert len(found[name].phases) == 2
    wrong = found["costs wrong, dearer"]
    strategy = wrong.strategies[4]
    true, told = (costs.iteration(strategy).seconds(4, 0.0) for costs in (wrong.phases[0].costs, wrong.file_costs))
    assert true == pytest.approx(1.3 * told)


def test_selectors_live_through_all_phases():
    policy = lasting(load_policy("adaptive"))
    built = [policy.build(np.random.default_rng([0, i % 2])) for i in range(4)]
    assert built[0] is built[2]
    assert built[1] is built[3]
    assert built[0] is not built[1]


def test_every_policy_is_held_against_best_fixed_strategy(found, of_tiny):
    tiny, rows = found["tiny"], of_tiny
    assert set(rows) == set(SOURCES)
    best, seconds = best_fixed(tiny, [0])
    fixed = {s: tiny.seconds(load_policy(s), 0).sum() for s in tiny.strategies}
    assert fixed[best] == min(fixed.values())
    assert rows["none"]["ratio"] == pytest.approx(fixed[tiny.strategies[0]] / seconds[0].sum())
    assert rows[ORACLE]["over_oracle"] == pytest.approx(1.0)
    assert rows[ADAPTIVE]["ratio_low"] <= rows[ADAPTIVE]["ratio"] <= rows[ADAPTIVE]["ratio_high"]


@pytest.mark.parametrize(("ratios", "words"), [((0.9, 1.01), "it clears"), ((0.9, 1.03), "does not clear")])
def test_the_verdict_goes_by_the_worst_regime(ratios, words):
    row = {"over_oracle": 1.01}
    rows = [row | {"regime": f"r{i}", "policy": ADAPTIVE, "ratio": ratio} for i, ratio in enumerate(ratios)]
    text = verdict(pd.DataFrame([*rows, row | {"regime": "r0", "policy": "goodput", "ratio": 0.85}]))
    assert all(fact in text for fact in (words, "(r1)", "goodput"))


def test_a_regime_that_is_none_is_named(found, monkeypatch):
    monkeypatch.setattr(contest, "regimes", lambda *asked: tuple(found.values()))
    with refused(ConfigError, naming=("'tinny'", "h100-smoke")):
        contest.bench_regimes(["tinny"], traces=TRACES, rl_steps=1, seeds=[0], jobs=1)
