"""Named fault points, put into a process from outside: what is tested knows nothing of them.

Once `install`ed, every fsync, rename, removal, new folder and file opened for writing below a folder is a point, and so
is every call to a Ray actor. Its name says who, what and where, numbers and sums left out:

    driver rename checkpoints/step-N            driver call RolloutWorker.generate
    driver fsync trace/outcomes/part-N.parquet  TrainerActor fsync checkpoints/.step-N.*/new/trainer/tensors/*.sha256

A fault strikes before or after the n-th time that a process passes a point; `journal` is a file of JSON lines, one for
each that struck, and with `everything` one for each point passed. A process that a fault's `call` is to is its target.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import re
import resource
import signal
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = ("kill", "stop", "error", "full", "slow", "clock")
"""What may happen where a process is: kill -9, SIGSTOP, one EIO, from here on no file grows, from here on every point
takes SLOW_S, from here on the wall clock is hours off."""
TARGET = ("kill target", "stop target")
SLOW_S, CLOCK_S = 0.003, 7 * 3600.0
_PLAN = "TLTLAB_NEMESIS_PLAN"
_write, _open, _close, _sleep, _clock_ns = os.write, os.open, os.close, time.sleep, time.time_ns


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`action` strikes at the `nth` passing, counted from 1, of `point`; `after` it, else before. Once in all."""

    point: str
    nth: int
    action: str
    after: bool = False


class Points:
    """The points of this process below the folder `under`; `role` is asked each time: a fork may become another."""

    def __init__(self, under, faults, journal, role, *, everything=False):
        self.under, self.faults, self.role, self.everything = os.path.realpath(under), faults, role, everything
        self._journal = str(journal)
        self._passed = Counter()
        self._lock = threading.Lock()
        self._drags = False

    @contextlib.contextmanager
    def passing(self, what, where, target=lambda: None):
        """Within, the point is passed."""
        point = f"{self.role()} {what} {where}"
        with self._lock:
            self._passed[point] += 1
            nth = self._passed[point]
        if self.everything:
            self._note({"point": point, "nth": nth})
        due = [fault for fault in self.faults if (fault.point, fault.nth) == (point, nth)]
        if self._drags:
            _sleep(SLOW_S)
        self._strike(due, False, target)
        yield
        self._strike(due, True, target)

    def _strike(self, due, after, target):
        for fault in due:
            if fault.after == after and self._claim(fault):
                self._act(fault.action, target)

    def _act(self, action, target):
        match action:
            case "kill" | "stop" | "kill target" | "stop target":
                number = signal.SIGKILL if action.startswith("kill") else signal.SIGSTOP
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(target() if action in TARGET else os.getpid(), number)  # type: ignore[arg-type]
            case "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "full":
                # Also what is written by C++, which passes no point.
                resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
            case "slow":
                self._drags = True
            case "clock":
                time.time = lambda: _clock_ns() / 1e9 - CLOCK_S
                time.time_ns = lambda: _clock_ns() - int(CLOCK_S * 1e9)
            case _:
                raise ValueError(action)

    def _claim(self, fault):
        """A fault strikes one process, once: the processes that come after it pass the same points."""
        number = self.faults.index(fault)
        try:
            _close(_open(f"{self._journal}.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        self._note(asdict(fault) | {"struck": number, "pid": os.getpid()})
        return True

    def _note(self, row):
        file = _open(self._journal, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        _write(file, (json.dumps(row) + "\n").encode())
        _close(file)

    def place(self, path, folder=None):
        """The name of a path below the folder, None for any other."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.fsdecode(path)
        if folder is not None and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        return name_of(path[len(self.under) + 1 :]) if path.startswith(self.under + os.sep) else None


def name_of(place):
    """A path without what is another in each run: sums, letters drawn by chance, numbers.

    >>> name_of("trace/tokens/part-000003.parquet"), name_of(".trace.tltlab-x1_y2z3w/new")
    ('trace/tokens/part-N.parquet', '.trace.*/new')
    """
    place = re.sub(r"\.tltlab-[a-z0-9_]{8}(?=/|$)", ".*", place)
    return re.sub(r"\d+", "N", place)


def install(points):
    """Put the points into this process, for good."""

    def wrapped(what, real, at=0):
        def call(*args, **options):
            place = points.place(args[at], options.get("dir_fd")) if len(args) > at else None
            if place is None:
                return real(*args, **options)
            with points.passing(what, place):
                return real(*args, **options)

        return call

    os.replace = wrapped("rename", os.replace, 1)
    os.rename = wrapped("rename", os.rename, 1)
    os.unlink = os.remove = wrapped("unlink", os.unlink)
    os.rmdir = wrapped("rmdir", os.rmdir)
    os.mkdir = wrapped("mkdir", os.mkdir)
    # Nobody waits for the disk: what is killed is a process and not the machine.
    os.fsync = wrapped("fsync", os.fstat)
    opened = io.open

    def open_(file, mode="r", *args, **options):
        place = points.place(file) if not isinstance(file, int) and set(mode) & set("wxa+") else None
        if place is None:
            return opened(file, mode, *args, **options)
        with points.passing("open", place):
            return opened(file, mode, *args, **options)

    builtins.open = io.open = open_


def install_calls(points):
    """Put a point before and after each call to a Ray actor, whose target is one of the processes of that class."""
    import psutil
    from ray.actor import ActorHandle

    real = ActorHandle._actor_method_call

    def pid_of(name):
        children = psutil.Process().children(recursive=True)
        pids = sorted(child.pid for child in children if role_of(child.pid) == name)
        return pids[0] if pids else None

    def call(self, method_name, *args, **options):
        name = self._ray_actor_creation_function_descriptor.class_name.rpartition(".")[2]
        with points.passing("call", f"{name}.{method_name}", lambda: pid_of(name)):
            return real(self, method_name, *args, **options)

    ActorHandle._actor_method_call = call


def role_of(pid):
    """What a process of a run is: the class of a Ray actor, "driver" for any other."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    except OSError:
        return "gone"
    return re.split(r"[.:( ]", title.removeprefix("ray::"))[0] if title.startswith("ray::") else "driver"


def install_plan():
    """As the environment says (`environment`), for a process that has just begun; `main` is what a driver does."""
    plan = json.loads(os.environ[_PLAN])
    faults = [Fault(**fault) for fault in plan["faults"]]
    global _points
    _points = Points(
        Path(plan["under"]), faults, Path(plan["journal"]), lambda: role_of("self"), everything=plan["everything"]
    )
    install(_points)


def environment(under, faults, journal, *, everything=False):
    """The variable by which a process and its children have these points: `tests/start_up` reads it."""
    plan = {"under": str(under), "faults": [asdict(fault) for fault in faults], "journal": str(journal)}
    return {_PLAN: json.dumps(plan | {"everything": everything})}


def main():
    """The command `tltlab` with calls to actors as points too."""
    install_calls(_points)
    from tltlab.cli.app import main

    main()


def read_journal(journal):
    """The lines of a journal, also of one that is not there."""
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
