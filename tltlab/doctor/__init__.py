"""Checks of a recorded run and of the machine, each with its finding and what to do about it."""
