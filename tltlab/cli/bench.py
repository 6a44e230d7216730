"""`tltlab bench ...`: the benchmarks in `tests/bench` of a checkout; a wheel holds none."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tltlab.console import command_group
from tltlab.errors import ConfigError

if TYPE_CHECKING:
    from typer import Typer

TESTS = Path(__file__).resolve().parents[2] / "tests"


def _benchmarks(*, help: str) -> Typer:
    """Return the group of commands; processes that these start find the package `bench` too."""
    if not (TESTS / "bench" / "app.py").is_file():
        raise ConfigError("benchmarks are not part of the wheel: run tltlab bench in a clone, after pip install -e .")
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
    group = command_group(help=help)
    group.registered_commands += import_module("bench.app").app.registered_commands
    return group


app = _benchmarks(help="Benchmarks, as ratios within one run; for a clone of the repository.")
