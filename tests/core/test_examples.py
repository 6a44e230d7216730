"""Examples in docstrings show what is so."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import tltlab

ROOT = Path(tltlab.__file__).parents[1]
FOLDERS = ("[!_]*.py", "coordination/*.py", "bench/**/*.py")
SOURCES = [path for folder in FOLDERS for path in (ROOT / "tltlab").glob(folder)]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_examples_of_a_module_are_true(name: str):
    assert doctest.testmod(import_module(name)).failed == 0
