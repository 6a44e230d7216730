"""Architectures of learned drafters (a small head, EAGLE, EAGLE-3) and the target's hidden states that they read."""
