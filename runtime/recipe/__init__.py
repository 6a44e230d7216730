"""Recipes of training runs: the settings, their checks before a run starts, the dry run's estimates."""
