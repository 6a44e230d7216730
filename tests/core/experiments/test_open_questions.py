"""What TLT leaves open: each row is a comparison that could have been made by hand, and its answer follows from it."""

from dataclasses import replace

import pytest

from tltlab.errors import ConfigError
from tltlab.experiments.result import read_settings
from tltlab.experiments.simulated import open_questions
from tltlab.experiments.simulated.open_questions import CASES, OpenQuestionsSettings, measured, verdict

SMALL = OpenQuestionsSettings(rl_steps=2, share=0.1, cap=256)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """Two workers of eight responses each."""
    return {case.name: measured(replace(case, workers=2, load=8), SMALL, 0) for case in CASES}


def test_every_workload_has_an_answer_with_its_uncertainty(rows):
    for case in CASES:
        row = rows[case.name]
        assert row["least"] <= row["most"]
        assert f"{row['step']:.2f}x" in row["answer"]
        low, high = min(row["step_low"], row["least"]), max(row["step_high"], row["most"])
        if row["kind"] == "published":
            assert "the claim of 1.7 to 2.1 x VeRL (RL step)" in row["answer"]
        else:
            said = row["answer"].partition(":")[0]
            assert said == ("pays" if low > 1 else "does not pay" if high <= 1 else "is not told from no gain")


def test_the_paper_would_be_met_by_a_rollout_that_is_as_large_a_share(rows):
    row = rows["32B as published"]
    assert f"would give {1 / (0.15 + 0.85 / row['rollout']):.2f}x" in row["answer"]
    assert "8 responses to a worker here, 256 there" in row["answer"]


def test_published_workloads_have_the_scripts_responses_and_gpus():
    seven, large = CASES[:2]
    assert (seven.workers * seven.load, seven.workers * seven.tp) == (512, 8)
    assert (large.workers * large.load, large.workers * large.tp) == (2048, 64)


def test_the_experiment_tells_its_rows_and_refuses_an_unknown_one(rows, tmp_path, monkeypatch):
    settings = read_settings(OpenQuestionsSettings, {"cap": 256, "rl_steps": 2, "only": ("multi-turn",)})
    monkeypatch.setattr(open_questions, "measured", lambda case, settings, seed: rows[case.name])
    result = open_questions.run(settings, folder=tmp_path, seed=0, progress=lambda said: None)
    assert result.prediction
    assert result.rows["workload"].tolist() == ["multi-turn"]
    assert result.verdict == verdict(result.rows)
    with pytest.raises(ConfigError, match="no workload named 'tools'"):
        open_questions.run(replace(settings, only=("tools",)), folder=tmp_path, seed=0, progress=lambda said: None)
