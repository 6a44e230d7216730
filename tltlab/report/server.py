"""`tltlab ui`: the runs and traces of a folder as pages, made when they are asked for and served on loopback only.

Nothing is written and no code is taken from what is served: a run is looked up among those that were found, so a path
that a browser sends never becomes a file's.
"""

from __future__ import annotations

import hashlib
import json
import os
import socketserver
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from tltlab.console import progress
from tltlab.errors import ConfigError, TltlabError
from tltlab.files import in_progress
from tltlab.traces.recording import recording_of
from tltlab.traces.schema import SUFFIX, is_trace
from tltlab.traces.trace import locate, read, run_folder

from .origin import events_part
from .page import POLICY, Page, PageTable, Section, Served, render
from .write import RESULT, compare_runs, key_figures, report, verdict

ADDRESS = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": f"{POLICY}; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_MOST_RUNS = 500
_MOST_FOLDERS = 5_000
_DEPTH = 3
_MOST_PAGES = 24
_COLUMNS = ("RL steps", "responses", "mean rollout")


class Runs:
    """The runs and traces in a folder and at most three folders below it; links are not followed.

    A page is kept until a file of its run changes, the newest 24 of them. `patience_s` is how long a list reads runs
    that it has not read yet: the rest comes when it is asked for again.
    """

    def __init__(self, folder: Path, *, patience_s: float = 2.0):
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give one with runs or traces in it")
        self.folder = folder
        self._patience_s = patience_s
        self._pages: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._rows: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._lock = threading.Lock()

    def paths(self) -> dict[str, Path]:
        """Where each run is, by its path in the folder ("." for the folder itself), at most 500, in order."""
        runs: dict[str, Path] = {}
        stack, num_looked = [(self.folder, 0)], 0
        while stack and len(runs) < _MOST_RUNS and num_looked < _MOST_FOLDERS:
            folder, depth = stack.pop()
            num_looked += 1
            if _is_run(folder):
                runs[folder.relative_to(self.folder).as_posix()] = folder
            if depth < _DEPTH and not is_trace(folder):
                inner = [item for item in _folders(folder) if not _part_of(folder, item)]
                stack += [(item, depth + 1) for item in sorted(inner, reverse=True)]
        return runs

    def state(self, name: str | None = None) -> str:
        """What changes when the page of a run, or with None that of the list, has become old. KeyError: no such run."""
        if name is not None:
            return _stamp(self.paths()[name])
        return _digest({name: _stamp(path) for name, path in self.paths().items()})

    def list_page(self) -> str:
        """All runs, the newest first, each with its verdict."""
        runs = self.paths()
        stamps = {name: _stamp(path) for name, path in runs.items()}
        until, num_read, unread = time.monotonic() + self._patience_s, 0, 0
        with self._lock:
            for name, path in runs.items():
                if name in self._rows and self._rows[name][0] == stamps[name]:
                    continue
                if num_read and time.monotonic() > until:
                    unread += 1
                    continue
                num_read += 1
                self._rows[name] = stamps[name], _row(path)
            rows = {name: self._rows[name][1] if name in self._rows else ("...",) for name in runs}
        names = sorted(runs, key=lambda name: (-_newest(runs[name]), name))
        width, num_live = 2 + len(_COLUMNS), sum(_state(path) == _LIVE for path in runs.values())
        table = PageTable(
            caption="A run's name leads to its page; two that are ticked are compared.",
            columns=("run", "state", *_COLUMNS, "verdict"),
            rows=tuple((name, *rows[name], *[""] * (width - len(rows[name]))) for name in names),
            text_columns=frozenset({0, 1, width}),
            links=tuple(_link("run", name) for name in names),
            choose="compare" if len(names) > 1 else "",
        )
        page = Page(
            title="Runs",
            subtitle=str(self.folder),
            key_figures=(("runs", str(len(runs))), ("being recorded", str(num_live))),
            parts=(Section(title="All of them", blocks=(table,)),),
            verdict="" if runs else "Neither a run nor a trace is here: `tltlab train` and `tltlab demo` write runs.",
            served=Served(state="state", stamp=f"{_digest(stamps)}{'+' * bool(unread)}"),
        )  # fmt: skip
        return render(page)

    def run_page(self, name: str) -> str:
        """The page of a run; of one that cannot be read, why. KeyError: no such run."""
        path = self.paths()[name]
        stamp = _stamp(path)
        return self._cached(_link("run", name), stamp, lambda: _page(path), live=_state(path) == _LIVE)

    def comparison(self, first: str, second: str) -> str:
        """The page of two runs side by side. KeyError: no such run; raises TraceError for one that cannot be read."""
        runs = self.paths()
        paths = runs[first], runs[second]
        stamp = _digest([_stamp(path) for path in paths])
        address = f"{_link('compare', first)}&run={quote(second)}"
        return self._cached(address, stamp, lambda: compare_runs(*paths), live=False)

    def _cached(self, address: str, stamp: str, make: Any, *, live: bool) -> str:
        with self._lock:  # one at a time: pages take a core each
            if address not in self._pages or self._pages[address][0] != stamp:
                follows = "" if address.startswith("compare") else address.replace("run?", "state?", 1)
                served = Served(state=follows, stamp=stamp, home=".", live=live)
                self._pages[address] = stamp, render(replace(make(), served=served))
            self._pages.move_to_end(address)
            while len(self._pages) > _MOST_PAGES:
                self._pages.popitem(last=False)
            return self._pages[address][1]


_LIVE = "being recorded"


def _state(path: Path) -> str:
    inside = locate(path)
    if inside.name.endswith(SUFFIX):
        return _LIVE if in_progress(inside) else "interrupted"
    if is_trace(inside):
        return "finished"
    return "a result" if (path / RESULT).is_file() else "no trace yet"


def _is_run(folder: Path) -> bool:
    trace = folder / "trace"
    if trace.is_dir() or recording_of(trace).is_dir():
        return True
    return any((folder / name).is_file() for name in ("run.json", RESULT)) or is_trace(folder)


def _part_of(folder: Path, inner: Path) -> bool:
    """Whether a folder in a run is no run of its own."""
    return inner.name in ("trace", recording_of(Path("trace")).name, "checkpoints") and _is_run(folder)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as items:
            return [Path(i.path) for i in items if not i.name.startswith(".") and i.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(path: Path) -> list[tuple[str, str, int, int]]:
    """Folder, name, time and size of each file that a page is made of, in order."""
    trace = path / "trace"
    files = []
    for folder in (path, trace, recording_of(trace)):
        with suppress(OSError), os.scandir(folder) as items:
            for item in items:
                with suppress(OSError):  # gone since
                    if item.is_file(follow_symlinks=False):
                        stat = item.stat()
                        files.append((folder.name, item.name, stat.st_mtime_ns, stat.st_size))
    if any(name != path.name for name, *_ in files):
        # Events come many to an RL step; a page that is made anew for each takes a core from the run.
        files = [file for file in files if file[1] != "events.jsonl"]
    return sorted(files)


def _stamp(path: Path) -> str:
    return _digest([_state(path), _files(path)])


def _newest(path: Path) -> int:
    return max((time_ns for _, _, time_ns, _ in _files(path)), default=0)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _link(page: str, name: str) -> str:
    return f"{page}?run={quote(name)}"


def _row(path: Path) -> tuple[str, ...]:
    """The cells of a run in the list, without its name."""
    state = _state(path)
    try:
        if state == "a result":
            return (state, *[""] * len(_COLUMNS), report(path, verify=False).verdict)
        trace = read(path)
        figures = dict(key_figures(trace))
        return (state, *(figures.get(name, "–") for name in _COLUMNS), verdict(trace))
    except TltlabError as error:
        return (state, *["–"] * len(_COLUMNS), "" if state == "no trace yet" else str(error))


def _page(path: Path) -> Page:
    try:
        return report(path, verify=False)
    except TltlabError as error:
        parts = (events_part(run_folder(locate(path))),)
        return Page(title=path.name, subtitle=_state(path), key_figures=(), parts=parts, verdict=str(error))


class Server(ThreadingHTTPServer):
    """Serves `runs` at 127.0.0.1, port 0 for a free one; a context manager. Raises ConfigError for a port in use."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, runs: Runs, port: int = 0):
        self.runs = runs
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            advice = "give another --port, or 0 for a free one"
            raise ConfigError(f"cannot serve at port {port}: {error}; {advice}") from error

    def server_bind(self) -> None:
        # Without http.server's look-up of the host's name, which may wait for a network.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "tltlab", ""
    timeout = 30.0
    """Seconds that a connection may be silent."""

    def do_GET(self) -> None:
        server = cast(Server, self.server)
        names = {f"{name}:{server.server_port}" for name in (ADDRESS, "localhost")}
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].strip().lower() not in names:
            # A name of somebody else's that leads here: pages of that site could read the runs.
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"this is {server.url}")
            return
        try:
            status, kind, body = self._answer(server.runs)
        except KeyError as error:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {str(error)[:200]} here")
        except TltlabError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            progress(f"{self.path[:200]}: {type(error).__name__}: {error}")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        else:
            self._send(status, kind, body)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "nothing here can be changed")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _answer(self, runs: Runs) -> tuple[HTTPStatus, str, str]:
        address = urlsplit(self.path)
        try:
            query = parse_qs(address.query, strict_parsing=bool(address.query), max_num_fields=16)
        except ValueError as error:
            raise ConfigError(f"not a query: {address.query[:200]}") from error
        names = query.get("run", [])
        if address.path == "/":
            return HTTPStatus.OK, "text/html", runs.list_page()
        if address.path == "/run" and len(names) == 1:
            return HTTPStatus.OK, "text/html", runs.run_page(names[0])
        if address.path == "/compare":
            if len(names) != 2:
                raise ConfigError(f"{len(names)} runs are ticked: two are compared")
            return HTTPStatus.OK, "text/html", runs.comparison(*names)
        if address.path == "/state" and len(names) < 2:
            return HTTPStatus.OK, "application/json", json.dumps({"stamp": runs.state(*names)})
        raise KeyError(address.path)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        page = Page(title=status.phrase, subtitle="", key_figures=(), parts=(), verdict=why, served=Served(home="."))
        self._send(status, "text/html", render(page))

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: there is one every three seconds for each page that is open."""
