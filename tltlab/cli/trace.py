"""`tltlab trace ...`: look at, check, repair, import, generate and annotate traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tltlab.console import Json, emit
from tltlab.traces.recorder import repair as repair_recording
from tltlab.traces.stream import count
from tltlab.traces.stream import describe as describe_trace
from tltlab.traces.trace import Trace, read

from .annotate import annotate_trace
from .generate import generate
from .importing import import_trace

app = typer.Typer(
    help="Describe, validate, repair, import, generate and annotate traces.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE|RUN", help="A trace folder, a run, or a CSV of lengths.")]


@app.command()
def describe(trace: TraceArgument, as_json: Json = False) -> None:
    """Say what is in a trace: manifest, tables, and lengths and times of each RL step.

    Example: tltlab trace describe traces/tiny
    """
    result = describe_trace(read(trace))
    emit(result, as_json=as_json, text=_describe_text(result))


@app.command()
def validate(trace: TraceArgument, as_json: Json = False) -> None:
    """Check a trace against the format; exit code 2 and the first fault if it breaks it.

    Example: tltlab trace validate traces/tiny
    """
    found = read(trace)
    emit(count(found) | {"valid": True}, as_json=as_json, text=f"valid: {_counts_text(found)}")


@app.command()
def repair(
    path: Annotated[Path, typer.Argument(metavar="TRACE|RUN", help="The trace whose recording was interrupted.")],
    out: Annotated[Path | None, typer.Option(help="Write the trace there and leave PATH as it is.")] = None,
    as_json: Json = False,
) -> None:
    """Turn an interrupted recording into a valid trace; a valid trace stays as it is.

    A run that was resumed and interrupted has a finished trace of its earlier part beside the recording. The recording
    goes on from that trace and replaces it; where responses would be lost, nothing is done without --out.

    Example: tltlab trace repair runs/demo/trace
    """
    found = repair_recording(path, out)
    text = f"{found.path}: valid: {_counts_text(found)}"
    notes = found.manifest.notes
    emit(
        count(found) | {"path": str(found.path), "notes": notes},
        as_json=as_json,
        text=f"{text}\n{notes}" if notes else text,
    )


app.command("import")(import_trace)
app.command("annotate")(annotate_trace)
app.command()(generate)


def _counts_text(trace: Trace) -> str:
    counts = count(trace)
    return (
        f"{counts['num_responses']} responses, {counts['num_tokens']} tokens, {counts['num_rl_steps']} RL steps; "
        f"tables: {', '.join(counts['tables'])}"
    )


def _describe_text(result: dict[str, Any]) -> str:
    lines = [f"{name:20s} {value}" for name, value in result["manifest"].items() if value is not None]
    lines.append(f"{'tables':20s} " + ", ".join(f"{name} ({rows} rows)" for name, rows in result["tables"].items()))
    columns = {
        "RL step": ("rl_step", "d"), "responses": ("num_responses", "d"), "tokens": ("num_tokens", "d"),
        "cut": ("num_cut", "d"), "aborted": ("num_aborted", "d"), "p50": ("p50_tokens", ".0f"),
        "p95": ("p95_tokens", ".0f"), "max": ("max_tokens", ".0f"), "prompt share": ("prompt_share", ".2f"),
        "rollout s": ("rollout_s", ".2f"), "bubble": ("bubble_fraction", ".1%"), "tail": ("tail_fraction", ".1%"),
        "accept len": ("mean_accept_length", ".2f"),
    }  # fmt: skip
    lines += ["", "  ".join(f"{title:>7s}" for title in columns)]
    for row in result["rl_steps"]:
        cells = []
        for title, (name, form) in columns.items():
            text = "-" if row[name] is None else format(row[name], form)
            cells.append(f"{text:>{max(7, len(title))}s}")
        lines.append("  ".join(cells))
    return "\n".join(lines)
