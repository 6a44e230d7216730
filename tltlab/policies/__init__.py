"""Policies that select a speculative-decoding strategy for each decode step, and their files."""
