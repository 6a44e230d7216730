"""`tltlab export-drafter`."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tltlab.console import Json, emit, progress

from .train_drafter import chances


class Layout(StrEnum):
    speculators = "speculators"
    eagle = "eagle"


def export_drafter(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|HEAD", help="A run that trained a drafter, or a head: a folder or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")],
    model: Annotated[
        Path | None, typer.Option(help="The target's folder; default: from the run or the head's training.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL, Parquet or trace; default: the run's held-out prompts, or the model's own."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts on which acceptance is compared.")] = 10,
    max_response_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of a response.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature of the comparison, beside greedy.")] = 1.0,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 5,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column of the prompts, text or token ids; default: the run's, or 'prompt'.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Prompts go through the model's chat template; default: as in the run.")
    ] = None,
    layout: Annotated[
        Layout, typer.Option(help="Layout of an EAGLE-3 head's checkpoint: speculators', or EAGLE's and SpecForge's.")
    ] = Layout.speculators,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Json = False,
) -> None:
    """Write a drafter as a checkpoint that stock vLLM serves, after a check of its acceptance in stock vLLM.

    Example: tltlab export-drafter runs/first --out drafters/first
    """
    from tltlab.config import faults_in
    from tltlab.runtime.drafter.offline.export import ExportConfig, find_source
    from tltlab.runtime.drafter.offline.export import export_drafter as export

    with faults_in("export-drafter"):
        config = ExportConfig(
            prompts=num_prompts,
            max_response_tokens=max_response_tokens,
            temperature=temperature,
            depth=depth,
            layout=layout.value,
            seed=seed,
        )
    drafter = find_source(source, model, prompts, prompt_column=prompt_column, chat=chat)
    report = export(drafter, out, config, progress)
    emit(report, as_json=json, text=_text(report))


def _text(report: dict[str, Any]) -> str:
    lines = [f"{report['out']}: {report['method']} drafter of {report['model']}"]
    for name in ("greedy", "sampled"):
        length, positions = report[name]["accept_length"], report[name]["positions"]["measured"]
        lines.append(
            f"  {name:8s} temperature {report[name]['temperature']:g}: accept length {length['measured']:.2f} in stock "
            f"vLLM, {length['expected']:.2f} expected; kept, by draft position: {chances(positions)}"
        )
    lines.append(f"serve it with --speculative-config '{json_module.dumps(report['speculative_config'])}'")
    return "\n".join(lines)
