"""Every Python that a test starts imports this, and so do the tests.

Looking for garbage takes a third of the time of importing vLLM. Nobody waits for the disk: a test reads what it wrote
from the same kernel, which has it also after a kill; `tests/core/test_files.py` alone does wait.
"""

import gc
import os
import sys


def fsync(descriptor):
    os.fstat(descriptor)  # which fails as `fsync` does where nothing is open


gc.set_threshold(100_000, 20, 100)
os.fsync = fsync
if "TLTLAB_NEMESIS_PLAN" in os.environ:
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(__file__)), "nemesis"))
    import points

    points.install_plan()
