"""Decisions before a run: buckets under a memory cap, systems of the literature."""
