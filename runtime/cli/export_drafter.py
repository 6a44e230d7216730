"""`tltlab export-drafter`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit, progress
from tltlab.options import command, option
from tltlab.records import Json
from tltlab.runtime.recipe.drafter import ExportConfig

from .train_drafter import chances


@command
def export_drafter(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|HEAD", help="A run that trained a drafter, or a head: a folder or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
    config: ExportConfig,
    model: Path | None = option("The target's folder; default: from the run or the head's training."),
    prompts: Path | None = option("JSONL, Parquet or trace; default: the run's held-out prompts, or the model's own."),
    prompt_column: str | None = option("Column of the prompts, text or token ids; default: the run's, or 'prompt'."),
    chat: bool | None = option("Prompts go through the model's chat template; default: as in the run."),
) -> None:
    """Write a drafter as a checkpoint that stock vLLM serves, after a check of its acceptance in stock vLLM.

    Example: tltlab export-drafter runs/first --out drafters/first
    """
    # torch takes seconds to import: --help should not wait for it.
    from tltlab.runtime.drafter.offline.export import export_drafter as export
    from tltlab.runtime.drafter.offline.export import find_source

    drafter = find_source(source, model, prompts, prompt_column=prompt_column, chat=chat)
    report = export(drafter, out, config, progress)
    emit(report, _text(report))


def _text(report: Json) -> str:
    lines = [f"{report['out']}: {report['method']} drafter of {report['model']}"]
    for name in ("greedy", "sampled"):
        length, positions = report[name]["accept_length"], report[name]["positions"]["measured"]
        lines.append(
            f"  {name:8s} temperature {report[name]['temperature']:g}: accept length {length['measured']:.2f} in stock "
            f"vLLM, {length['expected']:.2f} expected; kept, by draft position: {chances(positions)}"
        )
    lines.append(f"serve it with --speculative-config '{json.dumps(report['speculative_config'])}'")
    return "\n".join(lines)
