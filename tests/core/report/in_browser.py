"""Chromium without a screen over its DevTools pipe: load pages, run scripts in them and print them."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
)  # fmt: skip


class Browser:
    """A running Chromium; commands and events are JSON that ends in a zero byte."""

    def __init__(self, to, back):
        self._to, self._back = to, os.fdopen(back, "rb")
        self._number, self._rest, self.events = 0, b"", []

    def ask(self, method, session=None, **parameters):
        """Send a command and return its result; events that arrive before are kept. RuntimeError where it fails."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def wait(self, event):
        """Wait until an event of this name has arrived."""
        while not any(message.get("method") == event for message in self.events):
            self.events.append(self._next())

    def _next(self):
        while b"\0" not in self._rest:
            if not (more := self._back.read1(1 << 20)):
                raise RuntimeError("Chromium has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


@contextmanager
def browser():
    """Start a Chromium with its own profile, and end it."""
    assert CHROMIUM is not None
    (read_to, to), (back, write_back) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True) as profile:
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = ["bash", "-c", f'exec 3<&{read_to} 4>&{write_back}; exec "$@"', "bash", CHROMIUM, *_FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"], pass_fds=(read_to, write_back),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_to), os.close(write_back)
        try:
            yield Browser(to, back)
        finally:
            process.kill()
            process.wait()
            os.close(to)


def load(chromium, job, dark):
    """Load a page and return what its scripts evaluate to; nothing may be written to the page's console."""
    target = chromium.ask("Target.createTarget", url="about:blank")["targetId"]
    session = chromium.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    chromium.events.clear()
    for domain in ("Page", "Runtime", "Log"):
        chromium.ask(f"{domain}.enable", session)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    chromium.ask("Emulation.setEmulatedMedia", session, features=[scheme])
    chromium.ask(
        "Emulation.setDeviceMetricsOverride", session, width=job["width"], height=800, deviceScaleFactor=1, mobile=False
    )
    chromium.ask("Page.navigate", session, url=job["url"])
    chromium.wait("Page.loadEventFired")
    answers = []
    for script in job["scripts"]:
        found = chromium.ask(
            "Runtime.evaluate", session, expression=f"(({script}) ?? null)", returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        answers.append(found["result"].get("value"))
    if job.get("pdf"):
        paper = chromium.ask("Page.printToPDF", session, paperWidth=8.27, paperHeight=11.69, printBackground=True)
        Path(job["pdf"]).write_bytes(base64.b64decode(paper["data"]))
    written = [
        event["params"]
        for event in chromium.events
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert written == [], job["url"]
    chromium.ask("Target.closeTarget", targetId=target)
    return answers


def in_browser(loads, dark=False):
    """Load pages, each {"url", "width", "scripts", optionally "pdf" to write}; the answers of each."""
    with browser() as chromium:
        return [load(chromium, job, dark) for job in loads]


def pages_of(pdf):
    """Yield what draws each page of a PDF."""
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        with suppress(zlib.error):
            if b" Tf" in (page := zlib.decompress(stream)):
                yield page


def drawn(page):
    """The height above the foot of a page, and the type's size, of each text on it; pictures have size 0. Points."""
    saved, (scale, shift), size, found = [], (1.0, 0.0), 0.0, []
    operators = rb"(?m)^(q)$|^(Q)$|^(?:\S+ ){3}(\S+) \S+ (\S+) cm$|^/F\d+ (\S+) Tf$|^(?:\S+ ){5}(\S+) Tm$|( Do)$"
    for save, restore, by, to, new_size, text, picture in re.findall(operators, page):
        if save:
            saved.append((scale, shift))
        elif restore:
            scale, shift = saved.pop()
        elif by:
            scale, shift = scale * float(by), shift + scale * float(to)
        elif new_size:
            size = float(new_size)
        elif text or picture:
            found.append((shift + scale * float(text or 0), size * abs(scale) if text else 0.0))
    return found
