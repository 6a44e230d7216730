"""`tltlab ui`: runs in a browser."""

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.options import command, option
from tltlab.report.server import Runs, Server


@command
def ui(
    folder: Annotated[
        Path, typer.Argument(help="A folder with runs or traces in it, three levels deep at most.")
    ] = Path("."),
    port: int = option("Of 127.0.0.1; 0 for a free one.", 8730, min=0, max=65535),
    browser: bool = option("Open the page where there is a display.", True, names=("--browser/--no-browser",)),
) -> None:
    """Show the runs of a folder in a browser: a list, each one's page, two side by side; a live run is followed.

    Served on loopback until Ctrl-C; nothing is written, and nothing is asked of the network.

    Example: tltlab ui runs
    """
    runs = Runs(folder)
    with Server(runs, port) as server:
        num_runs = len(runs.paths())
        result = {"url": server.url, "folder": str(folder), "runs": num_runs}
        emit(result, f"{num_runs} runs and traces of {folder} at {server.url} (Ctrl-C ends it)")
        sys.stdout.flush()
        if browser and (sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            threading.Thread(target=webbrowser.open, args=[server.url], daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
