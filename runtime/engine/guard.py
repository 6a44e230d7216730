"""The guard around all code that tltlab runs in a user's engine, and how it tells the user of errors."""

import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import tltlab

logger = logging.getLogger(__name__)

FAULTS = (Exception, SystemExit)
"""Exceptions of code in an engine that must not end it: a policy with `sys.exit` ends no server. Ctrl-C passes."""


class Guard:
    """Calls code of tltlab's or of a user's in an engine, which continues without that code after its first fault.

    The fault is logged in one line: what `begins` it, the exception and what `continues`. Then `then` puts an end to
    the guarded code, and no call is made any more; `failure` has the line's first two parts, "" before.
    """

    def __init__(self, begins: str, continues: str, then: Callable[[], object] = lambda: None):
        self.failure = ""
        self._begins, self._continues, self._then = begins, continues, then
        self._lock = Lock()

    def call(self, part: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        """Return what `part` returns; `otherwise` where it raises, and after the first fault."""
        if self.failure:
            return otherwise
        try:
            return part(*args)
        except FAULTS as error:
            self.fail(error)
            return otherwise

    def fail(self, why: BaseException | str) -> None:
        """Log a fault and end the guarded code, unless one was logged before. Raises nothing."""
        with self._lock:
            if self.failure:
                return
            self.failure = f"{self._begins} {why if isinstance(why, str) else describe_exception(why)}"
        # Logged here, not by vLLM's logger, which is often off.
        logger.error("%s; %s", self.failure, self._continues)
        with suppress(*FAULTS):
            self._then()


def notify(line: str) -> None:
    """Print a line on standard error, for the user of a program with an engine in it. Raises nothing."""
    # vLLM's log is often turned off, or part of the program's own output. Standard error may be closed.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"tltlab: {line}", file=sys.stderr, flush=True)


def describe_exception(error: BaseException) -> str:
    """Describe an exception: type, message, and the innermost file and line outside of tltlab and of libraries.

    For messages about errors that do not end the program; this function raises none itself.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(tltlab.__file__).parent)
    foreign = [at for at in frames if not at.filename.startswith(package) and "site-packages" not in at.filename]
    location = "".join(f" ({at.filename}, line {at.lineno})" for at in (foreign or frames)[-1:])
    try:
        text = str(error)
    except Exception:
        text = "it cannot be shown"
    return f"{type(error).__name__}: {text}{location}"
