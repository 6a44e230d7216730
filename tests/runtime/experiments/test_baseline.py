"""Where the experiment baseline gets its model, and what it asks to be measured; the measurement is test_runtime's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tltlab.experiments import baseline
from tltlab.experiments.models import own_model
from tltlab.experiments.result import read_settings


def test_the_settings_reach_the_measurement(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def bench_runtime(model: Path, **options: object) -> dict:
        asked.update(options, model=model)
        raise InterruptedError

    monkeypatch.setattr("tltlab.bench.runtime.run.bench_runtime", bench_runtime)
    changes = [f"model={random_model}", "parts=measured", "prompts=3", "cap=32"]
    with pytest.raises(InterruptedError):
        baseline.run(
            read_settings(baseline.BaselineSettings, baseline.FAST, changes), folder=tmp_path, seed=7, progress=print
        )
    assert asked == {
        "model": random_model, "prompts": 3, "group_size": 4, "epochs": 1, "rounds": 2, "max_response_tokens": 32,
        "seed": 7, "progress": print,
    }  # fmt: skip


def test_a_model_once_trained_is_taken_again(tmp_path: Path):
    folder = tmp_path / "models" / "subset-sum-tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert own_model(None, tmp_path, size="tiny", progress=print) == folder
