"""`tltlab bench ...`: the benchmarks in `tests/bench` of a checkout; a wheel holds none."""

import os
import sys
from importlib import import_module
from pathlib import Path

from tltlab.console import command_group
from tltlab.errors import ConfigError

TESTS = Path(__file__).resolve().parents[2] / "tests"


if not (TESTS / "bench" / "app.py").is_file():
    raise ConfigError("benchmarks are not part of the wheel: run tltlab bench in a clone, after pip install -e .")
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))
    # Processes that the commands start find the package `bench` too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
app = command_group(help="Benchmarks, as ratios within one run; for a clone of the repository.")
app.registered_commands += import_module("bench.app").app.registered_commands
