"""A GRPO run from start to end: the RL step, actors, checkpoints and recovery, metrics and loggers."""
