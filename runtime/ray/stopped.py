"""Processes of a run that somebody stopped (SIGSTOP): Ray takes them for alive, and whoever asks them would wait on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LOOK_S = 1.0
"""How often is looked, seconds."""


class StoppedProcesses:
    """Kills what has been stopped for `patience_s`, and says so: what is killed is started again as the dead are.

    `watched` gives processes of this machine by what they are called; a context manager. Looking costs a read of
    /proc/PID/stat each. Who is only traced, as by a debugger, is left alone.
    """

    def __init__(
        self, watched: Callable[[], Mapping[str, int]], tell: Callable[[str], None], patience_s: float
    ) -> None:
        self._watched, self._tell, self._patience_s = watched, tell, patience_s
        self._since: dict[tuple[str, int], float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch for stopped processes", daemon=True)

    def __enter__(self) -> StoppedProcesses:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(10 * LOOK_S)

    def look(self, now: float) -> None:
        """Look once, at a time on a clock of the caller's that only grows, in seconds."""
        stopped = {(name, pid) for name, pid in self._watched().items() if pid and is_stopped(pid)}
        self._since = {one: self._since.get(one, now) for one in stopped}
        for (name, pid), since in self._since.items():
            if now - since >= self._patience_s:
                self._tell(f"the {name} (process {pid}) was stopped for {now - since:.0f} s, and is killed")
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look(time.monotonic())


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal; False where there is none."""
    try:
        # The name in parentheses may hold anything.
        return (Path("/proc") / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False
