"""Traces made of other programs' files: rollouts, requests, tables of lengths, logs of metrics."""
