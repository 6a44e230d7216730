"""`tltlab experiment`: the list, settings, the course of an experiment, what is written, and the models they take."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import pytest
from matplotlib.figure import Figure
from pydantic import Field

from tests.refused import refused
from tltlab.errors import ConfigError, InputError, RunError
from tltlab.experiments import EXPERIMENTS, find
from tltlab.experiments.harness import Case, Experiment
from tltlab.experiments.models import own_model
from tltlab.experiments.result import ExperimentResult, read_settings, settings_json

from ..conftest import Command


@dataclass(frozen=True, kw_only=True)
class AskedSettings:
    model: Path | None = None
    rounds: Annotated[int, Field(ge=1)] = 2
    depths: tuple[int, ...] = (4, 8)
    share: float = 0.5


class Asked(Experiment[AskedSettings]):
    """Tells in `seen` what it was run with and what it opened and closed."""

    Settings = AskedSettings
    FAST: ClassVar = {"rounds": 1}
    prediction = True
    seen: ClassVar[list[Any]] = []

    def cases(self):
        self.seen.append(self)
        self.stack.callback(self.seen.append, "closed")
        yield Case("off", "first", math.inf)
        yield Case("on", "second", math.nan)

    def measure(self, case):
        if self.settings.share == 0:
            raise RunError("an engine died")
        return [{"system": case.name, "speedup": case.given, "count": 1}]

    def verdict(self, rows):
        return "yes"

    def picture(self, rows):
        return Figure()

    def notes(self, rows):
        yield "a note"


def answer(verdict: str = "yes") -> ExperimentResult:
    return ExperimentResult(
        name="asked", verdict=verdict, rows=pd.DataFrame({"system": ["off"], "speedup": [math.inf], "count": [1]}),
        figure=Figure(), prediction=True, notes=("a note",),
    )  # fmt: skip


@pytest.fixture
def experiment(command: Command) -> Command:
    return partial(command, "experiment")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the experiment `asked` of our own saw."""
    monkeypatch.setitem(EXPERIMENTS, "asked", ("Does it?", "no time"))
    monkeypatch.setattr("tltlab.cli.experiment.find", lambda name: Asked)
    monkeypatch.setattr(Asked, "seen", [])
    return Asked.seen


def test_without_a_name_all_experiments_are_listed(experiment: Command):
    code, out, _ = experiment()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[: len(EXPERIMENTS)]] == list(EXPERIMENTS)
    rows = json.loads(experiment("--json")[1])["experiments"]
    assert [row["name"] for row in rows] == list(EXPERIMENTS)
    assert all(row["question"] and row["takes"] for row in rows)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_made_fast(name: str):
    found = find(name)
    assert issubclass(found, Experiment)
    assert read_settings(found.Settings, found.FAST) != read_settings(found.Settings)


def test_settings_are_defaults_then_fast_then_the_users():
    assert read_settings(AskedSettings) == AskedSettings()
    fast = read_settings(AskedSettings, {"rounds": 1, "depths": (2,)}, ["depths=1,3", "share=0.25", "model=here"])
    assert fast == AskedSettings(model=Path("here"), rounds=1, depths=(1, 3), share=0.25)
    assert settings_json(fast, seed=3) == {"model": "here", "rounds": 1, "depths": [1, 3], "share": 0.25, "seed": 3}


@pytest.mark.parametrize(
    ("override", "facts"),
    [("rounds=0", ["rounds"]), ("depths=4,deep", ["depths.1", "deep"]), ("round=3", ["'round'", "depths=4,8"]),
     ("rounds", ["'rounds'", "key=value"])],
)  # fmt: skip
def test_a_wrong_setting_is_named(override: str, facts: list[str]):
    with refused(ConfigError, naming=facts):
        read_settings(AskedSettings, overrides=[override])


def test_the_command_runs_cases_and_writes_a_folder(seen, tmp_path: Path, experiment: Command):
    code, out, err = experiment("asked", "--fast", "depths=2", "--seed", "5", "--out", tmp_path, "--json")
    assert code == 0
    ran, closed = seen
    assert (ran.settings, ran.seed, ran.folder, closed) == (AskedSettings(rounds=1, depths=(2,)), 5, tmp_path, "closed")
    assert err.index("off: first") < err.index("on: second")
    told = json.loads(out)
    assert told.pop("out") == str(tmp_path / "asked")
    assert told["command"] == f"tltlab experiment asked --fast depths=2 --seed 5 --out {tmp_path} --json"
    assert "numpy" in told["versions"]
    assert [row["speedup"] for row in told["rows"]] == [None, None]
    assert told == json.loads((tmp_path / "asked" / "result.json").read_text())
    code, out, _ = experiment("asked", "--out", tmp_path)
    assert out.index("Does it?") < out.index("(predicted, not measured)") < out.index("a note") < out.index("yes")


def test_what_was_opened_is_closed_where_case_fails(seen, tmp_path: Path, experiment: Command):
    code, _, err = experiment("asked", "share=0", "--out", tmp_path)
    assert (code, seen[1:]) == (RunError.exit_code, ["closed"])
    assert "an engine died" in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["", "asked/thesis.tex", "asked/thesis.tex/a/b"])
def test_a_place_with_something_else_is_refused(seen, tmp_path: Path, experiment: Command, out):
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "thesis.tex").write_text("mine")
    code, _, err = experiment("asked", "--out", tmp_path / out)
    assert (code, seen) == (2, [])
    assert "thesis.tex" in err
    assert "--out" in err


def test_a_result_is_a_folder_of_three_files(tmp_path: Path):
    out = tmp_path / "deep" / "asked"
    answer("old").write(out)
    (out / "report.html").write_text("made of it")
    answer("new").write(out)
    assert sorted(path.name for path in out.iterdir()) == ["picture.png", "result.json", "table.csv"]
    told = json.loads((out / "result.json").read_text())
    assert (told["verdict"], told["rows"]) == ("new", [{"system": "off", "speedup": None, "count": 1}])
    assert pd.read_csv(out / "table.csv")["system"].tolist() == ["off"]
    assert [path.name for path in out.parent.iterdir()] == ["asked"]
    (out / "thoughts.md").write_text("mine")
    with refused(ConfigError, naming=("thoughts.md",)):
        answer("newer").write(out)
    assert (out / "thoughts.md").read_text() == "mine"
    assert json.loads((out / "result.json").read_text())["verdict"] == "new"


def test_nothing_half_written_is_left_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer("old").write(tmp_path / "asked")

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tltlab.experiments.result.save_figure", full_disk)
    with refused(InputError):
        answer("new").write(tmp_path / "asked")
    assert json.loads((tmp_path / "asked" / "result.json").read_text())["verdict"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["asked"]


def test_a_model_once_trained_is_taken_again(tmp_path: Path):
    folder = tmp_path / "models" / "subset-sum-tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert own_model(None, tmp_path, size="tiny", progress=print) == folder
    with refused(ConfigError, naming=("train.jsonl",)):
        own_model(folder, tmp_path, size="tiny", progress=print)
