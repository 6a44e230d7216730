"""Drafters trained, evaluated and exported apart from an RL run."""
