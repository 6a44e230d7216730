"""A run's actors: the environment that they start in, and calls with readable errors."""

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from tltlab.console import sigterm_handler
from tltlab.errors import RunError, TltlabError, disk_full, one_line
from tltlab.runtime.engine.generation import EngineDied

from .scratch import scratch_folder
from .start import ENV, LOOPBACK, worker_commands

LAST_BYTES = 16384
"""Bytes at the end of a log in which its last lines are searched."""
Done = TypeVar("Done")
_OF_RAY = re.compile(r"\[[\d\- :,]+ [EWIC] |@ |\*\*\* |:(job_id|actor_name|task_name):")
"""Marks and stack frames that Ray writes into a worker's log."""
# Otherwise vLLM and process groups take the machine's outward address for their own sockets.
_ON_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def actor_env(extra: Mapping[str, str], host: str = LOOPBACK[0]) -> dict[str, str]:
    """Return the environment variables of an actor; `extra` overrides. `host` is `cluster.host`; loopback stays local.

    Modules that this process finds outside its installation import in the actor too, such as a user's policy.
    """
    user_paths = [path or os.getcwd() for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    env = ENV | {"PYTHONPATH": os.pathsep.join(user_paths)}
    if host in LOOPBACK:
        env |= _ON_LOOPBACK
        # vLLM's sockets go into the scratch folder, which is removed after a kill; addresses have at most 107
        # characters.
        if len(str(folder := scratch_folder())) + len("/12345678-1234-1234-1234-123456789012") < 108:
            env["VLLM_RPC_BASE_PATH"] = str(folder)
    return env | dict(extra)


def runtime_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's `runtime_env` for an actor with these environment variables."""
    return {"env_vars": dict(env)} | ({"py_executable": worker_commands[0]} if worker_commands else {})


def get(refs: Any, *, died: type[RunError] = RunError) -> Any:
    """`ray.get`; a TltlabError raised in an actor is raised here as itself, another one as a RunError that names it.

    Where an actor failed, or one whose result was an argument of the call, `died` is raised.
    """
    try:
        return ray.get(refs)
    except RayTaskError as error:
        raise error_of(error, died=died) from None
    except RayActorError as error:
        raise error_of(error, died=died) from error


class Waiting:
    """Runs coroutines that wait for actors, in any thread, each in its own event loop: `asyncio.run`.

    SIGTERM ends waiting in the main thread, `close` in any. An exception of a SIGTERM handler is raised after the loop
    has ended: raised in the loop's own code it could lose a task's wake-up, and the loop's end would wait for that task
    forever.
    """

    def __init__(self) -> None:
        self._loops: set[_Loop[Any]] = set()

    def run(self, work: Coroutine[Any, Any, Done]) -> Done:
        """Return the coroutine's result, also where a loop already runs in this thread, as in a notebook.

        RunError where `close` ended it.
        """
        loop = _Loop(work)
        self._loops.add(loop)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return loop.run()
        else:
            with ThreadPoolExecutor(1) as aside:
                try:
                    return aside.submit(loop.run).result()
                except BaseException:
                    loop.end()
                    raise
        finally:
            self._loops.discard(loop)

    def close(self) -> None:
        """End all current waiting."""
        for loop in tuple(self._loops):
            loop.end()


class _Loop(Generic[Done]):
    """One coroutine in its event loop, which ends early once `end` is called, from any thread."""

    def __init__(self, work: Coroutine[Any, Any, Done]):
        self._work = work
        self._results: list[Done] = []
        self._raised: list[BaseException] = []
        self._task: asyncio.Task[Any] | None = None
        self._ended = False

    def run(self) -> Done:
        before: Any = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()

        def deferred(number: int, frame: FrameType | None) -> None:
            try:
                before(number, frame)
            except BaseException as error:
                self._raised.append(error)
                self.end()

        with sigterm_handler(deferred if main and callable(before) else None), suppress(asyncio.CancelledError):
            asyncio.run(self._collect())
        if self._raised:
            raise self._raised[0]
        if self._ended:
            raise RunError("waiting for the actors ended: the run was closed")
        return self._results[0]

    def end(self) -> None:
        self._ended = True
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is over
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _collect(self) -> None:
        self._task = asyncio.current_task()
        if self._ended:
            self._work.close()
            return
        # Not returned: `asyncio.run` formats its task with the result when it restores SIGINT.
        self._results.append(await self._work)


def last_lines(pid: int) -> str:
    """Return the last lines that an actor's process wrote to standard error, joined; "" if its log is elsewhere.

    Its log is one of the Ray session that this process is part of.
    """
    node = ray._private.worker._global_node
    if node is None:
        return ""
    for path in Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err"):
        with path.open("rb") as log_file:
            # Ray's own reports of a crash are long, and earlier lines matter.
            log_file.seek(max(0, path.stat().st_size - LAST_BYTES))
            text = log_file.read().decode(errors="replace")
        lines = [one_line(line) for line in text.splitlines() if line.strip()]
        return " | ".join(line[:200] for line in [line for line in lines if not _OF_RAY.match(line)][-3:])
    return ""


def succeeded(call: Any) -> bool:
    """Return True if a call has succeeded."""
    done, _ = ray.wait([call], timeout=0)
    try:
        return bool(done) and ray.get(call) is not None
    except RayError:
        return False


def death_cause(error: RayError, handle: Any) -> str:
    """Return the cause of a worker's death, in a line; empty where it lives."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return str(cause) if isinstance(cause, EngineDied) else ""
    if isinstance(error, RayActorError):
        # A call can also fail because an actor is gone whose result was its argument.
        return last_line(error) if error.actor_id in (None, handle._actor_id.hex()) else ""
    return last_line(error) if isinstance(error, NodeDiedError | OutOfMemoryError | WorkerCrashedError) else ""


def last_line(error: BaseException) -> str:
    """Return an error in one line; for Ray's on a failed actor the reason, which comes last, without its guesses."""
    lines = [one_line(line) for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).partition(" Some common causes")[0][:300]


def error_of(error: Exception, *, died: type[RunError] = RunError) -> TltlabError:
    """Return the exception to raise for an error of Ray's."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TltlabError):
        return cause
    if isinstance(cause, RayActorError):
        return died(f"an actor failed: {last_line(cause)}")
    return RunError(disk_full(cause) or f"an actor failed: {type(cause).__name__}: {one_line(cause)[:300]}")
