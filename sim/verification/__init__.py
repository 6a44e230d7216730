"""Simulated against recorded: rollouts, drafter training on idle workers, training logs."""
