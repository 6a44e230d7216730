"""The simulator as people call it in Python: one name for each thing, whatever it is given, results to look at."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tltlab
from tests.refused import refused
from tltlab import NO_SPECULATION, ConfigError, Selector, Strategy
from tltlab.testing import check_selector

from .workloads import typed

LENGTHS = [60] * 30 + [1500] * 2
SETTINGS = {"workers": 2, "costs": "cpu-small", "acceptance": "geometric:0.7"}


class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 4))

    def choose(self, state):
        return self.strategies[state.batch <= 8]


class Drawing(Halving):
    def __init__(self, rng: np.random.Generator):
        self.rng = rng


class Misspelt(Halving):
    def choose(self, state):
        return self.strategies[state.batsh <= 8]


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


def test_a_policy_is_a_name_a_class_an_instance_a_spec_or_a_list_of_them(tmp_path: Path):
    tltlab.load_policy("table").write(tmp_path / "mine.json")
    spec = {"kind": "fixed", "strategy": {"drafter": "ngram", "draft_depth": 4, "top_k": 1, "tokens_to_verify": 5}}
    drawing, file, chain = Drawing(np.random.default_rng(0)), tmp_path / "mine.json", Strategy.chain("ngram", 4)
    own = {"kind": "table", "rows": [{"min_batch": 1, "strategy": chain}, {"min_batch": 9, "strategy": NO_SPECULATION}]}
    given = ["none", Halving, drawing, spec, file, chain, Halving(), own, tltlab.load_policy(Halving)]
    given.append(f"{__name__}:Halving")
    alone = [tltlab.simulate(LENGTHS, policy, **SETTINGS).makespan_s for policy in given]
    assert alone[3] == alone[5]
    assert len({alone[at] for at in (1, 2, 6, 8, 9)}) == 1
    assert alone[7] == pytest.approx(alone[1], rel=1e-12)
    assert alone[1] < alone[0]
    rows = tltlab.compare(LENGTHS, given[:6], **SETTINGS)
    assert sorted(rows["makespan_s"]) == pytest.approx(sorted(alone[:6]), rel=1e-12)
    named = tltlab.compare(LENGTHS, dict(zip("abcdefghij", given, strict=True)), **SETTINGS)
    expected = dict(zip("abcdefghij", alone, strict=True))
    assert dict(zip(named["policy"], named["makespan_s"], strict=True)) == pytest.approx(expected)


def test_a_trace_is_an_object_a_frame_or_an_array():
    frame = pd.DataFrame({"length": LENGTHS})
    sources = [LENGTHS, np.array(LENGTHS), frame, frame["length"], tltlab.read(frame)]
    assert len({tltlab.simulate(source, Halving, **SETTINGS).makespan_s for source in sources}) == 1


def test_results_are_short_in_text_and_tables_in_a_notebook():
    result = tltlab.simulate(LENGTHS, Halving, **SETTINGS)
    assert repr(result) == f"<SimResult Halving: 1 RL step, mean rollout {result.makespan_s:.4g} s on 2 workers>"
    assert "makespan_s" in result._repr_html_()
    assert result.to_frame()["makespan_s"].tolist() == [result.makespan_s]
    assert result.to_frame()["lower_bound_s"][0] <= result.makespan_s
    assert result.plot().axes
    rows = tltlab.compare(LENGTHS, ["none", Halving], **SETTINGS)
    assert type(rows.to_frame()) is pd.DataFrame
    assert [label.get_text() for label in rows.plot().axes[0].get_yticklabels()] == ["Halving", "none"]
    tuned = tltlab.tune(np.array([[30] * 12 + [200] * 2] * 4), trials=0, repeats=1, depths=(2,), **SETTINGS)
    assert repr(tuned).startswith(f"<TuneResult {tuned.name}: ")
    assert tuned.to_frame()["name"].tolist() == [row.name for row in tuned.candidates]
    assert tuned.plot().axes


def test_the_package_says_its_version_and_its_names():
    assert re.match(r"\d+\.\d+", tltlab.__version__)
    assert {"simulate", "compare", "tune", "what_if", "__version__"} <= set(dir(tltlab))
    assert (Path(tltlab.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tltlab.simulate(LENGTHS, worker=2), ("worker",)),
        (lambda: tltlab.simulate(LENGTHS, record_iteration=True), ("record_iterations",)),
        (
            lambda: tltlab.compare(LENGTHS, "none", repeat=2),
            ("repeat",),
        ),
        (lambda: tltlab.compare(LENGTHS, "none", cost="cpu-small"), ("costs",)),
        (lambda: tltlab.tune(LENGTHS, trails=3), ("trails",)),
        (lambda: tltlab.what_if(LENGTHS, gpu="8xH100"), ("gpu", "what_if")),
    ],
)
def test_a_misspelt_keyword_is_answered_with_the_nearest(call: Callable[[], object], said: tuple):
    with refused(ConfigError, naming=said):
        call()


@pytest.mark.parametrize("source", [Halving, Halving(), Drawing, lambda rng: Drawing(rng=rng)])
def test_the_contract_takes_a_class_an_instance_or_what_builds_one(source):
    check_selector(source)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Misspelt, ('AttributeError', 'batsh', 'batch', 'test_python')),
        (Late, ('ValueError', 'test_python')),
        (LateName, ('LateName', 'NameError', 'batch', 'test_python')),
    ],
)  # fmt: skip
def test_what_a_policy_raises_is_one_line_with_its_place(policy: type[Selector], said: tuple):
    with refused(ConfigError, naming=said):
        tltlab.simulate(LENGTHS, policy, **SETTINGS)


def test_what_a_policy_raises_is_one_line_on_the_command_line(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("\n".join(map(str, LENGTHS)))
    (tmp_path / "misspelt.py").write_text(
        "from tltlab import NO_SPECULATION, Selector\nclass Mine(Selector):\n    strategies = (NO_SPECULATION,)\n"
        "    def choose(self, state):\n        return self.strategies[state.wating]\n"
    )
    code, _, said = typed(capsys, "simulate", "lengths.csv", "--workers", 2, "--policy", "misspelt:Mine")
    assert code == 2
    (line,) = [line for line in said.splitlines() if line.startswith("tltlab:")]
    assert line.endswith("did you mean 'waiting'? (misspelt.py, line 5)")
