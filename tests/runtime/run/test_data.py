"""What a run's data says of the prompts that are still to come, and which RL steps are rolled out ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.recipe.sections import RolloutConfig
from tltlab.runtime.run.data import RolloutsAhead, RunData

from ..small_models import small_recipe


def test_prompts_come_again_in_the_datas_order(recipe_file: Path):
    recipe = load_recipe(recipe_file, ["rollout.prompts_per_step=8"])
    data = RunData(recipe, load_tokenizer(recipe.model))
    taken = [data.train[number].prompt_id for _, number in data.order.take(8)]
    fresh = [prompt.prompt_id for prompt in data.train if prompt.prompt_id not in taken]
    again = data.comes_again([*taken, *fresh], rl_steps_left=4)
    # 24 prompts are left of the epoch; of the eight that came some are among the first eight of the next.
    assert sorted(turn for turn in again[8:] if turn is not None) == list(range(24))
    assert all(turn is None or 24 <= turn < 32 for turn in again[:8])
    assert data.comes_again(taken, rl_steps_left=3) == [None] * 8
    ahead = [data.train[number].prompt_id for _, number in data.order.take(8) + data.order.take(8)]
    assert [fresh[again[8:].index(turn)] for turn in range(16)] == ahead
    assert data.comes_again(taken, rl_steps_left=0) == [None] * 8


def test_rollouts_ahead_stop_at_a_checkpoint():
    recipe = small_recipe(rollout={"one_step_off": True}, train={"steps": 5}, checkpoint={"every": 3})
    came: list[int] = []

    def collect(rl_step: int) -> Any:
        came.append(rl_step)
        return rl_step

    with RolloutsAhead(recipe, collect) as ahead:
        began = []
        for rl_step in range(5):
            assert ahead.take(rl_step) == rl_step
            ahead.begin(rl_step + 1)
            ahead.settle()
            began.append(came[-1])
        assert began == [1, 2, 2, 4, 4]
        assert came == [0, 1, 2, 3, 4]
        ahead.begin(1)
        with refused(ConfigError, naming=("already",)):
            ahead.refuse("wait")
        ahead.forget()
        assert ahead.take(0) == 0
    synchronous = RolloutsAhead(recipe.model_copy(update={"rollout": RolloutConfig()}), collect)
    synchronous.begin(1)
    assert synchronous.take(7) == 7
