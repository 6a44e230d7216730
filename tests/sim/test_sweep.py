"""Many policies at once: the numbers are those of one at a time, wherever they run."""

from __future__ import annotations

import pandas as pd
import pytest

from tltlab.bench.simulator import COSTS, example_bandit, random_tables
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import load_policy
from tltlab.sim.scenario import Scenario
from tltlab.sim.sweep import compare, sweep


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    trace = log_normal(prompts=8, rl_steps=4, median=300, cap=2000, workers=2)
    return Scenario.of(trace, costs=COSTS, acceptance="geometric:0.7", decision_block=8)


def test_a_sweep_is_its_simulations(scenario: Scenario):
    policies = random_tables(3) | {"bandit": example_bandit()}
    found = sweep(scenario, policies)
    expected = [r.makespan_s for policy in policies.values() for r in scenario.rollouts(policy)]
    assert found["makespan_s"].tolist() == expected
    assert found["policy"].tolist() == [name for name in policies for _ in range(4)]


def test_processes_do_not_change_the_numbers(scenario: Scenario):
    policies = random_tables(5)
    pd.testing.assert_frame_equal(sweep(scenario, policies, jobs=2), sweep(scenario, policies))


@pytest.mark.engine
def test_a_ray_cluster_does_not_change_the_numbers(scenario: Scenario):
    policies = random_tables(3)
    pd.testing.assert_frame_equal(sweep(scenario, policies, jobs=2, ray_address="local"), sweep(scenario, policies))


def test_a_comparison_is_paired(scenario: Scenario):
    found = compare(scenario, {"plain": load_policy("none"), "again": load_policy("none"), **random_tables(1)})
    again = found.set_index("policy").loc["again"]
    assert (again["ratio"], again["ratio_low"], again["ratio_high"]) == (1.0, 1.0, 1.0)
    table = found.set_index("policy").loc["table 0"]
    assert table["ratio_low"] <= table["ratio"] <= table["ratio_high"] < 1.0
    assert (found["regret"] >= 0).all()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"jobs": 0}, "jobs"), ({"repeats": 0}, "repeats"), ({"baseline": "tlt"}, "baseline 'tlt'")],
)
def test_bad_input_is_a_sentence(scenario: Scenario, options: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        compare(scenario, random_tables(2), **options)
    with pytest.raises(ConfigError, match="no policy"):
        sweep(scenario, {})


@pytest.mark.engine
def test_an_unknown_cluster_is_a_sentence(scenario: Scenario):
    with pytest.raises(ConfigError, match="no Ray cluster at 'nonsense://x'"):
        sweep(scenario, random_tables(2), jobs=2, ray_address="nonsense://x")
