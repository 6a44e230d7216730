"""Where the experiment baseline gets its model, and what it asks to be measured; the measurement is test_runtime's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.runtime.figures import NOTHING
from tltlab.cli.app import main
from tltlab.errors import ConfigError
from tltlab.experiments import baseline
from tltlab.experiments.models import bench_on, own_model
from tltlab.experiments.result import read_settings


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that experiments run in a process of their own run here."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        assert command[:3] == [sys.executable, "-m", "tltlab"]
        with pytest.raises(SystemExit) as ended:
            main(command[3:])
        return subprocess.CompletedProcess(command, int(ended.value.code or 0))

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("in_this_process")
def test_the_settings_reach_the_measurement(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def bench_runtime(model: Path, **options: object) -> dict:
        asked.update(options, model=model)
        return NOTHING

    monkeypatch.setattr("bench.runtime.run.bench_runtime", bench_runtime)
    changes = [f"model={random_model}", "parts=measured", "prompts=3", "cap=32"]
    settings = read_settings(baseline.BaselineSettings, baseline.FAST, changes)
    assert bench_on(random_model, settings, seed=7, progress=print) == NOTHING
    del asked["progress"]
    assert asked == {
        "model": random_model, "draft": None, "prompts": 3, "group_size": 4, "epochs": 1, "rounds": 2,
        "max_response_tokens": 32, "off_batches": [], "seed": 7,
    }  # fmt: skip


@pytest.mark.usefixtures("in_this_process")
def test_what_the_measurement_refuses_is_refused_and_the_reason_was_said(random_model: Path, capsys):
    settings = read_settings(baseline.BaselineSettings, baseline.FAST, ["prompts=33"])
    with pytest.raises(ConfigError, match="failed with exit code 2; why stands above"):
        bench_on(random_model, settings, seed=0, progress=print)
    assert "has 32 prompts, 33 were asked for" in capsys.readouterr().err


def test_a_model_once_trained_is_taken_again(tmp_path: Path):
    folder = tmp_path / "models" / "subset-sum-tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert own_model(None, tmp_path, size="tiny", progress=print) == folder
