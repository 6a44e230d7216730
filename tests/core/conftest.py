"""Fixtures shared by the core's tests."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.typed import typed

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys):
    """Runs a command line; returns (exit code, standard output, standard error)."""
    return partial(typed, capsys)


@pytest.fixture(scope="session")
def shared_data():
    """The folder of measured calibration data, which is not part of the repository; a test without it is skipped."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TLTLAB_DATA", beside))
    if not folder.is_dir():
        pytest.skip("no calibration data: set TLTLAB_DATA to its folder")
    return folder
