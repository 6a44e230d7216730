"""A run's actors: the environment that they start in, and calls whose errors are sentences."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from tltlab.errors import RunError, TltlabError
from tltlab.files import scratch_folder
from tltlab.runtime.engine.generation import EngineDied

from .start import ENV, LOOPBACK, fork_command

LAST_BYTES = 16384
"""Of a log, for its last lines."""
_OF_RAY = re.compile(r"\[[\d\- :,]+ [EWIC] |@ |\*\*\* |:(job_id|actor_name|task_name):")
"""Marks and stack frames that Ray writes into a worker's log."""
# Else vLLM and process groups take the machine's outward address for their own sockets.
_ON_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def actor_env(extra: Mapping[str, str], host: str = LOOPBACK[0]) -> dict[str, str]:
    """The environment variables of an actor, `extra` winning. `host` is `cluster.host`: on loopback, all stay on it.

    Modules that this process finds outside its installation import in the actor too, such as a user's policy.
    """
    env = ENV | {"PYTHONPATH": os.pathsep.join(_user_paths())}
    if host in LOOPBACK:
        env |= _ON_LOOPBACK
        # vLLM's sockets are where a killed engine's go with the run; their addresses have at most 107 letters.
        if len(str(folder := scratch_folder())) + len("/12345678-1234-1234-1234-123456789012") < 108:
            env["VLLM_RPC_BASE_PATH"] = str(folder)
    return env | dict(extra)


def runtime_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Ray's `runtime_env` for an actor with these environment variables."""
    command = fork_command()
    return {"env_vars": dict(env)} | ({} if command is None else {"py_executable": command})


def _user_paths() -> list[str]:
    installed = (sys.prefix, sys.base_prefix)
    return [path or os.getcwd() for path in sys.path if not path.startswith(installed)]


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


def last_lines(pid: int, logs: Path | None = None, most: int = 3) -> str:
    """The last lines that an actor's process wrote to standard error, joined; "" where its log is not on this machine.

    `logs` are by default those of the Ray session that this process is part of.
    """
    if logs is None:
        node = ray._private.worker._global_node
        if node is None:
            return ""
        logs = Path(node.get_logs_dir_path())
    for log in logs.glob(f"worker-*-{pid}.err"):
        with log.open("rb") as lines:
            # Ray's own reports of a crash are long, and what was said before them counts.
            lines.seek(max(0, log.stat().st_size - LAST_BYTES))
            text = lines.read().decode(errors="replace")
        said = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return " | ".join(line[:200] for line in [line for line in said if not _OF_RAY.match(line)][-most:])
    return ""


def finished(answers: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """`asyncio.run`, also where a loop runs already, as it does under a notebook's cells."""
    results: list[Any] = []

    async def collect() -> None:
        # Not returned: `asyncio.run` spells out its task, all that it returned included, when it gives back SIGINT.
        results.extend(await answers)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(collect())
        return results
    with ThreadPoolExecutor(1) as aside:
        aside.submit(asyncio.run, collect()).result()
    return results


def came(call: Any) -> bool:
    """Whether a call has ended well."""
    done, _ = ray.wait([call], timeout=0)
    try:
        return bool(done) and ray.get(call) is not None
    except RayError:
        return False


def why_lost(error: RayError, handle: Any) -> str:
    """Why the worker is gone, in a line; empty where it is not."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return str(cause) if isinstance(cause, EngineDied) else ""
    if isinstance(error, RayActorError):
        # A call can also fail because an actor is gone whose result it was given.
        return last_line(error) if error.actor_id in (None, handle._actor_id.hex()) else ""
    return last_line(error) if isinstance(error, NodeDiedError | OutOfMemoryError | WorkerCrashedError) else ""


def last_line(error: BaseException) -> str:
    """An error in one line; of what Ray says of a dead actor the reason, which comes last, without its guesses."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).partition(" Some common causes")[0][:300]


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
