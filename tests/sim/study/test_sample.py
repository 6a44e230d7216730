"""Answers from a sample of RL steps: near those of the whole run, as sure as costs allow, the same on any number of
processes."""

import json
import os
import pickle

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tltlab import ConfigError, compare, read, what_if
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.policies.policy import load_policy
from tltlab.sim.config import SimulationConfig
from tltlab.sim.scenario import Scenario
from tltlab.sim.study import jobs
from tltlab.sim.study.sample import Scenarios

from ..workloads import TINY, typed

NUM = 60
ON = {"workers": 2, "costs": "cpu-small", "acceptance": "all=geometric:0.7"}
MACHINE = {"gpus": "2xH100", "model": "Qwen2.5-7B", "acceptance": "all=geometric:0.7"}
PLAIN_OR_NOT = ["none", "ngram:4@4"]


def run_of(medians, sigma, responses=16):
    """A run of one RL step per median."""
    rng = np.random.default_rng(0)
    rows = [
        (step, f"p{i // 4}", int(n))
        for step, median in enumerate(medians)
        for i, n in enumerate(np.minimum(rng.lognormal(np.log(median), sigma, responses) + 1, 4000))
    ]
    return read(pd.DataFrame(rows, columns=["step", "prompt_id", "length"]))


@pytest.fixture(scope="module")
def growing():
    return run_of(np.linspace(100, 600, NUM), 0.2)


@pytest.fixture(scope="module")
def uneven():
    """RL steps with one long response, and without."""
    return run_of(np.where(np.arange(NUM) % 7 < 3, 20, 600), 1.2)


def test_a_sample_keeps_the_trend_of_the_run(growing):
    tables = [compare(growing, PLAIN_OR_NOT, **MACHINE, rl_steps=steps) for steps in (None, range(NUM), range(8))]
    sampled, whole, first = (table.set_index("policy")["makespan_s"]["none"] for table in tables)
    assert [table.attrs["num_rl_steps"] for table in tables] == [8, NUM, 8]
    assert sampled == pytest.approx(whole, rel=0.1)
    assert first < 0.6 * whole


def test_a_sample_grows_until_costs_err_more(uneven, growing):
    # Nobody knows how far these costs are off: the ratios' intervals are to be within a hundredth.
    unknown, even = (compare(trace, PLAIN_OR_NOT, **ON).attrs["num_rl_steps"] for trace in (uneven, growing))
    # Those of a model with experts are off by a third: they could not say more.
    known = compare(uneven, PLAIN_OR_NOT, **MACHINE | {"model": "Qwen3-30B-A3B"}).attrs["num_rl_steps"]
    assert unknown > known == 8
    assert unknown >= even
    with refused(ConfigError, naming=("99",)):
        compare(uneven, PLAIN_OR_NOT, **ON, rl_steps=[99])


@pytest.mark.parametrize("online_updates", [0, 2])
def test_drafter_is_as_old_as_in_run(growing, online_updates):
    aging = FreshAcceptance(base=GeometricAcceptance(alpha=0.8))
    config = SimulationConfig(**ON | {"acceptance": aging}, online_updates=online_updates)
    policy = load_policy("learned:4@64")
    whole = Scenario.of(growing, config).rollouts(policy)
    some = Scenarios(growing, config).of([3, 41]).rollouts(policy)
    assert [rollout.makespan_s for rollout in some] == [whole[at].makespan_s for at in (3, 41)]


def test_scenarios_of_the_same_requests_share_them(growing):
    scenarios = Scenarios(growing, SimulationConfig(**ON))
    first, other = scenarios.of([1, 2]), scenarios.of([1, 2], acceptance=GeometricAcceptance(alpha=0.1))
    assert (id(other.steps), id(other.queues)) == (id(first.steps), id(first.queues))
    assert other.acceptance != first.acceptance
    assert scenarios.of([1, 2], workers=1).queues != first.queues
    # Other processes receive these RL steps alone.
    sizes = [len(pickle.dumps(scenarios.of(list(range(num))))) for num in (2, NUM)]
    assert 4 * sizes[0] < sizes[1]


COMMANDS = [
    ("what-if", "TRACE", "--systems", "verl"),
    ("compare", "TRACE", "--gpus", "2xH100", "--policies", "none,learned:4@4"),
    ("compare", "TRACE", "--gpus", "2xH100", "--systems", "verl,tlt-base"),
    ("compare", "TRACE", "--gpus", "2xH100,4xH100", "--policies", "learned:4@4"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_report_the_number_of_rl_steps(command, tmp_path, capsys):
    run_of(np.full(30, 50), 0.2, responses=4).write(tmp_path / "run")
    words = [str(tmp_path / "run") if word == "TRACE" else word for word in command]
    counts = []
    for option in ((), ("--rl-steps", "5:9"), ("--rl-steps", "all")):
        code, out, _ = typed(capsys, *words, *option, "--json")
        assert code == 0
        told = json.loads(out)
        counts.append((told["num_rl_steps"], told["num_rl_steps_of"]))
    assert counts == [(8, 30), (4, 30), (30, 30)]
    assert "8 of 30 RL steps, spread" in " ".join(typed(capsys, *words)[1].split())


ASKED = {
    "compare": lambda jobs: compare(TINY, "none,beg-mab,adaptive", **ON, jobs=jobs),
    "systems": lambda jobs: compare(TINY, systems="verl,tlt,das", **ON, jobs=jobs, repeats=2),
    "grid": lambda jobs: compare(TINY, "beg-mab", **ON | {"workers": [1, 2, 3]}, mode="sampled", jobs=jobs),
    "what-if": lambda jobs: what_if(TINY, systems="verl,tlt", jobs=jobs).json() | {"wall_s": 0.0},
}  # fmt: skip


def test_long_tasks_are_shared_from_the_first_on():
    shared = (list(jobs.side_by_side([os.getpid] * 3, jobs=2, expected_s=[seconds] * 3)) for seconds in (9.0, 0.01))
    assert [os.getpid() in pids for pids in shared] == [False, True]


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_processes_do_not_change_an_answer(ask, monkeypatch):
    expected = ask(1)
    monkeypatch.setattr(jobs, "ALONE_S", 0.0)
    for num in (2, None):
        found = ask(num)
        if isinstance(found, pd.DataFrame):
            assert found.equals(expected)
            assert str(found.attrs) == str(expected.attrs)
        else:
            assert found == expected
