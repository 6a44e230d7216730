"""Comparison of policies, systems and settings: rows, points of a grid, and the gain of speculation."""
