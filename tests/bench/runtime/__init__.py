"""Rollouts under every policy on real engines, against stock vLLM, in turn."""
