"""`tltlab doctor`: known failure signatures in a run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit, verdict_text
from tltlab.doctor.evidence import RunEvidence
from tltlab.doctor.signatures import Diagnosis, Finding, examine
from tltlab.errors import ConfigError
from tltlab.records import Json
from tltlab.traces.trace import is_run


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
    result: Json = {
        "run": str(run),
        "simulated": diagnosis.simulated,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "fine": [{"name": check.name, "good": check.good} for check in diagnosis.good],
        "not_checked": [{"name": name, "why": why} for name, why in diagnosis.not_checked],
        "ok": all(finding.severity != "problem" for finding in diagnosis.findings),
        "verdict": _verdict(run, diagnosis),
    }
    emit(result, verdict_text(result["verdict"], _lists(run, diagnosis)))


def _runs_in(folder: Path) -> list[Path]:
    """The runs and traces in a folder that is none itself, the newest first."""
    if is_run(folder) or not folder.is_dir():
        return []
    return sorted(filter(is_run, folder.iterdir()), key=lambda path: -path.stat().st_mtime)


def _verdict(run: Path, diagnosis: Diagnosis) -> str:
    """Return the first finding, its evidence, and what to do."""
    if not diagnosis.findings:
        num, fine = len(diagnosis.good) + len(diagnosis.not_checked), len(diagnosis.good)
        return f"No problem found in {run}.\nWhy: {fine} of {num} checks found nothing, the others lack data."
    first = diagnosis.findings[0]
    return f"{_titled(first)}\nWhy: {first.evidence}\nNext: {first.advice}"


def _titled(finding: Finding) -> str:
    place = f"  [{finding.where}]" if finding.where else ""
    return f"{finding.severity.replace('problem', 'PROBLEM')}: {finding.title}{place}"


def _lists(run: Path, diagnosis: Diagnosis) -> dict[str, list[str]]:
    """Return the other findings and what was looked at."""
    names_of: dict[str, list[str]] = {}
    for name, why in diagnosis.not_checked:
        names_of.setdefault(why, []).append(name)
    return {
        "found": [f"{_titled(finding)}: {finding.evidence} {finding.advice}" for finding in diagnosis.findings[1:]],
        "read": [f"{run}{', simulated: its figures are predictions' if diagnosis.simulated else ''}"],
        "fine": ["; ".join(check.good for check in diagnosis.good)] if diagnosis.good else [],
        "not checked": [f"{', '.join(names)}: {why}" for why, names in names_of.items()],
    }
