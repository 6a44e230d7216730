"""A run that trains adapters: engines roll out by the trainer's weights, merged or applied by vLLM."""

import pytest

from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.grpo import GrpoRun

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
SETTINGS = "train.lora.rank=4 train.lr=0.02 train.kl_coef=0.01 rollout.policy=ngram:4 rollout.repeat_every=0"


@pytest.mark.parametrize("serve", ["merged", "adapter"])
def test_engines_have_the_trained_adapters(recipe_file, tmp_path, serve):
    recipe = load_recipe(recipe_file, [*SETTINGS.split(), f"train.lora.serve={serve}"])
    with GrpoRun(recipe, tmp_path) as run:
        steps = [run.step().metrics for _ in range(3)]
    assert steps[0]["drift_kl"] > 1e-2
    assert max(metrics["mismatch_abs"] for metrics in steps) < 1e-5
