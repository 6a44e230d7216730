"""Failures of code that is not ours, beside an engine that goes on serving."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from pathlib import Path

import tltlab
from tltlab.errors import RunError


class PolicyFailed(RunError):
    """The policy raised in mid-rollout, and is asked no more: a rollout of another policy would be taken for its."""


def say(line: str) -> None:
    """Print a line for the user of somebody's program on standard error. Raises nothing."""
    # vLLM's log is often turned off, or goes to the standard output of somebody's pipeline. Nobody may listen here.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"tltlab: {line}", file=sys.stderr, flush=True)


def what_was_raised(error: Exception) -> str:
    """Its name, what it says, and the innermost file and line that is not ours and in no library, if there is one.

    For messages about errors that end nothing; it raises none itself, whatever the error is like.
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
