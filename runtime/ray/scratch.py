"""Scratch folders of processes, and what runs leave elsewhere: removed by the next process where one was killed."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

from tltlab.errors import InputError
from tltlab.files import ELSEWHERE, SCRATCH, SHARED, elsewhere, is_leftover, leftovers, lock, write_json

_scratch: dict[int, tuple[Path, ExitStack]] = {}
_numbers = count()


def scratch_folder(name: str = "") -> Path:
    """A folder for sockets and the like that only this user enters; it goes with this process.

    With a `name` a new one in it, else the one that all of this process share. What processes left that were killed
    goes when the next one asks (`sweep`).
    """
    pid = os.getpid()
    if pid not in _scratch:
        sweep()
        # Under its name only when it is held: else another process might sweep it.
        new = Path(tempfile.mkdtemp(prefix=f".tltlab-{pid}-"))
        lock_file = lock(new)
        _scratch[pid] = new.rename(new.with_name(new.name[1:])), lock_file
        atexit.register(_end_scratch, pid)
    folder, _ = _scratch[pid]
    if not name:
        return folder
    subfolder = folder / f"{name}{next(_numbers)}"
    subfolder.mkdir(mode=0o700)
    return subfolder


def leaves(*paths: Path) -> None:
    """This process's run leaves something at `paths` that is not in its scratch folder: swept once it has ended."""
    folder = scratch_folder()
    write_json(folder / ELSEWHERE, sorted(map(str, {*paths, *elsewhere(folder)})))


def leaves_memory() -> None:
    """As `leaves`, for the shared memory and semaphores that this process and those it started have now.

    Whoever made them removes them at its end, and Python's resource tracker where that was killed, if it was not.
    """
    family = [str(os.getpid())]
    with suppress(OSError):
        for pid in family:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                family += (thread / "children").read_text().split()
    inodes = set().union(*(_mapped_memory(Path("/proc") / pid) for pid in family))
    with suppress(OSError, InputError):
        # Who has nothing there needs no folder that tells of it.
        if paths := [path for path in filter(is_leftover, SHARED.iterdir()) if path.lstat().st_ino in inodes]:
            leaves(*paths)


def _mapped_memory(process: Path) -> set[int]:
    """Inodes of the shared memory that a process has mapped: semaphores are mapped under another name than theirs."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    fields = (line.split(maxsplit=5) for line in lines if str(SHARED) in line)
    return {int(field[4]) for field in fields if len(field) == 6 and field[5].startswith(f"{SHARED}/")}


def sweep() -> list[Path]:
    """Remove `leftovers`, but what a process still uses; what was removed. Agents of a Ray session there end."""
    removed = []
    for path in leftovers():
        if path.parent.name == "ray":
            _end_agents(path)
        # A scratch folder is not forgotten as long as something is left that it knows of.
        knows = SCRATCH.fullmatch(path.name)
        if not (any(map(is_leftover, elsewhere(path))) if knows else _in_use(path)):
            _remove(path)
            removed.append(path)
    return removed


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _end_agents(session: Path) -> None:
    """Kill the processes of a Ray session whose driver was killed: its agents call on its servers for a minute more.

    They go by titles of Ray's, and log into the session.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            titled = (process / "cmdline").read_bytes().startswith(b"ray::")
            if titled and any(str(session) in os.readlink(file) for file in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)


def _in_use(path: Path) -> bool:
    """Whether a process was started with this path, or maps it."""
    with suppress(OSError):
        inode = path.lstat().st_ino if path.parent == SHARED else None
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.fsencode(path) in (process / "cmdline").read_bytes() or inode in _mapped_memory(process):
                    return True
    return False


def _end_scratch(pid: int) -> None:
    if pid != os.getpid() or pid not in _scratch:
        return
    folder, lock_file = _scratch.pop(pid)
    # Python removes its semaphores at its end, which may come after this.
    if any(is_leftover(path) for path in elsewhere(folder) if not path.name.startswith("sem.")):
        for path in filter(Path.is_dir, folder.iterdir()):
            _remove(path)
    else:
        _remove(folder)
    lock_file.close()
