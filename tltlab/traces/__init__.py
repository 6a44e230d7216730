"""Recorded and simulated rollouts on disk: schema, reading and writing, the recorder, metrics."""
