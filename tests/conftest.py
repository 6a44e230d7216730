"""Property tests draw the same few examples in every run; `TLTLAB_FUZZ=1` draws new ones, and ten times as many.

With `pytest -n 2` processes take a file at a time, those that start engines first, and of these the ones that share
a process's Ray: what is left for the end is short. A file's fixtures are made once, in the process that has the file.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tltlab.console import JSON, running

# How long an example takes to make says how busy the machine is.
UNTIMED = settings(print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", UNTIMED, derandomize=True, max_examples=40)
settings.register_profile("fuzz", UNTIMED, max_examples=400)
settings.load_profile("fuzz" if os.environ.get("TLTLAB_FUZZ") else "same")
# This process and those that tests start look for garbage seldom and do not wait for the disk: see `sitecustomize`.
START_UP = Path(__file__).parent / "start_up"
PATHS = (str(START_UP), str(START_UP.parent), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))
runpy.run_path(str(START_UP / "sitecustomize.py"))
# On a busy machine Ray declares a node dead, and with it the test's process, that does not answer in time.
os.environ.setdefault("RAY_health_check_timeout_ms", "60000")
os.environ.setdefault("RAY_health_check_failure_threshold", "20")
# More than a hundred processes import the same modules: they are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ("again",)


@pytest.fixture
def as_json():
    """Commands that are called as functions print JSON."""
    token = running.set((JSON,))
    yield
    running.reset(token)


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write what commands print to tests/golden/printed")


STARTING = {"ray_cluster", "one_ray"}
"""Fixtures that start Ray or a trainer's process: what uses one of them has the marker `engine`."""

ON_RAY = set()
"""Files that share one Ray."""

ONE_ENGINE = {
    f"tests/runtime/engine/{name}.py"
    for name in (
        "test_canary", "test_drafter_pool", "test_engine", "test_faults", "vllm/test_capture", "vllm/test_runners",
        "vllm/test_scheduler",
    )
}  # fmt: skip
"""Their tests share two engines (`tests/runtime/engine/conftest.py`), so they run in one process."""

LONGEST = {
    "test_audit.py", "test_demo.py", "test_faults.py", "test_kinds.py", "test_mtp.py",
    "test_notebooks.py", "test_placement.py", "test_process.py", "test_run.py",
    "test_tensor_parallel.py", "test_v2_runner.py",
}  # fmt: skip
"""Slow tests begin first, so that no process runs alone at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            scope = str(super()._split_scope(nodeid))
            return "one engine" if scope in ONE_ENGINE else scope

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if STARTING & set(getattr(item, "fixturenames", ())):
            item.add_marker("engine")
    engines = {item.path for item in items if item.get_closest_marker("engine")}
    ON_RAY.update(item.path for item in items if "one_ray" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: (item.path not in engines, item.path not in ON_RAY, item.path.name not in LONGEST))


@pytest.fixture(scope="module")
def one_ray():
    """Ray for all files in a row that ask for it, since starting it takes seconds."""
    from tltlab.runtime.ray.start import start_ray

    start_ray()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    over = item.path in ON_RAY and (nextitem is None or nextitem.path not in ON_RAY)
    if over and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture(scope="session", autouse=True)
def _forks(request):
    """Whatever runs start on Ray here are forks of one process."""
    if not any(item.get_closest_marker("engine") for item in request.session.items):
        yield
        return
    from prefork import MODULES, RUNNING, Prefork
    from tltlab.runtime.ray.start import ENV, worker_commands

    with Prefork(MODULES, ENV) as forks:
        RUNNING.append(forks)
        worker_commands.append(forks.command)
        yield


_unfreeze = gc.unfreeze
_unfrozen = False


def _unfreeze_and_tell():
    """`gc.unfreeze`, remembered: `gc.get_freeze_count` walks through all that is frozen, 0.05 s for each test."""
    global _unfrozen
    _unfrozen = True
    _unfreeze()


def pytest_collection_finish():
    # What was imported stays: every later collection would go through it again.
    gc.collect()
    gc.freeze()
    gc.unfreeze = _unfreeze_and_tell


def pytest_runtest_logfinish():
    # As an engine closes vLLM lets go of all that was frozen, and the next one would go through it several times.
    global _unfrozen
    if _unfrozen:
        gc.collect()
        gc.freeze()
        _unfrozen = False


def pytest_unconfigure():
    gc.unfreeze = _unfreeze
    gc.unfreeze()
