"""Policies, systems and settings beside each other: rows, points of a grid, and what speculation would bring."""
