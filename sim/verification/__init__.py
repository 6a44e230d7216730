"""Simulated against recorded: rollouts, drafter training on idle workers, off-policy estimates."""
