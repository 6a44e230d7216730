"""Whatever processes leave behind that were killed goes when the next one begins, and nothing else."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tltlab.files import leftovers
from tltlab.runtime.ray import scratch
from tltlab.runtime.ray.scratch import register, scratch_folder, sweep

KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from tltlab.runtime.ray.scratch import register, scratch_folder

tempfile.tempdir = sys.argv[1]
(scratch_folder("d") / "socket").touch()
for path in sys.argv[2:]:
    register(Path(path))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder in which this process has made nothing yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_scratch", {})
    return tmp_path


def session_in(temporary):
    """A folder as Ray makes them."""
    session = temporary / "ray" / "session_2026-01-02_03-04-05_678_90"
    session.mkdir(parents=True)
    return session


def test_what_a_killed_process_left_goes(temporary):
    session, foreign = session_in(temporary), temporary / "ray" / "mine"
    foreign.mkdir()
    mine = temporary / "tltlab-123-abcdefgh"
    mine.mkdir()
    own = scratch_folder()
    register(session)
    subprocess.run([sys.executable, "-c", KILLED, str(temporary), str(session), str(foreign)], check=False)
    (left,) = (path for path in temporary.glob("tltlab-*") if path not in (mine, own))
    assert leftovers() == [session, left]
    assert sweep() == [session, left]
    assert sorted(path.name for path in temporary.iterdir()) == sorted([own.name, "ray", mine.name])
    assert foreign.exists(), "only what has the name of something that runs leave is removed"
    assert leftovers() == sweep() == []


def test_what_is_still_used_is_not_swept(temporary):
    session = session_in(temporary)
    subprocess.run([sys.executable, "-c", KILLED, str(temporary), str(session)], check=False)
    with subprocess.Popen([sys.executable, "-c", "input()", str(session)], stdin=subprocess.PIPE) as user:
        assert sweep() == []
        user.kill()
    assert len(sweep()) == 2
    assert not session.exists()


def test_agents_of_a_killed_rays_session_end(temporary):
    """Ray names its processes by titles; whoever else reads a log of the session continues."""
    session = session_in(temporary)
    subprocess.run([sys.executable, "-c", KILLED, str(temporary), str(session)], check=False)
    code = "import sys; file = open(sys.argv[1], 'a'); print(flush=True); input()"
    other = temporary / "other.log"
    read = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "executable": sys.executable}
    logs = {"ray::DashboardAgent": session / "agent.log", "reader": session / "agent.log", "ray::Agent": other}
    processes = [subprocess.Popen([title, "-c", code, str(log)], **read) for title, log in logs.items()]
    try:
        for process in processes:
            process.stdout.readline()
        sweep()
        assert processes[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


MEMORY = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from tltlab.runtime.ray.scratch import register_memory

tempfile.tempdir = sys.argv[1]
context = multiprocessing.get_context("spawn")
lock = context.Lock()
memory = shared_memory.SharedMemory(create=True, size=64)
register_memory()
print(lock._semlock.name.lstrip("/"), memory.name.lstrip("/"), flush=True)
input()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_memory_of_a_killed_process_goes_unless_used(temporary):
    command = [sys.executable, "-c", MEMORY, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        semaphore, name = process.stdout.readline().split()
        left = [Path("/dev/shm") / f"sem.{semaphore}", Path("/dev/shm") / name]
        try:
            assert leftovers() == []
            assert sweep() == []
            process.communicate("\n", timeout=60)
            assert leftovers()[:2] == sorted(left, key=str)
            with mapped(left[1]):
                assert left[0] in sweep()
                assert left[1].exists()
            assert left[1] in sweep()
            assert leftovers() == []
        finally:
            process.kill()
            for path in left:
                path.unlink(missing_ok=True)


def test_a_process_without_shared_memory_makes_no_folder(temporary):
    code = "import os, sys, tempfile\nfrom tltlab.runtime.ray.scratch import register_memory\n"
    code += "tempfile.tempdir = sys.argv[1]\nregister_memory()\nos._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(temporary)], check=True)
    assert list(temporary.iterdir()) == []


@contextmanager
def mapped(path):
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        yield


def test_a_process_takes_its_scratch_folder_with_it(temporary):
    first = scratch_folder("d")
    assert first != scratch_folder("d")
    assert first.stat().st_mode & 0o777 == 0o700
    assert first.parent.stat().st_mode & 0o777 == 0o700
    session = session_in(temporary)
    register(session)
    scratch._end_scratch(os.getpid())
    assert not first.exists()
    assert leftovers() == [session, first.parent]
    session.rmdir()
    scratch_folder()
    scratch._end_scratch(os.getpid())
    assert list(temporary.iterdir()) == [temporary / "ray"]
