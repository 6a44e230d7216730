"""GRPO training against TRL, on the same samples and in time."""
