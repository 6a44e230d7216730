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
from tltlab.doctor.environment import check_environment
from tltlab.doctor.evidence import RunEvidence
from tltlab.doctor.finding import Finding
from tltlab.doctor.machine import Machine
from tltlab.doctor.signatures import Diagnosis, examine
from tltlab.errors import ConfigError

WIDTH = 120
"""Letters of the longest line."""

_MARK = {"problem": "PROBLEM", "hint": "hint", "fine": "fine"}


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
    """Find what is wrong with a run, or with this machine, and say which setting to change.

    Exits with 0 whenever it could look; "ok" of --json is false where there is a problem.

    Example: tltlab doctor run
    """
    if run is None and costs is not None:
        raise ConfigError("--costs tell what plain decoding takes in a run: give the RUN to look at")
    diagnosis, needs = None, {}
    if run is not None:
        evidence = RunEvidence.of(run, costs)
        diagnosis = examine(evidence)
        needs = {
            "engines": int(evidence.setting("rollout.num_workers", 0)),
            "kv_bytes": evidence.setting("rollout.vllm.kv_cache_memory_bytes"),
        }
    imports = run is None and not quick
    if imports:
        progress("importing torch and vLLM to see whether they work together ...")
    environment = check_environment(Machine.here(imports=imports, vllm=None if run else _vllm(), **needs))
    findings = diagnosis.findings if diagnosis else ()
    result: dict[str, Any] = {
        "run": None if run is None else str(run),
        "simulated": None if diagnosis is None else diagnosis.simulated,
        "environment": [asdict(finding) for finding in environment],
        "findings": [asdict(finding) for finding in findings],
        "fine": [{"name": check.name, "good": check.good} for check in diagnosis.good] if diagnosis else [],
        "not_checked": [{"name": name, "why": why} for name, why in diagnosis.not_checked] if diagnosis else [],
        "ok": not any(finding.severity == "problem" for finding in (*environment, *findings)),
    }
    emit(result, as_json=as_json, text=_text(run, diagnosis, environment))


def _vllm() -> dict[str, str] | None:
    """For each use that the runtime makes of vLLM what goes without it in the installed version; None without vLLM."""
    from tltlab.runtime.engine.vllm import installed_vllm
    from tltlab.runtime.engine.vllm.capabilities import by_version

    try:
        return by_version(installed_vllm())
    except PackageNotFoundError:
        return None


def _text(run: Path | None, diagnosis: Diagnosis | None, environment: list[Finding]) -> str:
    lines: list[str] = []
    if diagnosis is not None:
        kind = " (simulated: its figures are predictions)" if diagnosis.simulated else ""
        lines += [f"{run}{kind}", ""]
        for finding in diagnosis.findings:
            lines += _finding_lines(finding)
        if not diagnosis.findings:
            lines += ["No problem found.", ""]
        if diagnosis.good:
            lines += _wrapped("fine", "; ".join(check.good for check in diagnosis.good))
        for why, names in _by_reason(diagnosis.not_checked):
            lines += _wrapped("not checked", f"{', '.join(names)}: {why}")
        lines += ["", "environment"]
    bad = [finding for finding in environment if finding.severity != "fine"]
    for finding in bad:
        lines += _finding_lines(finding)
    good = [finding for finding in environment if finding.severity == "fine"]
    if diagnosis is not None:
        lines += _wrapped("fine", ", ".join(finding.title for finding in good))
    else:
        lines += [line for finding in good for line in _wrapped("fine", f"{finding.title}: {finding.evidence}")]
    return "\n".join(lines)


def _finding_lines(finding: Finding) -> list[str]:
    place = f"  [{finding.where}]" if finding.where else ""
    return [
        *_wrapped(_MARK[finding.severity], finding.title + place),
        *_wrapped("", finding.evidence),
        *_wrapped("  ->", finding.advice),
        "",
    ]


def _wrapped(label: str, text: str) -> list[str]:
    width = max(60, min(shutil.get_terminal_size((WIDTH, 1)).columns, WIDTH))
    return textwrap.wrap(text, width, initial_indent=f"{label:13s}", subsequent_indent=" " * 13)


def _by_reason(not_checked: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(why, names) of the checks not made: many lack the same."""
    reasons: dict[str, list[str]] = {}
    for name, why in not_checked:
        reasons.setdefault(why, []).append(name)
    return list(reasons.items())
