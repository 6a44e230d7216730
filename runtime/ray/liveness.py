"""Processes that Ray takes for alive: stopped ones (SIGSTOP), and its own servers that have ended.

Calls to them would wait forever.
"""

import os
import select
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

LOOK_S = 1.0
"""Seconds between checks of processes that may be stopped."""
LOOK_MS = 200
"""Milliseconds after which the end of a watch is noticed; that of a server is noticed at once."""


class _Watch(ABC):
    """A context manager, within which a thread runs `watch`; it ends soon after `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._thread = threading.Thread(target=self.watch, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self._thread.join(10 * LOOK_S)

    @abstractmethod
    def watch(self) -> None: ...


class StoppedProcesses(_Watch):
    """Kills processes that have been stopped for `patience_s`, with a message; they are restarted like failed ones.

    `watched` gives processes of this machine by name; a context manager. A check costs a read of /proc/PID/stat each.
    Processes that are only traced, as by a debugger, are left alone.
    """

    def __init__(self, watched: Callable[[], Mapping[str, int]], notify: Callable[[str], None], patience_s: float):
        super().__init__()
        self._watched, self._notify, self._patience_s = watched, notify, patience_s
        self._since: dict[tuple[str, int], float] = {}

    def look(self, now: float) -> None:
        """Check once, at a time of the caller's monotonic clock, in seconds."""
        stopped = {(name, pid) for name, pid in self._watched().items() if pid and is_stopped(pid)}
        self._since = {process: self._since.get(process, now) for process in stopped}
        for (name, pid), since in self._since.items():
            if now - since >= self._patience_s:
                self._notify(f"the {name} (process {pid}) was stopped for {now - since:.0f} s, and is killed")
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def watch(self) -> None:
        while not self.over.wait(LOOK_S):
            self.look(time.monotonic())


class EndedServers(_Watch):
    """Interrupts the main thread once one of Ray's servers, `servers` by name, has ended; a context manager.

    Ray's next call that needs the server ends this process, with a dump instead of a reason. `ended` names the server,
    "" for none. Nothing is watched where the kernel has no pidfd.
    """

    def __init__(self, servers: Mapping[str, int]):
        super().__init__()
        self.ended = ""
        self._servers = servers

    def watch(self) -> None:
        ready, names = select.poll(), dict[int, str]()
        with ExitStack() as opened:
            for name, pid in self._servers.items():
                with suppress(OSError, AttributeError):
                    process = os.pidfd_open(pid)
                    opened.callback(os.close, process)
                    ready.register(process, select.POLLIN)
                    names[process] = f"{name} (process {pid})"
            ended: list[tuple[int, int]] = []
            while names and not ended and not self.over.is_set():
                ended = ready.poll(LOOK_MS)
        main = threading.main_thread().ident
        # SIGTERM cleanly ends waiting for actors (`Waiting`), where it does not end the process.
        number = next((n for n in (signal.SIGTERM, signal.SIGINT) if callable(signal.getsignal(n))), None)
        if ended and main is not None and number is not None:
            self.ended = names[ended[0][0]]
            signal.pthread_kill(main, number)


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine was stopped by a signal; False where there is none."""
    try:
        # The name in parentheses may hold anything.
        return (Path("/proc") / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False
