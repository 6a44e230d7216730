"""Waiting for Ray's actors: errors of ours arrive as themselves, and a dead actor is one sentence."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from tltlab.errors import RunError, TltlabError


def get(refs: Any, *, died: type[RunError] = RunError) -> Any:
    """`ray.get`; a TltlabError raised in an actor is raised here as itself, another one as a RunError that names it.

    Where an actor died, or one whose result the call was given, `died` is raised.
    """
    try:
        return ray.get(refs)
    except RayTaskError as error:
        raise error_of(error, died=died) from None
    except RayActorError as error:
        raise error_of(error, died=died) from error


def error_of(error: Exception, *, died: type[RunError] = RunError) -> TltlabError:
    """What to raise for an error of Ray's."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TltlabError):
        return cause
    if isinstance(cause, RayActorError):
        return died(f"an actor died: {_first_line(cause)}")
    return RunError(f"an actor failed: {type(cause).__name__}: {_first_line(cause)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
