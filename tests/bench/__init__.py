"""Benchmarks and how presets were made; nothing in the product imports them."""
