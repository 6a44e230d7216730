"""The JSON part of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.rows import StepReport
from tltlab.runtime.run.state import RunState, read_state, write_state


def test_an_rl_step_of_which_nothing_is_known_comes_back_from_json(tmp_path: Path):
    times = dict.fromkeys(("rollout_s", "reward_s", "inference_s", "train_s", "sync_s", "recorder_s"), 0.5)
    report = StepReport(
        rl_step=0, policy="none", reward_mean=math.nan, num_tokens=3, metrics={"drift_kl": math.nan, "lr": 1.0}, **times
    )
    recipe = Recipe.model_validate({"model": "m", "reward": "r:f", "data": {"train": "t"}})
    state = RunState(rl_step=1, policy_version=1, reports=[report])
    write_state(tmp_path, state, {"order": {"taken": 3}}, [{}, {}], recipe)
    json.loads((tmp_path / "state.json").read_text(), parse_constant=lambda name: 1 / 0)
    read, parts = read_state(tmp_path, recipe)
    (again,) = read.reports
    assert math.isnan(again.reward_mean)
    assert math.isnan(again.metrics["drift_kl"])
    assert again.metrics["lr"] == 1.0
    assert (read.rl_step, read.policies, parts["order"]) == (1, [], {"taken": 3})
