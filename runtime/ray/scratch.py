"""Scratch folders of processes, and leftovers of runs elsewhere: the next process removes those of killed ones."""

import atexit
import os
import shutil
import signal
import tempfile
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

from tltlab.errors import InputError
from tltlab.files import ELSEWHERE, SCRATCH, SHARED, is_leftover, leftovers, lock, registered_leftovers, write_json

_scratch: dict[int, tuple[Path, ExitStack]] = {}
_numbers = count()


def scratch_folder(name: str = "") -> Path:
    """Return a private folder for sockets and the like; it is removed with this process.

    With a `name` a new subfolder of it. The first call also removes leftovers of killed processes (`sweep`).
    """
    pid = os.getpid()
    if pid not in _scratch:
        sweep()
        # Renamed only once it is locked: otherwise another process might sweep it.
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


def register(*paths: Path) -> None:
    """Register `paths` outside the scratch folder that this process's run leaves: swept once it has ended."""
    folder = scratch_folder()
    write_json(folder / ELSEWHERE, sorted(map(str, {*paths, *registered_leftovers(folder)})))


def register_memory() -> None:
    """As `register`, for the shared memory and semaphores that this process and its children have now.

    Their makers remove them at their end, or Python's resource tracker after a kill, if it was not killed too.
    """
    family = [str(os.getpid())]
    with suppress(OSError):
        for pid in family:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                family += (thread / "children").read_text().split()
    inodes = set().union(*(_mapped_memory(Path("/proc") / pid) for pid in family))
    with suppress(OSError, InputError):
        # A process without leftovers needs no folder to list them.
        if paths := [path for path in filter(is_leftover, SHARED.iterdir()) if path.lstat().st_ino in inodes]:
            register(*paths)


def _mapped_memory(process: Path) -> set[int]:
    """Return inodes of the shared memory that a process has mapped: semaphores are mapped under other names."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    fields = (line.split(maxsplit=5) for line in lines if str(SHARED) in line)
    return {int(field[4]) for field in fields if len(field) == 6 and field[5].startswith(f"{SHARED}/")}


def sweep() -> list[Path]:
    """Remove `leftovers` that no process uses; return them. Agents of a Ray session there end."""
    removed = []
    for path in leftovers():
        if path.parent.name == "ray":
            _end_agents(path)
        # A scratch folder stays as long as a leftover that it lists exists.
        is_scratch = SCRATCH.fullmatch(path.name)
        if not (any(map(is_leftover, registered_leftovers(path))) if is_scratch else _in_use(path)):
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
    """Kill the processes of a Ray session whose driver was killed: its agents retry its servers for a minute.

    Ray's process titles and logs in the session identify its processes.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            titled = (process / "cmdline").read_bytes().startswith(b"ray::")
            if titled and any(str(session) in os.readlink(file) for file in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)


def _in_use(path: Path) -> bool:
    """Return True if a process was started with this path, or maps it."""
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
    if any(is_leftover(path) for path in registered_leftovers(folder) if not path.name.startswith("sem.")):
        for path in filter(Path.is_dir, folder.iterdir()):
            _remove(path)
    else:
        _remove(folder)
    lock_file.close()
