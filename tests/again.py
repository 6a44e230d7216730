"""`pytest --again`: what failed runs once more, each test in a process of its own.

A test that passes only then depends on order or load. Its name is printed at the end, beside those of earlier calls
(`names` in pytest's cache, which `make quick` removes as it begins), and the third of them fails the run.
"""

import subprocess
import sys

import pytest

FLAKY_AT_MOST = 2
"""Tests of a run that may pass only when run again."""
AGAIN_AT_MOST = 10
"""Failed tests that run again: more of them have one cause."""
NAMES = "again/names"


def pytest_addoption(parser):
    parser.addoption("--again", action="store_true", help="what failed runs once more; two may pass only then")


def pytest_configure(config):
    # With pytest-xdist all reports arrive in the process that starts the others.
    if config.option.again and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config))


def passes_alone(config, name):
    """Whether a test passes in a process of its own, whose output follows."""
    command = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", name)
    return subprocess.run(command, cwd=config.rootpath).returncode == pytest.ExitCode.OK


class Again:
    def __init__(self, config):
        self.config = config
        self.failed = {}
        self.names = config.cache.get(NAMES, [])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        left = len(self.failed)
        for name in [*self.failed][:AGAIN_AT_MOST]:
            print(f"\nonce more: {name}", flush=True)
            if passes_alone(self.config, name):
                self.names.append(name)
                left -= 1
        self.config.cache.set(NAMES, self.names)
        if not left and len(self.names) <= FLAKY_AT_MOST:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_unconfigure(self):
        for name in self.names:
            print(f"passed only when run again: {name}")
        if len(self.names) > FLAKY_AT_MOST:
            print(
                f"the run has failed: {len(self.names)} tests passed only when run again, at most {FLAKY_AT_MOST} may"
            )
