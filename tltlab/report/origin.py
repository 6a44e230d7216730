"""Parts of a report on where a run came from and what happened in it: command, versions, events, findings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tltlab.doctor.check import Diagnosis
from tltlab.doctor.evidence import RunEvidence
from tltlab.doctor.signatures import diagnose
from tltlab.errors import TltlabError
from tltlab.files import json_lines, read_object
from tltlab.traces.trace import Trace

from .page import Absent, Block, Code, Facts, Items, PageTable, Paragraph, Part, Section

_MOST_EVENTS = 60


def diagnosis_of(run: Path) -> Diagnosis[RunEvidence] | TltlabError:
    """The findings of `tltlab doctor` in a run, or the reason why there are none."""
    try:
        return diagnose(run)
    except TltlabError as error:
        return error


def findings_part(diagnosis: Diagnosis[RunEvidence] | TltlabError) -> Part:
    """The findings of `tltlab doctor` in a run."""
    title = "Findings"
    if isinstance(diagnosis, TltlabError):
        return Absent(title=title, reason=str(diagnosis))
    checks = len(diagnosis.good) + len(diagnosis.not_checked) + len({f.code for f in diagnosis.findings})
    blocks: list[Block] = [Paragraph(text="None of the known failure signatures was found.")]
    if diagnosis.findings:
        rows = []
        for finding in diagnosis.findings:
            place = f" ({finding.where})" if finding.where else ""
            rows.append((f"{finding.severity}: {finding.title}{place}", f"{finding.evidence} {finding.advice}".strip()))
        blocks = [Items(rows=tuple(rows))]
    good = "; ".join(check.good for check in diagnosis.good)
    blocks.append(Paragraph(text=f"Of {checks} checks these found nothing: {good or 'none'}."))
    if diagnosis.not_checked:
        blocks.append(PageTable(
            caption="Checks that lacked data.", columns=("check", "why"), rows=diagnosis.not_checked,
            text_columns=frozenset({0, 1}), summary=f"{len(diagnosis.not_checked)} checks that could not be made",
        ))  # fmt: skip
    return Section(title=title, blocks=tuple(blocks))


def events_part(run: Path) -> Part:
    """Part with the events that the run wrote to events.jsonl, in order."""
    title, path = "Events", run / "events.jsonl"
    if not path.is_file():
        return Absent(title=title, reason="the run has no events.jsonl")
    rows = [(str(event.get("rl_step", "–")), str(event.get("event", ""))) for event in json_lines(path)]
    if not rows:
        return Absent(title=title, reason="events.jsonl has no event")
    shown, num_hidden = rows, 0
    if len(rows) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        shown, num_hidden = [*rows[:half], *rows[-half:]], len(rows) - 2 * half
    summary = f"{len(rows)} events" + (f", {num_hidden} in the middle are left out here" if num_hidden else "")
    table = PageTable(
        caption="From events.jsonl.", columns=("RL step", "event"), rows=tuple(shown), text_columns=frozenset({0, 1}),
        summary=summary,
    )  # fmt: skip
    return Section(title=title, blocks=(table,))


def origin_part(run: Path, trace: Trace, run_json: Mapping[str, Any]) -> Part:
    """Model, hardware, versions, and the command to repeat the run; `run_json` is what it wrote there."""
    manifest = trace.manifest
    facts = [
        ("model", manifest.model), ("hardware", manifest.hardware), ("engine", manifest.engine),
        ("workers", manifest.num_workers), ("cap, tokens", manifest.max_response_tokens),
        ("responses per prompt", manifest.group_size), ("seed", manifest.seed), ("trace", manifest.kind),
        ("created", manifest.created), ("source", manifest.source), ("license", manifest.license),
        ("notes", manifest.notes),
    ]  # fmt: skip
    facts += [(name, version) for name, version in versions_of(run_json).items()]
    blocks: list[Block] = [Facts(rows=tuple((name, str(value)) for name, value in facts if value not in (None, "")))]
    blocks += repeat_blocks(run_json.get("argv"), "The run has no run.json: the command that made it is not known.")
    files = {"The whole recipe": run_json.get("recipe"), "The policy file": read_object(run / "policy.json")}
    for name, value in files.items():
        if value:
            blocks.append(Code(code=json.dumps(value, indent=2), label=name, summary=name))
    return Section(title="Where it comes from", blocks=tuple(blocks))


def versions_of(source: Mapping[str, Any]) -> dict[str, str]:
    """Versions of programs, by name."""
    versions = source.get("versions")
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def repeat_blocks(argv: Any, unknown: str) -> list[Block]:
    """The command to repeat something, as a shell takes it; the sentence `unknown` where it is not known."""
    if not argv or not isinstance(argv, Sequence):
        return [Paragraph(text=unknown)]
    code = argv if isinstance(argv, str) else command_line([str(word) for word in argv])
    return [Paragraph(text="To repeat it:"), Code(code=code, label="command to repeat")]


def command_line(argv: Sequence[str]) -> str:
    """An argument vector as a line for a shell.

    >>> command_line(["/opt/venv/bin/tltlab", "train", "my recipe.toml"])
    "tltlab train 'my recipe.toml'"
    """
    program = Path(argv[0])
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", program.parent.name, *argv[1:]])
    if program.suffix == ".py":
        return shlex.join(["python", *argv])
    return shlex.join([program.name, *argv[1:]])
