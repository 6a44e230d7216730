"""Ray workers forked from a process with its imports done: otherwise torch and vLLM take each of them 8 s.

`Prefork` starts the process that imports. Ray starts each worker by `command`, which is this file run as a script: it
asks that process for a fork, which becomes the worker, and stands in for it, so that Ray may signal or kill either. The
fork has the script's arguments, environment, folder and standard streams.

Side effects of imports happen once, under the environment of the importing process. CUDA does not survive a fork, and
some modules touch it when imported, so this is for machines without GPUs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

_MOST_BYTES = 1 << 20
"""Bytes of a worker's command line and environment."""
_STREAMS = (0, 1, 2)
MODULES = (
    "tltlab.runtime.trainer.trainer",
    "tltlab.runtime.drafter.training",
    "tltlab.runtime.engine.engine",
    "tltlab.runtime.engine.vllm.scheduler",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that are slowest to import in actors; none of them needs Ray."""


class Prefork:
    """A process that imports `modules` under the environment `env` and forks on request; a context manager.

    It ends, and its folder is removed, when this process ends or leaves the context; its forks stay. Modules that fail
    to import are left to the forks. A fork costs some 20 ms and the memory that it writes to.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]):
        self._folder = tempfile.mkdtemp(prefix="tltlab-fork-")
        address = str(Path(self._folder) / "socket")
        self.command = f"{sys.executable} -I -S {Path(__file__).resolve()} {address}"
        """Replaces `python` in a worker's command line."""
        # By this pipe the process notices the end of this one.
        lifeline, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._folder, str(server.fileno()), str(lifeline), *modules],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                pass_fds=(server.fileno(), lifeline),
                start_new_session=True,
            )
        os.close(lifeline)

    def __enter__(self) -> Prefork:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._lifeline)
        # It may still be importing.
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


RUNNING: list[Prefork] = []
"""The process that the forks of these tests come from."""


def _serve(folder: str, listening: int, lifeline: int, modules: Sequence[str]) -> NoReturn:
    """Import, then fork for each connection, until the other end of the pipe `lifeline` is closed."""
    # A Ray that was imported before the fork cannot connect after it, so vLLM must not find it.
    sys.modules["ray"] = None  # type: ignore[assignment]
    gc.disable()
    # Not at the top: workers start this file as a script, without packages.
    import_module("tltlab.runtime.engine.vllm").quieten()
    for module in modules:
        with contextlib.suppress(ImportError):
            import_module(module)
    del sys.modules["ray"]
    # Freeze objects: forks neither scan them nor write to their pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    server = socket.socket(fileno=listening)
    ended, wake = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        for place in (server.fileno(), ended, lifeline):
            ready.register(place, selectors.EVENT_READ)
        while True:
            places = {key.fd for key, _ in ready.select()}
            if lifeline in places:
                shutil.rmtree(folder, ignore_errors=True)
                # Without the interpreter's shutdown, in which some libraries report leaks.
                os._exit(0)
            if ended in places:
                os.read(ended, 4096)
                _reap(forks)
            if server.fileno() in places:
                client, _ = server.accept()
                if (fork := os.fork()) == 0:
                    ready.close()
                    for place in (server.detach(), ended, wake, lifeline, *(peer.detach() for peer in forks.values())):
                        os.close(place)
                    _become_worker(client)
                forks[fork] = client


def _reap(forks: dict[int, socket.socket]) -> None:
    for fork in list(forks):
        done, status = os.waitpid(fork, os.WNOHANG)
        if done:
            with forks.pop(fork) as client, contextlib.suppress(OSError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become_worker(client: socket.socket) -> NoReturn:
    """Become the worker that `client` stands for, and end with it, in a fork."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        message, streams, _, _ = socket.recv_fds(client, _MOST_BYTES, len(_STREAMS))
        for stream, number in zip(streams, _STREAMS, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        while not message.endswith(b"\n"):
            message += client.recv(_MOST_BYTES)
        request = json.loads(message)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        script, *arguments = request["argv"]
        sys.argv = [script, *arguments]
        folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [str(Path(script).parent), *(path for path in folders if path not in sys.path)]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        threading.Thread(target=_end_with, args=(client,), daemon=True).start()
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(client: socket.socket) -> None:
    """Pass on the signals that `client` receives; a closed connection means it was killed."""
    while number := client.recv(1):
        os.kill(os.getpid(), number[0])
    os.kill(os.getpid(), signal.SIGKILL)


def _ask(address: str, argv: Sequence[str]) -> NoReturn:
    """Have a worker forked, stand in for it, and end as it does; without a server, be the worker."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
        except OSError:
            os.execv(sys.executable, [sys.executable, *argv])
        signal.signal(signal.SIGTERM, lambda number, _: server.sendall(bytes([number])))
        request = {"argv": argv, "env": dict(os.environ), "folder": os.getcwd()}
        message = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(server, [message], _STREAMS)
        if unsent := message[sent:]:  # `sendall` fails even on nothing where a short worker has ended already
            server.sendall(unsent)
        code = int(server.recv(16) or b"1")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if sys.flags.isolated:
        _ask(sys.argv[1], sys.argv[2:])
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
