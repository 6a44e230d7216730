"""A GRPO run from start to end: the RL step, actors, checkpoints, metrics and loggers."""
