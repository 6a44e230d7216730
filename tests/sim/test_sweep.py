"""Many policies at once: the numbers are those of one at a time, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.simulator import COSTS, example_bandit, random_tables
from tests.refused import refused
from tltlab.calibration.api import calibrate
from tltlab.errors import ConfigError, InputError
from tltlab.lengths.generate import log_normal
from tltlab.policies.policy import load_policy
from tltlab.policies.selector import Selector
from tltlab.report.timeline import timeline
from tltlab.sim.scenario import Scenario
from tltlab.sim.simulate import simulate
from tltlab.sim.sweep import compare, sweep
from tltlab.sim.systems import compare_systems
from tltlab.sim.tuning.tune import tune
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import read

TINY = Path(__file__).resolve().parents[2] / "traces" / "tiny"


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


@pytest.mark.engine
def test_a_ray_cluster_does_not_change_the_numbers(scenario: Scenario):
    policies = random_tables(3)
    pd.testing.assert_frame_equal(sweep(scenario, policies, jobs=2, ray_address="local"), sweep(scenario, policies))


def test_a_local_cluster_is_one_of_its_own_whoever_elses_runs_on_the_machine(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str | None] = []

    def init(address: str | None, **_: object) -> None:
        asked.append(address)
        raise ConnectionError("it does not start")

    monkeypatch.setattr("ray.init", init)
    with refused(ConfigError):
        sweep(scenario, random_tables(1), ray_address="local")
    assert asked == ["local"], "Ray takes None for any cluster that it finds"


def test_a_comparison_is_paired(scenario: Scenario):
    found = compare(scenario, {"plain": load_policy("none"), "again": load_policy("none"), **random_tables(1)})
    again = found.set_index("policy").loc["again"]
    assert (again["ratio"], again["ratio_low"], again["ratio_high"]) == (1.0, 1.0, 1.0)
    table = found.set_index("policy").loc["table 0"]
    assert table["ratio_low"] <= table["ratio"] <= table["ratio_high"] < 1.0
    assert (found["regret"] >= 0).all()


class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def __init__(self, border: int = 8) -> None:
        self.border = border

    def choose(self, state: StepState) -> Strategy:
        return self.strategies[state.batch <= self.border]


def test_workers_get_copies_of_a_selector(scenario: Scenario):
    learner = load_policy("beg-mab").build(np.random.default_rng(0))
    before = learner.state_dict()
    first, again = (sweep(scenario, [learner])["makespan_s"].tolist() for _ in range(2))
    assert first == again
    assert learner.state_dict() == before


def test_a_list_goes_by_the_names_of_what_is_in_it(scenario: Scenario):
    assert set(compare(scenario, [Halving, "none", Strategy.chain("ngram", 2)])["policy"]) == {
        "Halving", "none", "ngram:2",
    }  # fmt: skip
    assert set(compare(scenario, "none, beg-mab")["policy"]) == {"none", "beg-mab"}
    with refused(ConfigError):
        compare(scenario, [Halving, Halving(2)])


def test_a_trace_is_given_by_its_path_too():
    trace, settings = TINY, {"acceptance": "geometric:0.7"}
    by_path = simulate(trace, Halving, **settings)
    assert by_path.policy == "Halving"
    assert calibrate(trace).costs == calibrate(read(trace)).costs
    assert timeline(trace, compare=by_path).axes
    assert by_path.makespan_s == simulate(read(trace), Halving(), **settings).makespan_s
    assert sweep(trace, "none")["makespan_s"].tolist() == sweep(Scenario.of(trace), "none")["makespan_s"].tolist()
    assert (
        compare_systems(trace, "verl")["makespan_s"].tolist()
        == compare_systems(read(trace), "verl")["makespan_s"].tolist()
    )


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: simulate(TINY, 7), ("7",)),
        (lambda: simulate(TINY, int), ()),
        (lambda: simulate(TINY, {"kind": "beg-map"}), ("beg-map",)),
        (lambda: simulate(TINY, Halving("8")), ("TypeError", "test_sweep")),
        (lambda: simulate(None, "none"), ()),
        (lambda: compare(TINY, 3), ("3",)),
        (lambda: tune(3), ("3",)),
        (lambda: tune([]), ()),
    ],
)
def test_what_is_no_policy_or_no_trace_is_a_sentence(call: Callable[[], object], complaint: tuple):
    with refused(InputError, naming=complaint):
        call()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"jobs": 0}, ("jobs",)), ({"repeats": 0}, ("repeats",)), ({"baseline": "tlt"}, ("tlt",))],
)
def test_bad_input_is_a_sentence(scenario: Scenario, options: dict, complaint: tuple):
    with refused(ConfigError, naming=complaint):
        compare(scenario, random_tables(2), **options)
    with refused(ConfigError, naming=("policy",)):
        sweep(scenario, {})


@pytest.mark.engine
def test_an_unknown_cluster_is_a_sentence(scenario: Scenario):
    with refused(ConfigError, naming=("nonsense://x",)):
        sweep(scenario, random_tables(2), jobs=2, ray_address="nonsense://x")
