"""The benchmark against TRL: what a user writes for both, figures from made-up runs, and a small run of both."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bench import app as bench
from bench.harness import shown
from bench.train.run import (
    DEFAULTS,
    FAST,
    OURS,
    TEXT,
    VLLM,
    SideRun,
    bench_train,
    learned,
    ours_of_trace,
    ratio_of_medians,
    run_trl,
    steady,
    summarise,
)
from bench.train.texts import GrpoJob, recipe_text, script_text, written_lines
from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json
from tltlab.runtime.recipe.recipe import load_recipe

from .made_traces import trace_of

SETTING = GrpoJob(
    model=Path("/models/of our own"), reward="tltlab.runtime.models.tasks:subset_sum_reward", steps=5,
    prompts_per_step=24, group_size=8, max_response_tokens=768, cores=2,
)  # fmt: skip
SAME_SAMPLES = Path(__file__).with_name("trl_same_samples.py")
LINES = {OURS: 21, DEFAULTS: 28, VLLM: 32}


def quiet(_): ...


def block(side, seconds, **more):
    n = len(seconds)
    stages = {"rollout_s": [0.5 * s for s in seconds], "rest_s": [0.5 * s for s in seconds]} if side == OURS else {}
    return SideRun(side=side, seed=0, seconds=seconds, rewards=[0.25] * n, lengths=[60.0] * n, stages=stages, **more)


def arguments(script):
    """The settings that a script gives TRL."""
    given = {}
    config = script.split("args=GRPOConfig(", 1)[1].split("\n    ),", 1)[0]
    exec(f"given.update(dict({config}))", {"given": given})
    return given


def test_the_recipe_is_valid_and_equals_trls_script(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(replace(SETTING, policy="beg-mab", seed=7)))
    recipe = load_recipe(path)
    script = script_text(replace(SETTING, seed=7), Path("policy"), vllm=False)
    compile(script, "script.py", "exec")
    trl, train, rollout = arguments(script), recipe.train, recipe.rollout
    assert trl["max_steps"] == train.steps * train.minibatches
    assert trl["learning_rate"] == train.lr
    assert (0.9, trl["adam_beta2"]) == train.betas
    assert trl["epsilon_high"] == train.clip_high
    assert trl["num_generations"] == rollout.group_size
    assert trl["max_completion_length"] == rollout.max_response_tokens
    # TRL's forward passes are of 8 responses, and it generates those of one optimizer step at once.
    assert trl["gradient_accumulation_steps"] * 8 == rollout.prompts_per_step * rollout.group_size
    assert trl["seed"] == recipe.seed == 7
    assert rollout.policy == "beg-mab"
    # Settings that TRL's script leaves to TRL's defaults.
    assert (rollout.temperature, train.kl_coef, train.clip_low) == (1.0, 0.0, 0.2)
    assert (train.aggregation, train.advantage_scale, train.max_grad_norm, train.weight_decay) == (
        "token", "group", 1.0, 0.0,
    )  # fmt: skip


def test_trls_vllm_mode_corrects_as_our_recipe_does(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(SETTING))
    train = load_recipe(path).train
    plain, vllm = (script_text(SETTING, Path("policy"), vllm=vllm) for vllm in (False, True))
    assert train.correction == "truncated"
    assert arguments(vllm) == arguments(plain) | {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": train.correction_cap,
    }  # fmt: skip
    assert written_lines(vllm) == written_lines(plain) + 4


def test_first_step_of_run_is_left_out():
    blocks = [block(OURS, [9.0, 3.0, 4.0]), block(DEFAULTS, [90.0, 60.0, 70.0]), block(OURS, [8.0, 3.0, 2.0])]
    assert steady(blocks, OURS) == [3.0, 4.0, 3.0, 2.0]
    found = summarise(blocks, {OURS: 21, DEFAULTS: 28}, heldout=512)
    ours, theirs = found["sides"]
    assert (ours["runs"], ours["first_seconds"], ours["seconds"]["estimate"]) == (2, 8.5, 3.0)
    assert ours["stages"] == {"rollout_s": 1.5, "rest_s": 1.5}
    assert theirs["rewards"] == [0.25, 0.25, 0.25]
    [goal] = found["goals"]
    assert goal["ratio"]["estimate"] == pytest.approx(65 / 3)
    assert goal["met"]
    assert goal["ratio"]["low"] <= goal["ratio"]["estimate"] <= goal["ratio"]["high"]


def test_a_ratios_interval_covers_both_sides_variation():
    same = ratio_of_medians([60.0] * 6, [3.0] * 6)
    assert (same.low, same.estimate, same.high) == (20.0, 20.0, 20.0)
    one = ratio_of_medians([60.0, 60.0, 60.0, 60.0], [2.0, 3.0, 4.0, 3.0])
    assert one.low < 20.0 < one.high
    one = ratio_of_medians([60.0], [3.0])
    assert one.low != one.low


def test_equal_rewards_of_few_prompts_keep_intervals_wide():
    blocks = [replace(block(side, [3.0]), seed=seed, heldout_reward=0.5) for side in LINES for seed in range(2)]
    wide, narrow = (learned(blocks, DEFAULTS, heldout) for heldout in (32, 3200))
    assert wide["difference"]["high"] == pytest.approx(10 * narrow["difference"]["high"])
    assert narrow["difference"]["high"] > 0.05
    assert learned(blocks[:1], DEFAULTS, 32) is None
    one = learned([b for b in blocks if b.seed == 0], DEFAULTS, 32)
    assert (one["seeds"], one["equal"], one["difference"]["high"]) == (1, None, None)


def test_a_tltlab_step_lasts_until_the_next(tmp_path):
    starts, rollouts = [0.5, 5.0, 8.0], [2.0, 1.0, 1.5]
    keys = [{"rl_step": step, "prompt_id": "p", "sample": n, "turn": 0} for step in range(3) for n in range(2)]
    trace_of(
        workload=[k | {"epoch": 0, "prompt_tokens": 3, "max_response_tokens": 9, "policy_version": 0} for k in keys],
        outcomes=[k | {"response_tokens": 2 + 4 * k["sample"], "finish_reason": "stop"} for k in keys],
        steps=[
            {"rl_step": n, "t_start": start, "policy_version": n, "rollout_s": rollout, "train_s": 1.0,
             "reward_mean": 0.5}
            for n, (start, rollout) in enumerate(zip(starts, rollouts, strict=True))
        ],
    ).write(tmp_path / "trace")  # fmt: skip
    found = ours_of_trace(tmp_path / "trace", seed=3, responses=2)
    assert found.seconds == [4.5, 3.0, 2.5]
    assert found.stages["rest_s"] == [1.5, 1.0, 0.0]
    assert found.stages["sync_s"] == [0.0, 0.0, 0.0]
    assert found.lengths == [4.0, 4.0, 4.0]
    assert found.rewards == [0.5, 0.5, 0.5]


def test_folders_without_trl_and_files_are_refused(tmp_path):
    with refused(ConfigError, naming=("--no-deps", "trl==")):
        bench_train(FAST, trl=tmp_path / "nothing", out=tmp_path / "out", progress=quiet)
    assert not (tmp_path / "out").exists(), "nothing is made before"
    (tmp_path / "tltlab-0").mkdir()
    with refused(ConfigError, naming=("another",)):
        bench_train(FAST, out=tmp_path, progress=quiet)
    (tmp_path / "file").write_text("")
    with refused(ConfigError):
        CliRunner().invoke(bench.app, ["train", "--out", str(tmp_path / "file")], catch_exceptions=False)


def test_trl_logs_one_entry_per_rl_step(tmp_path):
    from bench.train.trl import Clock

    clock = Clock(tmp_path / "times.json")
    args = SimpleNamespace(steps_per_generation=24, gradient_accumulation_steps=12, num_iterations=1)
    clock.on_train_begin(args)
    for step in range(4):
        clock.on_step_end(args)
        if step % 2:
            clock.on_log(args, logs={"reward": 0.25 * step, "completions/mean_length": 60.0 + step})
    clock.on_log(args, logs={"train_runtime": 9.0})
    clock.on_train_end(args)
    found = read_json(tmp_path / "times.json")
    assert [len(found["seconds"]), found["rewards"], found["lengths"]] == [2, [0.25, 0.75], [61.0, 63.0]]
    assert all(seconds > 0 for seconds in found["seconds"])


def test_a_failed_trl_run_ends_with_its_output(random_model, tmp_path):
    setting = replace(SETTING, model=random_model)
    # Importing these takes seconds, and nothing of them is reached.
    (tmp_path / "datasets.py").write_text("load_dataset = None")
    (tmp_path / "transformers.py").write_text("class TrainerCallback: ...\nclass trainer: DEFAULT_CALLBACKS = []")
    with refused(RunError, naming=("trl",)):
        run_trl(setting, tmp_path / "run", tmp_path, vllm=False, progress=quiet)
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.engine
@pytest.mark.skipif("TLTLAB_TRL" not in os.environ, reason="TLTLAB_TRL names no folder with TRL (pip install --target)")
def test_both_train_the_same_model(tmp_path):
    found = bench_train(FAST, trl=Path(os.environ["TLTLAB_TRL"]), out=tmp_path, progress=quiet)
    assert [(side["side"], side["runs"], len(side["rewards"])) for side in found["sides"]] == [
        (OURS, 1, 2), (DEFAULTS, 1, 2),
    ]  # fmt: skip
    assert all(
        side["seconds"]["estimate"] > 0 and 0 <= side["heldout_reward"]["estimate"] <= 1 for side in found["sides"]
    )
    assert all(0 < side["mean_response_tokens"] <= FAST.max_response_tokens for side in found["sides"])
    assert found["versions"]["trl"] == "1.16.0"
    assert tomllib.loads((tmp_path / "tltlab-0" / "recipe.toml").read_text())["train"]["steps"] == 2
    assert read_json(tmp_path / "train.json") == json.loads(json.dumps(found))
    assert "goal 20" in shown(found, TEXT)


@pytest.mark.skipif("TLTLAB_TRL" not in os.environ, reason="TLTLAB_TRL names no folder with TRL (pip install --target)")
def test_same_samples_move_weights_as_trl_moves_them(random_model, tmp_path):
    recipe, found = tmp_path / "recipe.toml", tmp_path / "found.json"
    setting = replace(SETTING, model=random_model, prompts_per_step=4, max_response_tokens=48, steps=2)
    recipe.write_text(recipe_text(setting))
    script = script_text(setting, tmp_path / "policy", vllm=False)
    command = [sys.executable, SAME_SAMPLES, recipe, found]
    beside = {"PYTHONPATH": os.environ["TLTLAB_TRL"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | beside, input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    apart = read_json(found)
    assert apart["moved"] > 0.05
    assert apart["apart"] < 0.005 * apart["moved"]
