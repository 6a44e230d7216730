"""Imported by every Python that a test starts: looking for garbage takes a third of the time that importing vLLM does."""

import gc

gc.set_threshold(100_000, 20, 100)
