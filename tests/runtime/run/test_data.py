"""What a run's data says of the prompts that are still to come."""

from __future__ import annotations

from pathlib import Path

from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.data import RunData


def test_prompts_come_again_in_the_order_of_the_data_or_not_within_the_run(recipe_file: Path):
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
