"""Benchmarks of the drafter's training: packing, checkpoints, recipes, coordination, intervals."""
