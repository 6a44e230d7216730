"""A process that was stopped is told and killed after the time that it was given, another one is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tltlab.runtime.ray.stopped import StoppedProcesses, is_stopped


@contextmanager
def waiting(num: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        made = []
        for _ in range(num):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
            )
            stack.callback(process.kill)
            made.append(process)
        yield made


def stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_who_is_stopped_too_long_is_killed_and_who_goes_on_is_not():
    told: list[str] = []
    with waiting(3) as (stays, rests, runs):
        watch = StoppedProcesses(
            lambda: {"trainer rank 0": stays.pid, "trainer rank 1": rests.pid, "engine": runs.pid, "none yet": 0},
            told.append,
            patience_s=60.0,
        )
        for process in (stays, rests):
            stop(process)
        watch.look(100.0)
        watch.look(159.0)
        os.kill(rests.pid, signal.SIGCONT)
        os.waitpid(rests.pid, os.WCONTINUED)
        watch.look(160.0)
        assert told == [f"the trainer rank 0 (process {stays.pid}) was stopped for 60 s, and is killed"]
        assert stays.wait() == -signal.SIGKILL
        # What rested begins anew.
        stop(rests)
        watch.look(200.0)
        watch.look(259.0)
        assert (rests.poll(), runs.poll(), len(told)) == (None, None, 1)


def test_a_process_that_is_not_there_is_not_stopped():
    with waiting(1) as (process,):
        pass
    assert not is_stopped(process.pid)
    with StoppedProcesses(dict, print, patience_s=0.0):
        pass
