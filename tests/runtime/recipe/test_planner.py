"""Settings of planners: what is refused, and where engines of a tail shape run."""

import pytest

from tests.refused import refused
from tltlab.costs.load import load_costs
from tltlab.errors import ConfigError
from tltlab.planning.rollout import Shape
from tltlab.runtime.recipe.checks import planner
from tltlab.runtime.recipe.gpus import bundles_of
from tltlab.runtime.recipe.planner import costs_of_shapes
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.recipe.rules import planner_costs
from tltlab.runtime.run.placement import GpuPlacement

EIGHT = ["rollout.num_workers=8", "rollout.prompts_per_step=8"]


def gathering(*settings):
    return load_recipe("gather_smoke", settings)


@pytest.mark.parametrize(
    ("settings", "naming"),
    [
        ([*EIGHT, "rollout.tail_shape=3x2"], ("rollout.tail_shape", "3x2", "8x1")),
        ([*EIGHT, "rollout.tail_shape=wide"], ("rollout.tail_shape", "'wide'", "2x4")),
        (["rollout.tail_shape=2x1"], ("rollout.tail_shape", "2x1")),
        (["rollout.planner=null"], ("rollout.tail_shape", "rollout.planner")),
        (["rollout.gpus_per_worker=0.5"], ("rollout.gpus_per_worker",)),
        (["rollout.staleness=1"], ("rollout.planner", "rollout.staleness")),
        (['rollout.planner_costs=["cpu-small"]'], ("rollout.planner_costs", "rollout.tail_shape")),
        (["rollout.repeat_every=2"], ("rollout.planner", "rollout.repeat_every")),
    ],
)
def test_settings_that_contradict_are_refused(settings, naming):
    with refused(ConfigError, naming=naming):
        gathering(*settings)


def test_planners_that_do_not_load_and_heads_that_do_not_divide(random_model):
    for name, facts in (
        ("gatherer", ("'gatherer'", "gather")),
        ("clairvoyant", ("'clairvoyant'", "lengths", "simulator")),
        ("no_such_module:Planner", ("no_such_module",)),
    ):
        with refused(ConfigError, naming=facts):
            planner(gathering(f"rollout.planner={name}"))
    for name in ("gather", "rebalance"):
        planner(gathering(f"model={random_model}", f"rollout.planner={name}"))
    odd = [f"model={random_model}", "rollout.num_workers=3", "rollout.tail_shape=1x3", "rollout.prompts_per_step=6"]
    with refused(ConfigError, naming=("heads",)):
        planner(gathering(*odd))


def test_tail_engines_have_the_gpus_of_whole_workers(monkeypatch):
    own = ["cluster.gpus_per_node=8", "cluster.gpu=H100", "model=Qwen2.5-7B", "rollout.tail_shape=2x2"]
    recipe = gathering(*own, "rollout.num_workers=4", "rollout.planner_costs=[]")
    bundles = bundles_of(recipe)
    assert bundles.all == (2.0, 2.0, 1.0)
    place = GpuPlacement(recipe)
    place._visible = [["0", "1"], ["2", "3"]]
    monkeypatch.setattr(place, "_in", lambda bundle: bundle)
    gpus = [place.worker_options(n)["env_vars"]["CUDA_VISIBLE_DEVICES"] for n in range(6)]
    assert gpus == ["0", "1", "2", "3", "0,1", "2,3"]
    costs = costs_of_shapes(recipe)
    assert list(costs) == [Shape(engines=4, gpus=1), Shape(engines=2, gpus=2)]
    (note,) = planner_costs(recipe)
    assert "H100" in note
    one, two = (each.costs.iteration(each.strategies[0]).without_context_s(1) for each in costs.values())
    assert two < one


def test_costs_of_each_shape_are_given(tmp_path):
    wide = load_costs("cpu-small").model_copy(update={"base_s": 1.0})
    (tmp_path / "wide.json").write_text(wide.model_dump_json())
    recipe = gathering(f'rollout.planner_costs=["cpu-small","{tmp_path / "wide.json"}"]')
    assert [each.costs.base_s for each in costs_of_shapes(recipe).values()] == [load_costs("cpu-small").base_s, 1.0]
    (note,) = planner_costs(recipe)
    assert "wide.json" in note
