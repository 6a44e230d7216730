"""The recipes that come with tltlab: each is read, planned, and found by its name."""

from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.policies.policy import load_policy
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.recipe import builtin_recipes, find_recipe, load_recipe

OWN_MODEL = ("asynchronous", "calculator", "cpu", "gather_smoke", "gpu_smoke", "lora")


@pytest.mark.parametrize("name", builtin_recipes())
def test_each_recipe_fits_its_gpus(name, random_model):
    recipe = load_recipe(name, [f"model={random_model}"] if name in OWN_MODEL else [])
    plan = plan_of(recipe)
    assert plan.fits is (None if name in OWN_MODEL else True)
    assert "rollout worker" in plan.text()
    load_policy(recipe.rollout.policy)
    for term in [recipe.reward] if isinstance(recipe.reward, str) else [term.path for term in recipe.reward]:
        module, _, function = term.partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_tlts_settings_are_those_of_its_scripts():
    """The sizes of grpo_7B.sh and grpo_32B_multi_nodes.sh."""
    settings = []
    for recipe in (load_recipe("qwen2.5-7b-tlt"), load_recipe("qwen2.5-32b-tlt-base")):
        plan, data, rollout, train = plan_of(recipe), recipe.data, recipe.rollout, recipe.train
        assert (train.lr, train.kl_coef, rollout.temperature) == (1e-6, 0.001, 0.9)
        sizes = (plan.num_nodes * plan.gpus_per_node, plan.responses_per_step, rollout.prompts_per_step)
        lengths = (data.max_prompt_tokens, rollout.max_response_tokens, rollout.tensor_parallel_size)
        settings.append((*sizes, train.minibatches, *lengths, rollout.vllm["gpu_memory_utilization"]))
    assert settings == [(8, 512, 64, 16, 1024, 32768, 4, 0.4), (64, 2048, 256, 32, 2048, 32768, 8, 0.55)]


def test_a_recipe_named_tlt_trains_its_drafter():
    trains = {name: load_recipe(name).drafter is not None for name in builtin_recipes() if "tlt" in name}
    assert trains == {"qwen2.5-7b-tlt": True, "qwen2.5-32b-tlt-base": False}


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    assert find_recipe("qwen2.5-0.5b-gsm8k").is_file()
    monkeypatch.chdir(tmp_path)
    Path("cpu").write_text("")
    assert find_recipe("cpu") == Path("cpu")
    with refused(ConfigError, naming=builtin_recipes()):
        find_recipe("qwen2.5-0.5b")
