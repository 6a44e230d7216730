"""The recipes that come with tltlab: each is read, planned, and found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.policies.policy import load_policy
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.recipe import Recipe, builtin_recipes, find_recipe, load_recipe

OWN_MODEL = ("asynchronous", "calculator", "cpu", "gpu_smoke")


@pytest.mark.parametrize("name", builtin_recipes())
def test_each_is_read_and_planned_and_fits_its_gpus(name: str, random_model: Path):
    recipe = load_recipe(name, [f"model={random_model}"] if name in OWN_MODEL else [])
    plan = plan_of(recipe)
    assert plan.fits is (None if name in OWN_MODEL else True)
    assert "rollout worker" in plan.text()
    load_policy(recipe.rollout.policy)
    for term in [recipe.reward] if isinstance(recipe.reward, str) else [term.path for term in recipe.reward]:
        module, _, function = term.partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


def tlt(size: str) -> Recipe:
    return load_recipe(f"qwen2.5-{size}-tlt")


def test_tlts_settings_are_those_of_its_scripts():
    """The sizes of grpo_7B.sh and grpo_32B_multi_nodes.sh."""
    settings = [
        (
            plan.num_nodes * plan.gpus_per_node,
            plan.responses_per_step,
            recipe.rollout.prompts_per_step // recipe.train.minibatches,
            recipe.data.max_prompt_tokens,
            recipe.rollout.max_response_tokens,
            recipe.rollout.tensor_parallel_size,
            recipe.rollout.vllm["gpu_memory_utilization"],
        )
        for recipe in (tlt("7b"), tlt("32b"))
        for plan in [plan_of(recipe)]
    ]
    assert settings == [(8, 512, 4, 1024, 32768, 4, 0.4), (64, 2048, 8, 2048, 32768, 8, 0.55)]
    for recipe in (tlt("7b"), tlt("32b")):
        assert (recipe.train.lr, recipe.train.kl_coef, recipe.rollout.temperature) == (1e-6, 0.001, 0.9)


def test_a_file_goes_before_a_name_and_what_is_neither_names_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert find_recipe("qwen2.5-0.5b-gsm8k").is_file()
    monkeypatch.chdir(tmp_path)
    Path("cpu").write_text("")
    assert find_recipe("cpu") == Path("cpu")
    names = (
        "asynchronous, calculator, cpu, gpu_smoke, qwen2.5-0.5b-gsm8k, qwen2.5-1.5b-gsm8k, qwen2.5-32b-tlt, "
        "qwen2.5-7b-tlt (did you mean"
    )
    with refused(ConfigError, naming=(names,)):
        find_recipe("qwen2.5-0.5b")
