"""Fixtures shared by the core's tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tltlab.cli.app import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys):
    """Runs a command line; returns (exit code, standard output, standard error)."""

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def shared_data():
    """The folder of measured calibration data, which is not part of the repository; a test without it is skipped."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TLTLAB_DATA", beside))
    if not folder.is_dir():
        pytest.skip("no calibration data: set TLTLAB_DATA to its folder")
    return folder
