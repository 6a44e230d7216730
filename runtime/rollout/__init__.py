"""Rollouts on Ray: workers and their pool, ways to collect responses, prefix reuse, rewards."""
