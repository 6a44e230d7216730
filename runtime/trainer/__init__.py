"""The GRPO trainer: losses, packed attention, log-probabilities, data-parallel ranks, checkpoints."""
