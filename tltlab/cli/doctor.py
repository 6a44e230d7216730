"""`tltlab doctor`: known failure signatures in a run, and whether this machine can run one."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated, Any

import typer

from tltlab.console import Json, emit, progress
from tltlab.doctor.check import Diagnosis, Finding
from tltlab.doctor.environment import Machine, check_environment, try_imports
from tltlab.doctor.evidence import RunEvidence
from tltlab.doctor.signatures import examine
from tltlab.errors import ConfigError
from tltlab.traces.schema import SUFFIX, is_trace
from tltlab.traces.trace import locate

WIDTH = 120  # letters of the longest line

_MARK = {"problem": "PROBLEM", "hint": "hint"}


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A RUN or trace folder, or a training log. [default: this machine alone]", show_default=False
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help="Cost file: what plain decoding takes, for a run without any. [default: the run's costs.json]"
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Do not try whether torch and vLLM import (10 s); with a RUN that is left out anyway."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a run, or with this machine, and name the setting to change.

    Exits with 0 whenever it could look; "ok" of --json is false where there is a problem.

    Example: tltlab doctor run
    """
    diagnosis: Diagnosis[RunEvidence] = Diagnosis()
    known: dict[str, Any] = {}
    if run is not None:
        if runs := _runs_in(run):
            others = f"; there are {', '.join(path.name for path in runs[1:9])} too" if runs[1:] else ""
            raise ConfigError(f"{run} holds runs and is none: name one, as in tltlab doctor {runs[0]}{others}")
        evidence = RunEvidence.of(run, costs)
        diagnosis = examine(evidence)
        known["engines"] = int(evidence.setting("rollout.num_workers", 0))
        known["kv_bytes"] = evidence.setting("rollout.vllm.kv_cache_memory_bytes")
    elif costs is not None:
        raise ConfigError("--costs are compared with plain decoding in a run: give the RUN to look at")
    else:
        known["vllm"] = _vllm()
        if not quick:
            progress("importing torch and vLLM to see whether they work together ...")
            known |= try_imports()
    environment = check_environment(Machine(**known))
    result = {
        "run": None if run is None else str(run),
        "simulated": diagnosis.simulated,
        "environment": [asdict(finding) for finding in environment],
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "fine": [{"name": check.name, "good": check.good} for check in diagnosis.good],
        "not_checked": [{"name": name, "why": why} for name, why in diagnosis.not_checked],
        "ok": not any(finding.severity == "problem" for finding in (*environment, *diagnosis.findings)),
    }
    good = [finding for finding in environment if finding.severity == "fine"]
    lines = _finding_lines(environment)
    if run is not None:
        lines = [
            *_run_lines(run, diagnosis),
            "environment",
            *lines,
            *_wrapped("fine", ", ".join(f.title for f in good)),
        ]
    else:
        lines += [line for finding in good for line in _wrapped("fine", f"{finding.title}: {finding.evidence}")]
    emit(result, as_json=as_json, text="\n".join(lines))


def _runs_in(folder: Path) -> list[Path]:
    """The runs and traces in a folder that is none itself, the newest first."""
    if _is_run(folder) or not folder.is_dir():
        return []
    return sorted(filter(_is_run, folder.iterdir()), key=lambda path: -path.stat().st_mtime)


def _is_run(folder: Path) -> bool:
    inside = locate(folder)
    return is_trace(inside) or inside.name.endswith(SUFFIX) or (folder / "run.json").is_file()


def _vllm() -> dict[str, str] | None:
    """For each use that the runtime makes of vLLM what goes without it in the installed version; None without vLLM."""
    from tltlab.runtime.engine.vllm import by_version, installed_vllm

    try:
        return by_version(installed_vllm())
    except PackageNotFoundError:
        return None


def _run_lines(run: Path, diagnosis: Diagnosis[RunEvidence]) -> list[str]:
    lines = [f"{run}{' (simulated: its figures are predictions)' if diagnosis.simulated else ''}", ""]
    lines += _finding_lines(diagnosis.findings) or ["No problem found.", ""]
    if diagnosis.good:
        lines += _wrapped("fine", "; ".join(check.good for check in diagnosis.good))
    names_of: dict[str, list[str]] = {}
    for name, why in diagnosis.not_checked:
        names_of.setdefault(why, []).append(name)
    lines += [line for why, names in names_of.items() for line in _wrapped("not checked", f"{', '.join(names)}: {why}")]
    return [*lines, ""]


def _finding_lines(findings: Iterable[Finding]) -> list[str]:
    lines: list[str] = []
    for finding in findings:
        if finding.severity != "fine":
            place = f"  [{finding.where}]" if finding.where else ""
            lines += _wrapped(_MARK[finding.severity], finding.title + place)
            lines += [*_wrapped("", finding.evidence), *_wrapped("  ->", finding.advice), ""]
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    width = max(60, min(shutil.get_terminal_size((WIDTH, 1)).columns, WIDTH))
    return textwrap.wrap(text, width, initial_indent=f"{label:13s}", subsequent_indent=" " * 13)
