"""`compare`: each row is what simulating it alone gives, however policies, traces and lists of values are given."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tltlab
from bench.simulator import COSTS, example_bandit, random_tables
from tests.refused import refused
from tltlab import ConfigError, Selector, compare, load_policy, read, simulate, timeline, tune, what_if
from tltlab.calibration.api import calibrate
from tltlab.costs.deployment import Deployment
from tltlab.errors import TraceError
from tltlab.lengths.generate import log_normal
from tltlab.sim.study.jobs import counted
from tltlab.sim.study.study import Cell
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.testing import check_selector

from ..workloads import TINY, grouped, typed

LENGTHS = [60] * 30 + [1500] * 2
SETTINGS = {"workers": 2, "costs": "cpu-small", "acceptance": "geometric:0.7"}
FRAME = grouped([[30 + 40 * (n % 4) + 900 * (n == 7) + step for n in range(16)] for step in range(2)], 20)
GRID = {"costs": "cpu-small", "workers": [1, 2], "acceptance": ["0.5", "0.8"]}
TRACE = log_normal(prompts=8, rl_steps=4, median=300, cap=2000, workers=2)
ON = {"costs": COSTS, "acceptance": "geometric:0.7", "decision_block": 8}


class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def __init__(self, border=8):
        self.border = border

    def choose(self, state):
        return self.strategies[state.batch <= self.border]


class Drawing(Halving):
    def __init__(self, rng):
        super().__init__()
        self.rng = rng


class Late(Halving):
    """Fails long after the contract's story has ended, in a library that it calls."""

    calls = 0

    def choose(self, state):
        self.calls += 1
        return self.strategies[0 if self.calls < 1000 else np.zeros(3).reshape(2, 2)]


class LateName(Late):
    def choose(self, state):
        self.calls += 1
        batch = state.batch
        return self.strategies[0] if self.calls < 1000 else self.strategies[batch + bacth]  # noqa: F821


def test_a_comparison_is_its_simulations_in_pairs():
    policies = {"plain": load_policy("none"), "again": load_policy("none")} | random_tables(3)
    policies |= {"bandit": example_bandit()}
    found = compare(TRACE, policies, **ON).set_index("policy")
    alone = {name: simulate(TRACE, policy, **ON) for name, policy in policies.items()}
    for name, result in alone.items():
        row = found.loc[name]
        assert row["makespan_s"] == pytest.approx(result.makespan_s, rel=1e-12)
        assert row["fixed_regret"] == pytest.approx(result.makespan_s / result.summary["fixed_bound_s"] - 1, rel=1e-12)
        assert row["ratio"] == pytest.approx(result.makespan_s / alone["plain"].makespan_s, rel=1e-12)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["speed_up_high"] == pytest.approx(1 / row["ratio_low"])
    assert found.loc["again", ["ratio", "ratio_low", "ratio_high"]].tolist() == [1.0, 1.0, 1.0]
    assert found.loc["table 0", "ratio_high"] < 1.0


def test_caps_and_gpus_are_axes():
    found = compare(FRAME, "none", max_response_tokens=[100, 50], gpus=["2xH100"], acceptance="0.7")
    machine = Deployment.of("2xH100", "Qwen2.5-7B", tokens=200)
    assert found.attrs["axes"] == {"gpus": ["2xH100"], "max_response_tokens": [100, 50]}
    for row in found.to_dict("records"):
        cap = row["max_response_tokens"]
        expected = simulate(FRAME, costs=machine.costs, workers=machine.workers, max_response_tokens=cap)
        assert row["makespan_s"] == pytest.approx(expected.makespan_s, rel=1e-12)
        assert row["step_s"] > row["makespan_s"]


def test_systems_at_points_equal_their_comparison():
    how = {"systems": "tlt-base,streamrl", "acceptance": "0.7"}
    found = compare(FRAME, gpus=["1xH100", "2xH100"], **how)
    assert found["system"].tolist() == ["verl", "tlt-base", "streamrl"] * 2
    for gpus, rows in found.groupby("gpus"):
        expected = compare(FRAME, gpus=gpus, **how | {"systems": "verl,tlt-base,streamrl"}).set_index("system")
        for row in rows.to_dict("records"):
            alone = expected.loc[row["system"]]
            for name in ("makespan_s", "step_s", "ratio", "step_ratio", "step_speed_up_low", "regret"):
                assert row[name] == alone[name] or (row[name] != row[name] and alone[name] != alone[name])
    (panel,) = found.plot().axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("gpus", "system")
    bare = compare(FRAME, systems="tlt-base", workers=[1, 2], costs="cpu-small")
    assert "step_s" not in bare
    assert [bool(notes) for notes in bare["defaults"]] == [False, True] * 2
    assert "seer-siblings" in bare["defaults"][1][0]


def test_heat_maps_have_panels_or_rows_of_policies():
    (axes,) = compare(FRAME, "ngram:4", **GRID).plot().axes
    assert axes.get_title(loc="left").startswith("ngram:4: speed-up")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("workers", "acceptance")
    (axes,) = compare(FRAME, "ngram:4", **GRID | {"acceptance": "0.8"}).plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["none", "ngram:4"]


def test_an_interrupted_comparison_continues_with_more_values(tmp_path, monkeypatch):
    journal, simulated = tmp_path / "deep" / "s.cells", []
    rows = Cell.rows
    monkeypatch.setattr(Cell, "rows", lambda cell: (simulated.append(cell.label), rows(cell))[1])

    def twice():
        if len(simulated) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), counted(twice):
        compare(FRAME, "ngram:4", **GRID, journal=journal)
    with journal.open("a") as file:
        file.write('["half a li')  # as a killed process leaves it
    more = GRID | {"workers": [1, 2, 3]}
    expected = compare(FRAME, "ngram:4", **more)
    for again in (len(expected) - 2, 0):
        simulated.clear()
        found = compare(FRAME, "ngram:4", **more, journal=journal)
        assert (found.equals(expected), found.attrs, len(simulated)) == (True, expected.attrs, again)
    others = {"policies": "ngram:8"}, {"systems": "verl"}, {"policies": "ngram:4", "seed": 1}
    for other in others:
        with refused(ConfigError, naming=(journal,)):
            compare(FRAME, **more, journal=journal, **other)


def test_workers_get_copies_of_a_selector():
    learner = load_policy("beg-mab").build(np.random.default_rng(0))
    before = learner.state_dict()
    first, again = (compare(TRACE, [learner], **ON)["makespan_s"].tolist() for _ in range(2))
    assert first == again
    assert learner.state_dict() == before


def test_policies_are_given_in_many_ways(tmp_path):
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
    named = compare(LENGTHS, dict(zip("abcdefghij", given, strict=True)), **SETTINGS)
    expected = dict(zip("abcdefghij", alone, strict=True))
    assert dict(zip(named["policy"], named["makespan_s"], strict=True)) == pytest.approx(expected, rel=1e-12)
    listed = compare(LENGTHS, [Halving, "none", chain], **SETTINGS)
    assert set(listed["policy"]) == {"Halving", "none", "ngram:4"}
    assert set(compare(LENGTHS, "none, beg-mab", **SETTINGS)["policy"]) == {"none", "beg-mab"}


def test_traces_are_given_in_many_ways():
    frame = pd.DataFrame({"length": LENGTHS})
    sources = [LENGTHS, np.array(LENGTHS), frame, frame["length"], read(frame)]
    assert len({simulate(source, Halving, **SETTINGS).makespan_s for source in sources}) == 1
    by_path = simulate(TINY, Halving, acceptance="geometric:0.7")
    assert by_path.policy == "Halving"
    assert by_path.makespan_s == simulate(read(TINY), Halving(), acceptance="geometric:0.7").makespan_s
    assert calibrate(TINY).costs == calibrate(read(TINY)).costs
    assert timeline(TINY, compare=by_path).axes
    given, loaded = (compare(trace, systems="verl")["makespan_s"].tolist() for trace in (TINY, read(TINY)))
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
    tuned = tune(
        np.array([[30] * 12 + [200] * 2] * 4), trials=0, repeats=1, depths=(2,), drafters=["ngram"], **SETTINGS
    )
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
        (lambda: simulate(TINY, Halving("8")), ("TypeError", "test_compare")),
        (lambda: compare(TINY, 3), (3,)),
        (lambda: tune([]), ()),
        (lambda: compare(TINY, {}), ("policy",)),
        (lambda: compare(TINY, [Halving, Halving(2)]), ("Halving",)),
        (lambda: compare(TINY, ["ngram:4", Strategy.chain("ngram", 4)]), ("ngram:4",)),
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
        (lambda: simulate(LENGTHS, Late, **SETTINGS), ("ValueError", "test_compare")),
        (lambda: compare(LENGTHS, [LateName], **SETTINGS), ("LateName", "NameError", "batch", "test_compare")),
    ],
)
def test_what_cannot_be_simulated_is_refused(call, naming):
    with refused(ConfigError, naming=naming):
        call()


def test_what_is_no_trace_is_refused():
    for run in (lambda: tune(3), lambda: simulate(3, "none"), lambda: simulate(None, "none")):
        with refused(TraceError):
            run()


@pytest.mark.parametrize("source", [Halving, Halving(), Drawing, lambda rng: Drawing(rng=rng)])
def test_the_contract_takes_whatever_builds_a_selector(source):
    check_selector(source)


@pytest.mark.parametrize(
    ("asked", "naming"),
    [
        ({"workers": [1, 2], "gpus": ["1xH100"]}, ("workers",)),
        ({"workers": [1, 1]}, ("workers", 1)),
        ({"workers": 0}, ("workers", 0)),
        ({"max_response_tokens": [0]}, ("max_response_tokens", 0)),
        ({"gpus": "8xZ1"}, ("Z1", "GPU")),
        ({"gpus": "1xRTX4090", "model": "Llama-3.3-70B"}, ("RTX4090",)),
        ({"acceptance": ["1.5"]}, ("1.5",)),
        ({"acceptance": ["0.5"], "workers": [2], "policies": "ngram:4,learned:4"}, ("learned", "ngram", "all=0.5")),
        ({"systems": "tlt,tlt"}, ("tlt",)),
        ({"systems": "tlt", "policies": "ngram:4"}, ("systems",)),
        ({"systems": "streamrl", "placement": "round_robin", "workers": [1, 2]}, ("streamrl", "placement")),
        ({"cap": [100]}, ("cap",)),
    ],
)
def test_grids_that_cannot_be_are_refused_at_once(asked, naming, monkeypatch):
    monkeypatch.setattr(Cell, "rows", lambda cell: pytest.fail("a cell was simulated"))
    settings = {} if {"gpus"} & asked.keys() else {"costs": "cpu-small", "workers": 2, "acceptance": "0.7"}
    policies = {} if "systems" in asked else {"policies": "ngram:4"}
    with refused(ConfigError, naming=naming) as info:
        compare(FRAME, **policies | settings | asked)
    assert "\n" not in str(info.value)


def test_the_command_writes_table_json_csv_and_picture(tmp_path, capsys):
    FRAME.to_csv(tmp_path / "lengths.csv", index=False)
    on = ("compare", tmp_path / "lengths.csv", "--workers", "1,2", "--costs", "cpu-small")
    asked = (*on, "--acceptance", "0.8", "--policies", "ngram:4")
    result = json.loads(typed(capsys, *asked, "--json", "--out", tmp_path / "s.csv")[1])
    assert (result["axes"], result["failed"]) == ({"workers": [1, 2]}, {})
    written = pd.read_csv(tmp_path / "s.csv")["speed_up"].tolist()
    assert [row["speed_up"] for row in result["rows"]] == pytest.approx(written, rel=1e-12)
    code, text, _ = typed(capsys, *asked, "--out", tmp_path / "s.svg")
    assert code == 0
    assert f"{result['rows'][1]['speed_up']:.2f}x" in text
    assert (tmp_path / "s.svg").read_text().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths.csv", "s.csv", "s.svg"]
    result = json.loads(typed(capsys, *on, "--systems", "tlt-base", "--json")[1])
    assert [row["system"] for row in result["rows"]] == ["verl", "tlt-base"] * 2
    by_drafter = ("--acceptance", "learned=0.8,ngram=0.4;all=0.5", "--policies", "ngram:4", "--json")
    rows = json.loads(typed(capsys, *on, *by_drafter)[1])["rows"]
    granted = [(row["workers"], row["granted"]) for row in rows if row["policy"] != "none"]
    assert granted == [(workers, {"ngram": kept}) for workers in (1, 2) for kept in ("0.4", "0.5")]


def test_the_command_refuses_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Cell, "rows", lambda cell: pytest.fail("a cell was simulated"))
    for options, fact in (
        (("--workers", "two"), "two"),
        (("--out", tmp_path / "s.txt"), "s.txt"),
        (("--policies", "none"), "--policies"),
    ):
        code, shown, said = typed(capsys, "compare", TINY, *options)
        assert (code, shown, len(said.splitlines()), fact in said) == (2, "", 1, True), said


def test_the_command_shows_where_a_policy_failed(tmp_path, capsys, monkeypatch):
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
