"""Fixtures shared by the core's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured calibration data, which is not part of the repository; a test without it is skipped."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TLTLAB_DATA", beside))
    if not folder.is_dir():
        pytest.skip("no calibration data: set TLTLAB_DATA to its folder")
    return folder
