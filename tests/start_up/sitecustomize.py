"""Every Python that a test starts imports this: looking for garbage takes a third of the time of importing vLLM."""

import gc

gc.set_threshold(100_000, 20, 100)
