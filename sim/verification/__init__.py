"""Simulated against recorded: rollouts of runs, with the drafters that they trained, and training logs."""
