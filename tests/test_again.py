"""A test that passes only when run again is named, and the third one fails the run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", {names})
def test_of(name):
    first = not Path(name).exists()
    Path(name).touch()
    assert name == "right" or not (first or name == "broken")
"""


def ran(folder, *names):
    """Exit status of a run over two processes whose tests of `names` fail at first, and the tests it names at the end.

    "right" does not fail, and "broken" fails again.
    """
    (folder / f"test_{'_'.join(names)}.py").write_text(TESTS.format(names=names))
    command = (sys.executable, "-m", "pytest", "--again", f"test_{'_'.join(names)}.py")
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return ended.returncode, re.findall(r"passed only when run again: \S*\[(\w+)\]", ended.stdout)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p again -p xdist -n 2")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_two_tests_of_two_runs_may_pass_only_again(folder):
    assert ran(folder, "right", "early") == (0, ["early"])
    assert ran(folder, "late") == (0, ["early", "late"])
    assert ran(folder, "third") == (1, ["early", "late", "third"])


def test_what_fails_again_fails_the_run(folder):
    assert ran(folder, "broken", "early") == (1, ["early"])
