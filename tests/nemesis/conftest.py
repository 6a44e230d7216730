"""The random model that runs of the runtime are tested with."""

from ..runtime.conftest import random_model, recipe_file

__all__ = ["random_model", "recipe_file"]
