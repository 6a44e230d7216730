"""Examples in docstrings show what is so."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import tltlab

ROOT = Path(tltlab.__file__).parents[1]
FOLDERS = ("tltlab", "sim", "runtime")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if ">>> " in path.read_text()]
PATHS = {path.relative_to(ROOT).with_suffix("").parts for path in SOURCES}
MODULES = {".".join(parts if parts[0] == "tltlab" else ("tltlab", *parts)) for parts in PATHS}
PUBLIC = {name: getattr(tltlab, name) for name in tltlab.__all__}
"""What an example need not import: a reader has it by `from tltlab import ...`."""


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_examples_of_a_module_are_true(name):
    if name.startswith("tltlab.runtime"):
        pytest.importorskip("vllm", reason="no engine installed: extra 'runtime' or 'runtime-cpu'")
    module = import_module(name)
    assert doctest.testmod(module, globs=PUBLIC | vars(module)).failed == 0
