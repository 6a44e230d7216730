"""Prompts of a run: where they come from and in which order they are rolled out."""
