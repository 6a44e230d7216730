"""Loads pages in Qt WebEngine, which is Chromium, without a screen: JSON from stdin, its answer to stdout.

    {"loads": [{"url": ..., "width": 390, "scripts": [...], "pdf": path | null}]}

gives for each load {"console": [what was written there], "answers": [what each script came to, as JSON]}. A script is
an expression; the page is as the scripts before left it. The argument `dark` is for those who like it dark.
"""

import json
import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
DARK = sys.argv[1:] == ["dark"]
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu" + " --blink-settings=preferredColorScheme=0" * DARK

from PySide6.QtCore import QEventLoop, Qt, QTimer, QUrl  # noqa: E402
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineSettings  # noqa: E402
from PySide6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PySide6.QtWidgets import QApplication  # noqa: E402

_PATIENCE_MS = 30_000


class Page(QWebEnginePage):
    console: list[str]

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.console.append(f"{message} ({source}:{line})")


def until(signal_or_call):
    """What a signal, or a function that takes a callback, comes to."""
    loop, came = QEventLoop(), []

    def arrived(*values):
        came.append(values[0] if values else None)
        loop.quit()

    (signal_or_call.connect if hasattr(signal_or_call, "connect") else signal_or_call)(arrived)
    QTimer.singleShot(_PATIENCE_MS, loop, loop.quit)
    if not came:
        loop.exec()
    if not came:
        raise TimeoutError(f"nothing for {_PATIENCE_MS} ms")
    return came[0]


def load(job):
    view = QWebEngineView()
    page = Page(view)
    page.console = []
    view.setPage(page)
    view.setAttribute(Qt.WidgetAttribute.WA_DontShowOnScreen, True)
    view.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
    view.resize(job["width"], 800)
    view.show()
    view.load(QUrl(job["url"]))
    assert until(page.loadFinished), job["url"]
    asked = (f"JSON.stringify(({script}) ?? null)" for script in job["scripts"])
    answers = [json.loads(until(lambda told, text=text: page.runJavaScript(text, told)) or "null") for text in asked]
    if job["pdf"]:
        page.printToPdf(job["pdf"])
        until(page.pdfPrintingFinished)
    if job.get("png"):  # to look at
        until(lambda shown: QTimer.singleShot(500, shown))
        view.grab().save(job["png"])
    view.close()
    return {"console": page.console, "answers": answers}


def main():
    app = QApplication(sys.argv[:1])  # alive until the end
    assert app
    jobs = json.load(sys.stdin)["loads"]
    json.dump([load(job) for job in jobs], sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # Qt's own end may crash after the work is done


if __name__ == "__main__":
    main()
