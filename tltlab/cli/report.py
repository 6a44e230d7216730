"""`tltlab report`."""

from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.files import check_writable
from tltlab.options import command, option
from tltlab.report.write import default_out
from tltlab.report.write import report as make
from tltlab.traces.trace import check_source, locate


@command
def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN|FILE.json", help="A RUN or trace folder, or JSON of compare, tune, verify."),
    ],
    out: Path | None = option("The page. [default: RUN/report.html, or beside FILE.json]"),
    verify: bool = option(
        "Simulate a run: where its seconds go, and each RL step from the others where summary.json has none.",
        True,
        names=("--verify/--no-verify",),
    ),
) -> None:
    """Write one self-contained HTML page on a run or a comparison: pictures, tables, and how to repeat it.

    Example: tltlab report demo
    """
    check_source(locate(run))
    path = out or default_out(run)
    check_writable(path, ".html", ".htm")
    page = make(run, out=path, verify=verify)
    parts, size = [section.title for section in page.sections], path.stat().st_size
    reasons = {part.title: part.reason for part in page.absent}
    text = f"wrote {path} ({size / 1e6:.2f} MB): {', '.join(parts)}"
    text += "".join(f"\nleft out: {title}: {reason}" for title, reason in reasons.items())
    emit({"out": str(path), "bytes": size, "parts": parts, "left_out": reasons}, text)
