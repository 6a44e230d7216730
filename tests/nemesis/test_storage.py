"""A short part of the nemesis of recordings and checkpoints: `TLTLAB_NEMESIS=1000` has so many faults strike.

A case that fails says its seed; `TLTLAB_NEMESIS_SEED=n` begins with that one, and one fault is one case.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS, SEED = int(os.environ.get("TLTLAB_NEMESIS", 6)), os.environ.get("TLTLAB_NEMESIS_SEED", "0")


@pytest.mark.timeout(600 + 20 * FAULTS)
def test_a_disturbed_run_ends_as_the_undisturbed_one():
    command = [sys.executable, "-m", "tests.nemesis.storage", "--seed", SEED, "--faults", str(FAULTS)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads(done.stdout)["faults"] >= FAULTS
