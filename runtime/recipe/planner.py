"""Means of a recipe's planner: the shapes of its engines, and their costs."""

from tltlab.costs.load import load_costs
from tltlab.planning.rollout import EngineCosts, Shape

from .recipe import Recipe, pass_costs
from .sections import Sections

SWITCH_S = 0.3
"""Seconds that engines of another shape are taken to need until they run, before any did."""


def engine_gpus(recipe: Sections) -> list[range]:
    """Return the GPUs of each engine, of those of all workers: the recipe's engines first, then those of a tail shape.

    On CPUs they are ranks.
    """
    return [
        range(n * shape.gpus, (n + 1) * shape.gpus) for shape in recipe.rollout.shapes for n in range(shape.engines)
    ]


def costs_of_shapes(recipe: Recipe) -> dict[Shape, EngineCosts]:
    """Return the costs of plain decoding on engines of each shape; none without a planner.

    They are `rollout.planner_costs`, or those of `pass_costs`. ConfigError for unknown costs.
    """
    rollout = recipe.rollout
    if rollout.planner is None:
        return {}
    shapes = rollout.shapes
    given = map(load_costs, rollout.planner_costs)
    most = {"max_num_seqs": rollout.vllm["max_num_seqs"]} if "max_num_seqs" in rollout.vllm else {}
    modelled = (pass_costs(recipe, shape.gpus, "rollout.planner").model_copy(update=most) for shape in shapes)
    known = list(given) or list(modelled)
    return {shape: EngineCosts(shape, costs, switch_s=SWITCH_S) for shape, costs in zip(shapes, known, strict=True)}
