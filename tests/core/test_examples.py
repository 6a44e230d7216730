"""Examples in docstrings show what is so."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import tltlab

ROOT = Path(tltlab.__file__).parents[1]
SOURCES = [path for folder in ("tltlab", "sim") for path in (ROOT / folder).rglob("*.py") if ">>> " in path.read_text()]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
PUBLIC = {name: getattr(tltlab, name) for name in tltlab.__all__}
"""What an example need not import: a reader has it by `from tltlab import ...`."""


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.startswith("tltlab.runtime")))
def test_the_examples_of_a_module_are_true(name: str):
    module = import_module(name if name.startswith("tltlab") else f"tltlab.{name}")
    assert doctest.testmod(module, globs=PUBLIC | vars(module)).failed == 0
