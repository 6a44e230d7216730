"""Events of a run on a disk that fills up."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tltlab.runtime.run.events import RunEvents


def test_a_full_disk_costs_lines_and_leaves_no_half_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = RunEvents(tmp_path / "events.jsonl")
    write = os.write

    def half(file: int, line: bytes) -> int:
        return write(file, line[:10])

    def full(file: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    events.note("before")
    for fails in (half, full):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", fails)
            events.note("lost")
    events.note("after", worker=1)
    found = [json.loads(line) for line in events.path.read_text().splitlines()]
    assert [row["event"] for row in found] == ["before", "after"]
    assert events.take() == ["before", "lost", "lost", "after"]
