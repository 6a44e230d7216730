"""Processes that Ray takes for alive: stopped ones (SIGSTOP), and its own servers that have ended.

Calls to them would wait forever.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

LOOK_S = 1.0
"""Seconds between checks."""


class StoppedProcesses:
    """Kills processes that have been stopped for `patience_s`, with a message; they are restarted like failed ones.

    `watched` gives processes of this machine by name; a context manager. A check costs a read of /proc/PID/stat each.
    Processes that are only traced, as by a debugger, are left alone.
    """

    def __init__(
        self, watched: Callable[[], Mapping[str, int]], notify: Callable[[str], None], patience_s: float
    ) -> None:
        self._watched, self._notify, self._patience_s = watched, notify, patience_s
        self._since: dict[tuple[str, int], float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch for stopped processes", daemon=True)

    def __enter__(self) -> StoppedProcesses:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(10 * LOOK_S)

    def look(self, now: float) -> None:
        """Check once, at a time of the caller's monotonic clock, in seconds."""
        stopped = {(name, pid) for name, pid in self._watched().items() if pid and is_stopped(pid)}
        self._since = {process: self._since.get(process, now) for process in stopped}
        for (name, pid), since in self._since.items():
            if now - since >= self._patience_s:
                self._notify(f"the {name} (process {pid}) was stopped for {now - since:.0f} s, and is killed")
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look(time.monotonic())


class EndedServers:
    """Interrupts the main thread once one of Ray's servers, `servers` by name, has ended; a context manager.

    Ray's next call that needs the server ends this process, with a dump instead of a reason. `ended` names the server,
    "" for none. Nothing is watched where the kernel has no pidfd.
    """

    def __init__(self, servers: Mapping[str, int]) -> None:
        self.ended = ""
        self._servers = servers
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EndedServers:
        with ExitStack() as stack:
            over, self._over = os.pipe()
            stack.callback(os.close, over)
            names = {}
            for name, pid in self._servers.items():
                with suppress(OSError, AttributeError):
                    process = os.pidfd_open(pid)
                    stack.callback(os.close, process)
                    names[process] = f"{name} (process {pid})"
            self._thread = threading.Thread(
                target=self._run, args=(over, names, stack.pop_all()), name="watch for ended servers", daemon=True
            )
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._over)
        assert self._thread is not None
        self._thread.join(10 * LOOK_S)

    def _run(self, over: int, names: Mapping[int, str], opened: ExitStack) -> None:
        with opened:
            ready = select.poll()
            for place in (over, *names):
                ready.register(place, select.POLLIN)
            ended = [names[place] for place, _ in ready.poll() if place in names]
        main = threading.main_thread().ident
        # SIGTERM cleanly ends waiting for actors (`Waiting`), where it does not end the process.
        number = next((n for n in (signal.SIGTERM, signal.SIGINT) if callable(signal.getsignal(n))), None)
        if ended and main is not None and number is not None:
            self.ended = ended[0]
            signal.pthread_kill(main, number)


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine was stopped by a signal; False where there is none."""
    try:
        # The name in parentheses may hold anything.
        return (Path("/proc") / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False
