"""The measured part of the experiment baseline on a real engine, by its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tltlab.cli import app as cli
from tltlab.experiments.models import own_model


@pytest.mark.engine
def test_off_static_and_adaptive_run_on_the_same_prompts_and_end_in_a_verdict(random_model: Path, tmp_path, capsys):
    args = ["baseline", "--fast", "--model", str(random_model), "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["experiment", *args, "parts=measured", "prompts=3", "rounds=1", "cap=32"])
    told = json.loads(capsys.readouterr().out)
    assert not ended.value.code
    assert not told["prediction"]
    systems = [row["system"] for row in told["rows"]]
    assert systems[0] == "off"
    assert {"suffix 4", "suffix 8", "beg-mab"} <= set(systems)
    assert all(row["tokens_per_s"] > 0 and row["rollout_s"] > 0 for row in told["rows"])
    assert told["verdict"].startswith("measured here, adaptive drafts (BEG-MAB) roll out ")
    assert [path.name for path in tmp_path.iterdir()] == ["baseline"]
    assert (tmp_path / "baseline" / "picture.png").stat().st_size > 5000


def test_a_model_once_trained_is_taken_again(tmp_path: Path):
    folder = tmp_path / "models" / "subset-sum-tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert own_model(None, tmp_path, size="tiny", progress=print) == folder
