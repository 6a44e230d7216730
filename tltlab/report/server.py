"""`tltlab ui`: the runs and traces of a folder as pages, made when they are asked for and served on loopback only.

Nothing is written and no code is taken from what is served: a run is looked up among the found ones, so a path from a
browser never becomes a file path.
"""

import os
import socketserver
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from tltlab.console import progress
from tltlab.errors import ConfigError, TltlabError
from tltlab.files import in_progress
from tltlab.importers.sources import read
from tltlab.traces.schema import is_trace
from tltlab.traces.storage import is_unfinished
from tltlab.traces.trace import is_run, locate, run_folder

from .page import POLICY, Page, PageTable, Section, render
from .parts import diagnosis_of, events_part
from .write import compare_runs, key_figures, report, verdict

ADDRESS = "127.0.0.1"
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{POLICY}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MOST_RUNS = 500
_MOST_PAGES = 24
_MOST_FOLDERS = 5_000
_DEPTH = 3
_COLUMNS = ("RL steps", "responses", "mean rollout")
_LIVE = "being recorded"


class Runs:
    """The runs and traces in a folder and at most three folders below it; links are not followed."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give one with runs or traces in it")
        self.folder = folder

    def paths(self) -> dict[str, Path]:
        """Where each run is, by its path in the folder ("." for the folder itself), at most 500, in order."""
        runs: dict[str, Path] = {}
        for path, inner, _ in islice(os.walk(self.folder), _MOST_FOLDERS):
            folder = Path(path)
            name, found = folder.relative_to(self.folder), is_run(folder)
            if found and len(runs) < _MOST_RUNS:
                runs[name.as_posix()] = folder
            deeper = len(name.parts) < _DEPTH and not is_trace(folder)
            inner[:] = sorted(n for n in inner if deeper and n[0] != "." and not (found and n in _PARTS))
        return runs

    def list_page(self) -> Page:
        """All runs, the newest first, each with its verdict."""
        runs = self.paths()
        changed = {name: _changed(path) for name, path in runs.items()}
        states = {name: _state(path) for name, path in runs.items()}
        names = sorted(runs, key=lambda name: (-changed[name], name))
        table = PageTable(
            caption="A run's name leads to its page; two that are ticked are compared.",
            columns=("run", "state", *_COLUMNS, "verdict"),
            rows=tuple((name, *_row(runs[name], changed[name], states[name])) for name in names),
            text_columns=frozenset({0, 1, 2 + len(_COLUMNS)}),
            links=tuple(f"run?run={quote(name)}" for name in names),
            choose="compare" if len(names) > 1 else "",
        )
        num_live = sum(state == _LIVE for state in states.values())
        return Page(
            title="Runs",
            subtitle=str(self.folder),
            key_figures=(("runs", str(len(runs))), (_LIVE, str(num_live))),
            parts=(Section(title="All of them", blocks=(table,)),),
            verdict="" if runs else "Neither a run nor a trace is here: `tltlab train` and `tltlab demo` write runs.",
            live=num_live > 0,
        )

    def page(self, *names: str) -> Page:
        """The page of a run, or of two side by side; of what cannot be read, why. KeyError: no such run."""
        runs = self.paths()
        path, *others = [runs[name] for name in names]
        live = any(_state(each) == _LIVE for each in (path, *others))
        try:
            page = compare_runs(path, *others) if others else report(path, verify=False)
        except TltlabError as error:
            parts = (events_part(run_folder(locate(path))),)
            page = Page(title=path.name, subtitle=_state(path), parts=parts, verdict=str(error))
        return replace(page, home=".", live=live)

    def state(self, *names: str) -> tuple[Any, ...]:
        """Sources of a page of these runs, or of the list without any, and when each changed last. KeyError."""
        runs = self.paths()
        return tuple((name, _changed(runs[name]), _state(runs[name])) for name in names or runs)


_PARTS = ("trace", "checkpoints")
"""Folders in a run that are not runs themselves."""


def _state(path: Path) -> str:
    inside = locate(path)
    if is_unfinished(inside):
        return _LIVE if in_progress(inside) else "interrupted"
    return "finished" if is_trace(inside) else "no trace yet"


def _changed(path: Path) -> int:
    """When something that its page is made of was changed last, ns."""
    times = [0]
    for folder in (path, path / "trace"):
        # Events come many to an RL step; a page that is made anew for each takes a core from the run.
        with suppress(OSError):
            inside = [file for file in folder.iterdir() if file.name != "events.jsonl"]
            times += [file.stat().st_mtime_ns for file in (folder, *inside)]
    return max(times)


@lru_cache(maxsize=_MOST_RUNS)
def _row(path: Path, changed: int, state: str) -> tuple[str, ...]:
    """The cells of a run in the list, without its name, until it changes."""
    try:
        trace = read(path)
        figures = dict(key_figures(trace))
        return (state, *(figures.get(name, "–") for name in _COLUMNS), verdict(trace, diagnosis_of(path)))
    except TltlabError as error:
        return (state, *["–"] * len(_COLUMNS), "" if state == "no trace yet" else str(error))


class Server(ThreadingHTTPServer):
    """Serves `runs` at 127.0.0.1, port 0 for a free one; a context manager. Raises ConfigError for a port in use."""

    daemon_threads = True

    def __init__(self, runs: Runs, port: int = 0):
        self.runs = runs
        self._place = lru_cache(_MOST_PAGES)(lambda key: (threading.Lock(), list[str]()))
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            advice = "give another --port, or 0 for a free one"
            raise ConfigError(f"cannot serve at port {port}: {error}; {advice}") from error

    def server_bind(self) -> None:
        # Without http.server's look-up of the host's name, which may wait for a network.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def html(self, key: Hashable, page: Callable[[], Page]) -> str:
        """Return a page by what it is made of: each is made once, while others are made or served."""
        lock, made = self._place(key)
        with lock:
            if not made:
                made.append(render(page()))
            return made[0]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0
    """Seconds that a connection may be silent."""

    def do_GET(self) -> None:
        server = cast(Server, self.server)
        hosts = [[f"{name}:{server.server_port}"] for name in (ADDRESS, "localhost")]
        status, why, text, runs = HTTPStatus.OK, "", "", server.runs
        try:
            address = urlsplit(self.path)
            names = parse_qs(address.query).get("run", [])
            if self.headers.get_all("Host") not in hosts:
                # A name of somebody else's that leads here: pages of that site could read the runs.
                status, why = HTTPStatus.MISDIRECTED_REQUEST, f"this is {server.url}"
            elif address.path == "/":
                text = server.html(runs.state(), runs.list_page)
            elif len(names) == {"/run": 1, "/compare": 2}.get(address.path):
                text = server.html((len(names), runs.state(*names)), lambda: runs.page(*names))
            else:
                status, why = HTTPStatus.BAD_REQUEST, "one run is shown, or two are compared"
        except KeyError as error:
            status, why = HTTPStatus.NOT_FOUND, f"there is no {str(error)[:200]} here"
        except Exception as error:
            status, why = HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
            progress(f"{self.path[:200]}: {why}")
        data = (text or render(Page(title=status.phrase, verdict=why, home="."))).encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
