"""Ctrl-C in a run: the first ends it after the RL step under way, with a checkpoint; a second one at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from tltlab.console import sigterm_handler

STOP_S = 60.0
"""Most seconds that the RL step under way may take after Ctrl-C; then the run ends at once."""


class Stop:
    """Context manager in which the first Ctrl-C sets `requested` and calls `on_request` in another thread.

    A second Ctrl-C interrupts the main thread as SIGTERM does. So do `STOP_S` seconds, and the first Ctrl-C where the
    RL step, by `due`, takes longer. Outside of the main thread, and where Ctrl-C is ignored, nothing changes.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self._on_request = on_request
        self._due_s = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Stop:
        before: Any = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGINT, self._interrupted)
            self._stack.callback(signal.signal, signal.SIGINT, before)
            if not callable(signal.getsignal(signal.SIGTERM)):
                self._stack.enter_context(sigterm_handler(signal.default_int_handler))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def due(self, seconds: float) -> None:
        """Note that an RL step begins, which is likely to take so many seconds."""
        self._due_s = time.monotonic() + seconds

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self._due_s - time.monotonic() > STOP_S:
            # SIGTERM cleanly ends `Waiting`, in which the main thread waits for actors.
            signal.raise_signal(signal.SIGTERM)
            return
        self.requested = True
        main = threading.get_ident()
        late = threading.Timer(STOP_S, signal.pthread_kill, (main, signal.SIGINT))
        late.daemon = True
        self._stack.callback(late.cancel)
        late.start()
        # In a thread: the main thread may be in the middle of its own line.
        threading.Thread(target=self._on_request, daemon=True).start()
