"""Policies and traces as people give them in Python, one or many at once: the numbers are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tltlab
from bench.simulator import COSTS, example_bandit, random_tables
from tests.refused import refused
from tltlab import ConfigError, Selector, compare, load_policy, read, simulate, timeline, tune, what_if
from tltlab.calibration.api import calibrate
from tltlab.errors import TraceError
from tltlab.lengths.generate import log_normal
from tltlab.sim.study.sweep import sweep
from tltlab.sim.study.systems import compare_systems
from tltlab.sim.scenario import Scenario
from tltlab.state import StepState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import check_selector

from ..workloads import TINY, typed

LENGTHS = [60] * 30 + [1500] * 2
SETTINGS = {"workers": 2, "costs": "cpu-small", "acceptance": "geometric:0.7"}


class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def __init__(self, border: int = 8) -> None:
        self.border = border

    def choose(self, state: StepState) -> Strategy:
        return self.strategies[state.batch <= self.border]


class Drawing(Halving):
    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.rng = rng


class Misspelt(Halving):
    def choose(self, state: StepState) -> Strategy:
        return self.strategies[state.batsh <= 8]


class Late(Halving):
    """Fails long after the contract's story has ended, in a library that it calls."""

    calls = 0

    def choose(self, state: StepState) -> Strategy:
        self.calls += 1
        return self.strategies[0 if self.calls < 1000 else np.zeros(3).reshape(2, 2)]


class LateName(Late):
    def choose(self, state: StepState) -> Strategy:
        self.calls += 1
        batch = state.batch
        return self.strategies[0] if self.calls < 1000 else self.strategies[batch + bacth]  # noqa: F821


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


def test_a_comparison_is_paired(scenario: Scenario):
    found = compare(scenario, {"plain": load_policy("none"), "again": load_policy("none"), **random_tables(1)})
    again = found.set_index("policy").loc["again"]
    assert (again["ratio"], again["ratio_low"], again["ratio_high"]) == (1.0, 1.0, 1.0)
    table = found.set_index("policy").loc["table 0"]
    assert table["ratio_low"] <= table["ratio"] <= table["ratio_high"] < 1.0
    assert (found["regret"] >= 0).all()


def test_workers_get_copies_of_a_selector(scenario: Scenario):
    learner = load_policy("beg-mab").build(np.random.default_rng(0))
    before = learner.state_dict()
    first, again = (sweep(scenario, [learner])["makespan_s"].tolist() for _ in range(2))
    assert first == again
    assert learner.state_dict() == before


def test_a_list_goes_by_the_names_in_it(scenario: Scenario):
    found = compare(scenario, [Halving, "none", Strategy.chain("ngram", 2)])
    assert set(found["policy"]) == {"Halving", "none", "ngram:2"}
    assert set(compare(scenario, "none, beg-mab")["policy"]) == {"none", "beg-mab"}


def test_policies_are_given_in_many_ways(tmp_path: Path):
    load_policy("table").write(tmp_path / "mine.json")
    spec = {"kind": "fixed", "strategy": {"drafter": "ngram", "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5}}
    drawing, file, chain = Drawing(np.random.default_rng(0)), tmp_path / "mine.json", Strategy.chain("ngram", 4)
    own = {"kind": "table", "rows": [{"min_batch": 1, "strategy": chain}, {"min_batch": 9, "strategy": NO_SPECULATION}]}
    given = ["none", Halving, drawing, spec, file, chain, Halving(), own, load_policy(Halving)]
    given.append(f"{__name__}:Halving")
    alone = [simulate(LENGTHS, policy, **SETTINGS).makespan_s for policy in given]
    assert alone[3] == alone[5]
    assert len({alone[at] for at in (1, 2, 6, 8, 9)}) == 1
    # A table's choice holds at once, that of a class that may learn from the next iteration on.
    assert alone[7] == pytest.approx(alone[1], rel=1e-3)
    assert alone[1] < alone[0]
    rows = compare(LENGTHS, given[:5], **SETTINGS)
    assert sorted(rows["makespan_s"]) == pytest.approx(sorted(alone[:5]), rel=1e-12)
    with pytest.raises(ConfigError, match="ngram:4"):
        compare(LENGTHS, [spec, chain], **SETTINGS)
    named = compare(LENGTHS, dict(zip("abcdefghij", given, strict=True)), **SETTINGS)
    expected = dict(zip("abcdefghij", alone, strict=True))
    assert dict(zip(named["policy"], named["makespan_s"], strict=True)) == pytest.approx(expected)


def test_traces_are_given_in_many_ways():
    frame = pd.DataFrame({"length": LENGTHS})
    sources = [LENGTHS, np.array(LENGTHS), frame, frame["length"], read(frame)]
    assert len({simulate(source, Halving, **SETTINGS).makespan_s for source in sources}) == 1
    by_path = simulate(TINY, Halving, acceptance="geometric:0.7")
    assert by_path.policy == "Halving"
    assert by_path.makespan_s == simulate(read(TINY), Halving(), acceptance="geometric:0.7").makespan_s
    assert calibrate(TINY).costs == calibrate(read(TINY)).costs
    assert timeline(TINY, compare=by_path).axes
    assert sweep(TINY, "none")["makespan_s"].tolist() == sweep(Scenario.of(TINY), "none")["makespan_s"].tolist()
    given, loaded = (compare_systems(trace, "verl")["makespan_s"].tolist() for trace in (TINY, read(TINY)))
    assert given == loaded


def test_results_are_tables_and_pictures_in_a_notebook():
    result = simulate(LENGTHS, Halving, **SETTINGS)
    assert "makespan_s" in result._repr_html_()
    assert result.to_frame()["makespan_s"].tolist() == [result.makespan_s]
    assert result.to_frame()["lower_bound_s"][0] <= result.makespan_s
    assert result.plot().axes
    rows = compare(LENGTHS, ["none", Halving], **SETTINGS)
    assert type(rows.to_frame()) is pd.DataFrame
    assert [label.get_text() for label in rows.plot().axes[0].get_yticklabels()] == ["Halving", "none"]
    tuned = tune(np.array([[30] * 12 + [200] * 2] * 4), trials=0, repeats=1, depths=(2,), **SETTINGS)
    assert tuned.to_frame()["name"].tolist() == [row.name for row in tuned.candidates]
    assert tuned.plot().axes


def test_the_package_states_its_version_and_its_names():
    assert re.match(r"\d+\.\d+", tltlab.__version__)
    assert {"simulate", "compare", "tune", "what_if", "__version__"} <= set(dir(tltlab))
    assert (Path(tltlab.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("call", "naming"),
    [
        (lambda: simulate(TINY, 7), (7,)),
        (lambda: simulate(TINY, int), ()),
        (lambda: simulate(TINY, {"kind": "beg-map"}), ("beg-map",)),
        (lambda: simulate(TINY, Halving("8")), ("TypeError", "test_sweep")),
        (lambda: compare(TINY, 3), (3,)),
        (lambda: tune([]), ()),
        (lambda: sweep(TINY, {}), ("policy",)),
        (lambda: compare(TINY, [Halving, Halving(2)]), ()),
        (lambda: compare(TINY, "none", jobs=0), ("jobs",)),
        (lambda: compare(TINY, "none", repeats=0), ("repeats",)),
        (lambda: compare(TINY, "none", baseline="tlt"), ("tlt",)),
        # A misspelt keyword is answered with the nearest.
        (lambda: simulate(LENGTHS, worker=2), ("worker",)),
        (lambda: simulate(LENGTHS, record_iteration=True), ("record_iterations",)),
        (lambda: compare(LENGTHS, "none", repeat=2), ("repeat",)),
        (lambda: compare(LENGTHS, "none", cost="cpu-small"), ("costs",)),
        (lambda: tune(LENGTHS, trails=3), ("trails",)),
        (lambda: what_if(LENGTHS, gpu="8xH100"), ("gpu", "what_if")),
        # What a policy raises is told with its place.
        (lambda: simulate(LENGTHS, Misspelt, **SETTINGS), ("AttributeError", "batsh", "batch", "test_sweep")),
        (lambda: simulate(LENGTHS, Late, **SETTINGS), ("ValueError", "test_sweep")),
        (lambda: simulate(LENGTHS, LateName, **SETTINGS), ("LateName", "NameError", "batch", "test_sweep")),
    ],
)
def test_what_cannot_be_simulated_is_refused(call: Callable[[], object], naming: tuple):
    with refused(ConfigError, naming=naming):
        call()


def test_what_is_no_trace_is_refused():
    for run in (lambda: tune(3), lambda: simulate(3, "none"), lambda: simulate(None, "none")):
        with refused(TraceError):
            run()


@pytest.mark.parametrize("source", [Halving, Halving(), Drawing, lambda rng: Drawing(rng=rng)])
def test_the_contract_takes_whatever_builds_a_selector(source):
    check_selector(source)


def test_the_command_shows_where_a_policy_failed(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("\n".join(map(str, LENGTHS)))
    (tmp_path / "misspelt.py").write_text(
        "from tltlab import NO_SPECULATION, Selector\nclass Mine(Selector):\n    strategies = (NO_SPECULATION,)\n"
        "    def choose(self, state):\n        return self.strategies[state.wating]\n"
    )
    code, _, said = typed(capsys, "simulate", "lengths.csv", "--workers", 2, "--policy", "misspelt:Mine")
    assert code == 2
    (line,) = [line for line in said.splitlines() if line.startswith("tltlab:")]
    assert "waiting" in line
    assert "misspelt.py, line 5" in line
