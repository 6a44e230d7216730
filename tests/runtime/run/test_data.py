"""What a run's data says of the prompts that are still to come, and which RL steps are rolled out ahead."""

import json
from contextlib import closing

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.recipe.sections import RolloutConfig
from tltlab.runtime.run.data import RolloutsAhead, RunData

from ..small_models import small_recipe


def test_prompts_recur_in_the_datas_order(recipe_file):
    run = data(recipe_file, "rollout.prompts_per_step=8")
    taken = [run.train[number].prompt_id for _, number in run.order.take(8)]
    fresh = [prompt.prompt_id for prompt in run.train if prompt.prompt_id not in taken]
    again = run.next_use([*taken, *fresh], rl_steps_left=4)
    # 24 prompts are left of the epoch; of the eight that came some are among the first eight of the next.
    assert sorted(turn for turn in again[8:] if turn is not None) == list(range(24))
    assert all(turn is None or 24 <= turn < 32 for turn in again[:8])
    assert run.next_use(taken, rl_steps_left=3) == [None] * 8
    ahead = [run.train[number].prompt_id for _, number in run.order.take(8) + run.order.take(8)]
    assert [fresh[again[8:].index(turn)] for turn in range(16)] == ahead
    assert run.next_use(taken, rl_steps_left=0) == [None] * 8


def data(recipe_file, *settings):
    recipe = load_recipe(recipe_file, settings)
    return RunData(recipe, load_tokenizer(recipe.model))


def test_prompts_beside_which_response_is_cut_are_counted(recipe_file, tmp_path):
    """Prompts of six words; the recipe's engines have 128 tokens, the model 256."""
    notes = data(recipe_file, "rollout.max_response_tokens=123").notes
    assert [note.partition(" ")[0] for note in notes] == ["32", "16"]
    assert all("rollout.max_response_tokens = 123" in note and "128" in note for note in notes)
    assert data(recipe_file).notes == []
    long = tmp_path / "long.jsonl"
    row = json.dumps({"prompt_id": "long", "prompt": "w1 " * 300, "answer": "even"})
    long.write_text(row + "\n" + (recipe_file.parent / "train.jsonl").read_text())
    few = "data.max_prompt_tokens=99"
    for name in ("train", "heldout"):
        longer = [f"data.{name}={long}", "rollout.vllm={}"]
        with refused(ConfigError, naming=("long.jsonl", "line 1", "300 tokens", "256")):
            data(recipe_file, *longer)
        assert [note.split()[0] for note in data(recipe_file, *longer, few).notes] == ["1"]
    with refused(ConfigError, naming=("data.max_prompt_tokens = 99", "rollout.prompts_per_step = 33", 32)):
        data(recipe_file, f"data.train={long}", few, "rollout.prompts_per_step=33")


def test_rollouts_ahead_stop_at_a_checkpoint():
    recipe = small_recipe(rollout={"one_step_off": True}, train={"steps": 5}, checkpoint={"every": 3})
    came = []

    def collect(rl_step):
        came.append(rl_step)
        return rl_step

    with closing(RolloutsAhead(recipe, collect)) as ahead:
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
        ahead.begin(1)
        ahead.ending = True
        ahead.begin(2)
        assert not ahead.is_empty
        assert ahead.take(1) == 1
        assert ahead.is_empty, "an ending run rolls out no other RL step"
    synchronous = RolloutsAhead(recipe.model_copy(update={"rollout": RolloutConfig()}), collect)
    synchronous.begin(1)
    assert synchronous.take(7) == 7
