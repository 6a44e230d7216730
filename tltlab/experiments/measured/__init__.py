"""Experiments that train on real engines."""
