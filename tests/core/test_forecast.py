"""A dry run's forecast: hours of the run by lengths, what memory and disk it needs, whether its parts can be had."""

import json
import re
from pathlib import Path

import pytest

from tests.sim.workloads import typed
from tltlab.forecast import forecast
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.recipe import load_recipe

SMALLER = ["rollout.prompts_per_step=8", "rollout.max_response_tokens=2048", "train.minibatches=2"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def small_model(tmp_path):
    """A folder with the shape of a model, without weights."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "head_dim": 16}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | shape | {"intermediate_size": 128}))
    return folder


def forecast_of(*overrides, out=Path("runs/run"), lengths=None):
    recipe = load_recipe("qwen2.5-7b-tlt", [*SMALLER, *overrides])
    return forecast(recipe, plan_of(recipe), out, "tltlab train mine", lengths)


def test_longer_responses_take_longer():
    short, long = forecast_of().times
    assert short.lengths.startswith("base-rl")
    assert long.lengths.startswith("reasoning")
    for time in (short, long):
        assert time.low_s < time.step_s < time.high_s
        assert 0 < time.rollout_s < time.step_s
    assert long.step_s > short.step_s


def test_own_lengths_replace_the_regimes(tmp_path):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("200\n" * 63 + "2000\n")
    (time,) = forecast_of(lengths=lengths).times
    assert time.lengths == str(lengths)


def test_hours_are_those_of_all_rl_steps():
    found = forecast_of("train.steps=36")
    hours = [f"{each / 100:.1f}" for time in found.times for each in (time.step_s, time.low_s, time.high_s)]
    assert all(each in found.text() for each in hours)


def test_separate_trainers_leave_engines_alone():
    separate = ["cluster.placement=separate", "rollout.num_workers=1", "train.ranks=4"]
    alone, shared = (forecast_of(*more).times[0] for more in (separate, ["rollout.num_workers=2"]))
    assert alone.rollout_s > shared.rollout_s


def test_without_a_gpu_no_time_is_made_up(small_model):
    recipe = load_recipe("cpu", [f"model={small_model}"])
    found = forecast(recipe, plan_of(recipe), Path("runs/run"), "tltlab train cpu")
    assert found.times == ()
    assert "cluster.gpu" in found.unknown
    assert found.unknown in found.text()


def test_disk_holds_checkpoints_and_trace(tmp_path):
    few, many = (forecast_of(f"checkpoint.keep={keep}", out=tmp_path / "new" / "run") for keep in (1, 3))
    assert many.disk_bytes - few.disk_bytes == 2 * 12 * plan_of(load_recipe("qwen2.5-7b-tlt")).num_params
    assert few.disk_bytes_here > 0


def test_a_model_that_is_here_is_found(small_model):
    recipe = load_recipe("cpu", [f"model={small_model}"])
    parts = dict(forecast(recipe, plan_of(recipe), Path("runs/run"), "").parts)
    assert parts["model"].endswith("here")
    assert "HF_HUB_OFFLINE" in dict(forecast_of().parts)["model"]


def test_the_dry_run_ends_with_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ("train", "qwen2.5-7b-tlt", *SMALLER, "--dry-run")
    code, out, _ = typed(capsys, *line)
    assert code == 0
    assert out.splitlines()[-1] == f"next: tltlab train qwen2.5-7b-tlt --out runs/run {' '.join(SMALLER)}"
    code, out, _ = typed(capsys, *line, "--json")
    ahead = json.loads(out)["forecast"]
    assert {"times", "unknown", "host_bytes", "disk_bytes", "parts", "command"} <= set(ahead)
    assert not list(tmp_path.rglob("run.json"))


def test_lengths_are_for_a_dry_run(capsys):
    code, _, err = typed(capsys, "train", "qwen2.5-7b-tlt", "--lengths", "lengths.csv")
    assert code == 2
    assert re.search("--lengths lengths.csv .*--dry-run", err)
