"""Failures of user code, beside an engine that keeps serving."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from pathlib import Path

import tltlab
from tltlab.errors import RunError


class PolicyFailed(RunError):
    """The policy raised during a rollout, which then ran partly under no policy."""


def notify(line: str) -> None:
    """Print a line on standard error, for the user of a program with an engine in it. Raises nothing."""
    # vLLM's log is often turned off, or part of the program's own output. Standard error may be closed.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"tltlab: {line}", file=sys.stderr, flush=True)


def describe_exception(error: Exception) -> str:
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
