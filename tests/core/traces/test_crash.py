"""The power may go at any moment of a recording: no flushed RL step is lost, and none is read that was not written.

`TLTLAB_CRASH=1` looks at every state that the disk may be in, else at some, always the same.
"""

import os

import pytest

from tltlab.errors import TltlabError
from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.trace import read

from ...crash_states import Disk, crashes, put
from .recordings import MANIFEST, record, rows

Attempts = dict[int, int]
"""RL step to the attempt whose rows it holds."""


class Run:
    """Records as a run does, and tells after each call what is to be there from then on."""

    def __init__(self, disk):
        self.disk, self.path = disk, disk.root / "run" / "trace"
        self.there = {}
        self.told = [(disk.look(), self.there)]

    def tell(self, there):
        self.there = there
        self.told.append((self.disk.look(), there))

    def open(self, rl_steps=0):
        self.recorder = Recorder.reopen(self.path, MANIFEST, rl_steps)
        self._keep(rl_steps)

    def flush(self, step, attempt=0):
        record(self.recorder, [step], attempt)
        self.tell(self.there | {step: attempt})

    def rewind(self, rl_steps):
        self.recorder.rewind(rl_steps)
        self._keep(rl_steps)

    def close(self):
        self.recorder.close()
        self.tell(self.there)

    def _keep(self, rl_steps):
        self.tell({step: attempt for step, attempt in self.there.items() if step < rl_steps})


def recording(run):
    run.open()
    run.flush(0)
    run.flush(1)
    run.rewind(1)
    run.flush(1, attempt=1)
    run.close()


def resumed(run):
    run.open()
    run.flush(0)
    run.flush(1)
    run.close()
    run.open(1)
    run.flush(1, attempt=1)
    run.flush(2)
    run.close()


def attempts_in(trace):
    """Which attempt each RL step holds, every row of every table compared with what was recorded."""
    found = {}
    for step in trace.rl_steps:
        part = trace.select([step])
        found[step] = part.outcomes["response_tokens"].iloc[0] - 1
        for name, wanted in rows(step, found[step]).items():
            table = part.arrow(name)
            assert table is not None, (step, name)
            assert table.select(list(wanted[0])).to_pylist() == wanted, (step, name)
        spans = part.arrow("spans")
        assert (0 if spans is None else len(spans)) == (found[step] == 1)
    return found


def seen(look, path):
    try:
        return attempts_in(look(path))
    except TltlabError:
        return {}


@pytest.mark.parametrize("what", [recording, resumed])
def test_the_power_may_go_at_any_moment(tmp_path, monkeypatch, what):
    root = tmp_path / "disk"
    root.mkdir()
    with Disk(root) as disk:
        run = Run(disk)
        what(run)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # for who looks afterwards, it is only slow
    place, looked_at = tmp_path / "after", 0
    for (before, after), state in crashes(disk, run.told, short=10):
        looked_at += 1
        path = place / "run" / "trace"
        put(state, place)
        assert seen(read, path) in (before, after)
        if looked_at % 2:
            goes_on(path, before, after)
        else:
            assert seen(repair, path) in (before, after)
    assert looked_at >= 10


def goes_on(path, before, after):
    """A run that continues has every RL step that was flushed, and records on."""
    steps = min(len(before), len(after))
    kept = [{step: attempt for step, attempt in one.items() if step < steps} for one in (before, after)]
    with Recorder.reopen(path, MANIFEST, steps) as recorder:
        if steps:
            assert attempts_in(recorder.snapshot()) in kept
        record(recorder, [steps], attempt=2)
    assert attempts_in(read(path)) in [one | {steps: 2} for one in kept]
