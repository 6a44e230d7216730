"""Prompts of a run: their sources and the order in which they are rolled out."""
