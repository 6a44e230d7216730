"""Recorded and simulated rollouts on disk: schema, rows, reading and writing, the recorder, metrics."""
