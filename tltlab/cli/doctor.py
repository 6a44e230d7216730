"""`tltlab doctor`: known failure signatures in a run."""

import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.doctor.evidence import RunEvidence
from tltlab.doctor.signatures import Diagnosis, examine
from tltlab.errors import ConfigError
from tltlab.traces.schema import is_trace
from tltlab.traces.trace import locate

WIDTH = 120  # letters of the longest line


def doctor(
    run: Annotated[
        Path | None, typer.Argument(help="A RUN or trace folder, or a training log.", show_default=False)
    ] = None,
) -> None:
    """Find what is wrong with a run, and name the setting to change.

    Exits with 0 whenever it could look; "ok" of --json is false where there is a problem.

    Example: tltlab doctor run
    """
    if run is None:
        raise ConfigError("doctor looks at a run: name one, as in tltlab doctor runs/first")
    if runs := _runs_in(run):
        others = f"; there are {', '.join(path.name for path in runs[1:9])} too" if runs[1:] else ""
        raise ConfigError(f"{run} holds runs and is none: name one, as in tltlab doctor {runs[0]}{others}")
    diagnosis = examine(RunEvidence.of(run))
    result = {
        "run": str(run),
        "simulated": diagnosis.simulated,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "fine": [{"name": check.name, "good": check.good} for check in diagnosis.good],
        "not_checked": [{"name": name, "why": why} for name, why in diagnosis.not_checked],
        "ok": not diagnosis.headline,
    }
    emit(result, "\n".join(_lines(run, diagnosis)))


def _runs_in(folder: Path) -> list[Path]:
    """The runs and traces in a folder that is none itself, the newest first."""
    if _is_run(folder) or not folder.is_dir():
        return []
    return sorted(filter(_is_run, folder.iterdir()), key=lambda path: -path.stat().st_mtime)


def _is_run(folder: Path) -> bool:
    return is_trace(locate(folder)) or (folder / "run.json").is_file()


def _lines(run: Path, diagnosis: Diagnosis) -> list[str]:
    lines = [f"{run}{' (simulated: its figures are predictions)' if diagnosis.simulated else ''}", ""]
    for finding in diagnosis.findings:
        place = f"  [{finding.where}]" if finding.where else ""
        lines += _wrapped("PROBLEM" if finding.severity == "problem" else "hint", finding.title + place)
        lines += [*_wrapped("", finding.evidence), *_wrapped("  ->", finding.advice), ""]
    if not diagnosis.findings:
        lines += ["No problem found.", ""]
    if diagnosis.good:
        lines += _wrapped("fine", "; ".join(check.good for check in diagnosis.good))
    names_of: dict[str, list[str]] = {}
    for name, why in diagnosis.not_checked:
        names_of.setdefault(why, []).append(name)
    for why, names in names_of.items():
        lines += _wrapped("not checked", f"{', '.join(names)}: {why}")
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    width = max(60, min(shutil.get_terminal_size((WIDTH, 1)).columns, WIDTH))
    return textwrap.wrap(text, width, initial_indent=f"{label:13s}", subsequent_indent=" " * 13)
