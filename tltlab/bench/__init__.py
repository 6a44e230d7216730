"""Benchmarks and how presets were made; only the experiments and the demo import from it."""
