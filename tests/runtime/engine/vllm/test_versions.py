"""Sources of vLLM are read for what the adapter touches, and the table of versions says what they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tltlab.runtime.engine.vllm import capabilities
from tltlab.runtime.engine.vllm.capabilities import CAPABILITIES, VERSIONS, lacks

from .versions import Sources, has_each, table

MADE_UP = {
    "core/__init__.py": "from .scheduler import Scheduler as Planner",
    "core/scheduler.py": """
from vllm.core.base import Base
if True:
    try:
        from fast import twice
    except ImportError:
        def twice(x, *, deep): ...
class Scheduler(Base[int]):
    limit: int = 1
    def schedule(self, now):
        self.table = self.made
""",
    "core/base.py": """
class Base:
    def __init__(self, config):
        self.waiting = []
""",
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in MADE_UP.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("touch", "there"),
    [
        ("core:Planner.schedule(now)", True),
        ("core:Planner.schedule(now, then)", False),
        ("core:Scheduler", False),
        ("core.scheduler:Scheduler.table", True),
        ("core.scheduler:Scheduler.waiting", True),
        ("core.scheduler:Scheduler(limit, config)", True),
        ("core.scheduler:Scheduler(limit, size)", False),
        ("core.scheduler:Scheduler.running", False),
        ("core.scheduler:twice(deep)", True),
        ("core.nowhere:Scheduler", False),
    ],
)
def test_sources_are_read_through_imports_bases_and_what_methods_set(sources: Sources, touch: str, there: bool):
    assert sources.has(touch) is there


def test_the_vllm_that_runs_and_its_sources_say_the_same_and_what_the_table_of_versions_says():
    installed = Sources.installed()
    assert installed is not None
    for name in CAPABILITIES:
        assert lacks(name) == installed.lacks(name), name
    versions = json.loads(VERSIONS.read_text())
    assert versions[installed.version()] == {"torch": installed.torch(), "has": has_each(installed)}


def test_the_readme_has_the_table_of_versions():
    versions = json.loads(VERSIONS.read_text())
    assert all(row["has"].keys() == CAPABILITIES.keys() for row in versions.values()), "write it anew from wheels"
    assert table(versions) in (Path(capabilities.__file__).parents[2] / "README.md").read_text()
