"""Fixtures of the core's tests and of the runtime's."""

from ...core.conftest import command, shared_data
from ...runtime.conftest import random_model, recipe_file

__all__ = ["command", "random_model", "recipe_file", "shared_data"]
