"""A study fills one long table: a row per cell and RL step, whatever happens to the cells beside."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tltlab import ConfigError, compare, load_policy, simulate
from tltlab.errors import InputError
from tltlab.sim.scenario import Scenario
from tltlab.sim.study import compare as comparisons
from tltlab.sim.study import study as studies
from tltlab.sim.study.study import SIMULATED, Cell, Journal, Study
from tltlab.strategy import NO_SPECULATION, Strategy

from ..workloads import TINY, Handing, typed

LENGTHS = np.array([[60] * 12 + [900], [80] * 12 + [700]])
ON = {"workers": 2, "costs": "cpu-small", "acceptance": "ngram=geometric:0.7"}
LATE = """
from tltlab import NO_SPECULATION, Selector

class Late(Selector):
    strategies = (NO_SPECULATION,)
    calls = 0

    def choose(self, state):
        self.calls += 1
        return self.strategies[self.calls > 500]
"""


@pytest.fixture
def late(tmp_path, monkeypatch):
    """A user's own policy that fails long after its contract has been checked."""
    name = f"late_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(LATE)
    monkeypatch.chdir(tmp_path)
    return f"{name}:Late"


def cells(**policies):
    scenario = Scenario.of(LENGTHS, **ON)
    return [Cell(name=name, policy=load_policy(p), scenario=scenario) for name, p in policies.items()]


def test_the_table_has_a_row_per_cell_and_rl_step():
    plain, drafts = cells(none="none", text="ngram:4")
    study = Study(cells=[replace(plain, axes={"workers": 2}), replace(drafts, axes={"workers": 2})])
    table = study.table()
    assert table[["cell", "policy", "rl_step"]].values.tolist() == [
        [0, "none", 0], [0, "none", 1], [1, "text", 0], [1, "text", 1],
    ]  # fmt: skip
    assert all(re.search(rf"\b{name}\b", studies.__doc__ or "") for name in {*table, "system"} - {"workers"})
    assert set(table["backend"]) == {SIMULATED}
    for name, rows in table.groupby("policy"):
        result = simulate(LENGTHS, "none" if name == "none" else "ngram:4", **ON)
        assert rows["makespan_s"].tolist() == [rollout.makespan_s for rollout in result.rollouts]
        assert rows["tokens"].tolist() == LENGTHS.sum(axis=1).tolist()
        share = (rows["idle_s"].sum() / rows["worker_s"].sum(), result.summary["bubble_fraction"])
        assert share[0] == pytest.approx(share[1])
        assert rows["kept_tokens"].sum() / max(rows["drafts"].sum(), 1) == pytest.approx(
            result.summary["mean_accept_length"] or 0.0
        )
    assert (table["bubble_fraction"] * table["worker_s"]).tolist() == pytest.approx(table["idle_s"].tolist())
    assert table[["step_s", "accept_length"]].isna().all().tolist() == [True, False]
    assert table["drafters"].tolist() == [[], [], ["ngram"], ["ngram"]]
    assert table["acceptance"].tolist()[::2] == [{}, {"ngram": "geometric:0.7"}]
    alone = Study(cells=study.cells, details=False).table()
    assert alone["makespan_s"].tolist() == table["makespan_s"].tolist()


def failing(calls):
    """A policy that after so many choices takes one that it does not list."""
    left = iter(range(calls))
    return Handing(
        NO_SPECULATION,
        rule=lambda state: NO_SPECULATION if next(left, None) is not None else Strategy.chain("ngram", 1),
    )


def test_a_cell_that_raises_keeps_the_others(tmp_path):
    journal = Journal(path=tmp_path / "cells", question="same")
    found = Study(cells=cells(none="none", late=failing(200), text="ngram:4")).table(journal)
    assert found["cell"].tolist() == [0, 0, 2, 2]
    (label,) = found.attrs["failed"]
    assert (label, "\n" in found.attrs["failed"]["late"]) == ("late", False)
    assert len(journal.path.read_text().splitlines()) == 3
    mended = Study(cells=cells(none="none", late="none", text="ngram:4")).table(
        Journal(path=journal.path, question="same")
    )
    assert mended[mended["policy"] != "late"]["makespan_s"].tolist() == found["makespan_s"].tolist()
    assert mended.attrs["failed"] == {}
    with refused(ConfigError):
        Study(cells=cells(late=failing(200))).table()


def test_a_comparison_names_what_failed(late):
    found = compare(LENGTHS, {"none": "none", "own": late, "text": "ngram:4"}, **ON)
    assert sorted(found["policy"]) == ["none", "text"]
    assert "IndexError" in found.attrs["failed"]["own"]
    whole = compare(LENGTHS, {"none": "none", "text": "ngram:4"}, **ON)
    assert found.equals(whole)
    # Where the baseline fails there are no ratios; the seconds are there all the same.
    headless = compare(LENGTHS, {"own": late, "text": "ngram:4"}, **ON)
    assert headless["ratio"].isna().all()
    assert headless["makespan_s"].tolist() == whole[whole["policy"] == "text"]["makespan_s"].tolist()


def test_the_command_fails_with_a_failed_cell(late, tmp_path, capsys):
    pd.DataFrame({"length": LENGTHS[0]}).to_csv(tmp_path / "lengths.csv")
    asked = ("compare", "lengths.csv", "--workers", 2, "--costs", "cpu-small", "--policies", f"none,{late}", "--json")
    code, shown, said = typed(capsys, *asked, "--allow-code", late.partition(":")[0], "--out", "found.json")
    assert (code, late in said.splitlines()[-1]) == (1, True)
    result = json.loads(shown)
    assert result == json.loads((tmp_path / "found.json").read_text())
    assert ([row["policy"] for row in result["rows"]], list(result["failed"])) == (["none"], [late])
    assert (tmp_path / "found.json.cells").exists(), "the finished cells are kept"
    code, shown, _ = typed(capsys, *asked[:-2], f"{late},none", "--allow-code", late.partition(":")[0])
    assert (code, f"failed: {late}: " in shown, "nan" in shown) == (1, True, False)


def test_failures_at_points_that_need_no_more_steps_are_kept(late, monkeypatch):
    """The first point has enough RL steps at once, the second one takes more."""
    monkeypatch.setattr(comparisons, "small", lambda ratios, error, enough=iter([True, False, True]): next(enough))
    run = np.vstack([LENGTHS] * 15)
    found = compare(run, {"none": "none", "own": late}, costs="cpu-small", workers=[1, 2])
    assert found["num_rl_steps"].tolist() == [8, 24]
    assert list(found.attrs["failed"]) == ["own, workers 1", "own, workers 2"]


def test_a_journal_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "cells").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "cells", tmp_path / "file" / "cells"):
        with refused(InputError, naming=(path,)):
            Study(cells=cells(none="none")).table(Journal(path=path, question="same"))
    code, _, said = typed(capsys, "compare", TINY, "--policies", "none,table", "--out", tmp_path / "file" / "s.csv")
    assert (code, len(said.splitlines())) == (2, 1)
