"""Engines of the conformance tests run the random model of the runtime's tests."""

from tests.runtime.conftest import random_model, recipe_file

__all__ = ["random_model", "recipe_file"]
