"""`tltlab train-drafter`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tltlab.config import counted
from tltlab.console import Json, emit, progress

_GB = 1e9


class Kind(StrEnum):
    eagle = "eagle"
    hass = "hass"
    eagle3 = "eagle3"


def train_drafter(
    model: Annotated[Path, typer.Argument(help="The target: a Hugging Face folder.")],
    data: Annotated[
        Path,
        typer.Argument(help="A trace with tokens, or JSONL or Parquet: prompts and responses, or prompts alone."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the drafter's checkpoint.")],
    method: Annotated[
        Kind,
        typer.Option(help="eagle (one step), hass (three steps, the same head) or eagle3 (seven steps, another head)."),
    ] = Kind.eagle,
    head: Annotated[Path | None, typer.Option("--from", help="A head to continue from: a folder or a hub id.")] = None,
    updates: Annotated[int, typer.Option(min=0, help="Most optimizer steps.")] = 500,
    tokens_per_update: Annotated[int, typer.Option(min=2, help="Tokens per step.")] = 4096,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW, after 20 updates of warm-up.")] = 1e-3,
    until_accept_length: Annotated[
        float | None, typer.Option(help="Stop when the held-out accept length reaches this.")
    ] = None,
    check_every: Annotated[int, typer.Option(min=1, help="Updates between evaluations on held-out responses.")] = 50,
    heldout: Annotated[float, typer.Option(help="Share of the prompts whose responses are held out.")] = 0.1,
    depth: Annotated[int, typer.Option(min=1, max=255, help="Tokens of a draft, where acceptance is measured.")] = 8,
    responses: Annotated[int, typer.Option(min=1, help="Most responses, drawn at random.")] = 512,
    max_response_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 1024,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the model's responses to prompts alone.")
    ] = 1.0,
    prompt_column: Annotated[str, typer.Option(help="Column of the prompts, text or token ids.")] = "prompt",
    response_column: Annotated[str, typer.Option(help="Column of the responses, text or token ids.")] = "response",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts go through the model's chat template.")] = False,
    memory_gb: Annotated[float, typer.Option(help="GB of hidden states kept; others are recomputed.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Json = False,
) -> None:
    """Warm up a drafter for a model, offline, on responses of that model; report held-out acceptance.

    Prompts alone are answered by the model in a vLLM engine first. The checkpoint shares the model's embedding and LM
    head; `export-drafter` makes one that stock vLLM serves by itself.

    Example: tltlab train-drafter models/tiny models/tiny/train.jsonl --until-accept-length 2 --out heads/tiny
    """
    from tltlab.config import faults_in
    from tltlab.runtime.drafter.offline.data import TextConfig
    from tltlab.runtime.drafter.offline.warm_up import WarmUpConfig
    from tltlab.runtime.drafter.offline.warm_up import train_drafter as train
    from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

    with faults_in("train-drafter"):
        config = WarmUpConfig(
            loss=LossConfig(kind=method.value),
            optim=OptimConfig(lr=lr),
            texts=TextConfig(
                responses=responses,
                max_response_tokens=max_response_tokens,
                prompt_column=prompt_column,
                response_column=response_column,
                chat=chat,
                temperature=temperature,
            ),
            head=None if head is None else str(head),
            updates=updates,
            tokens_per_update=tokens_per_update,
            until_accept_length=until_accept_length,
            check_every=check_every,
            heldout=heldout,
            depth=depth,
            max_bytes=int(memory_gb * _GB),
            seed=seed,
        )
    report = train(model, data, out, config, progress)
    emit(report, as_json=json, text=_text(report))


def _text(report: dict[str, Any]) -> str:
    before, after = report["before"], report["after"]
    return "\n".join(
        [
            f"{report['out']}: {report['method']} head of {report['parameters']:,} parameters, "
            f"{counted(report['updates'], 'update')} on {report['tokens']:,} tokens in {report['train_s']:.0f} s "
            f"(and {report['prepare_s']:.0f} s for the data)",
            f"held out ({report['heldout_responses']} of {report['responses']} responses), before -> after:",
            f"  accept length  {before['accept_length']:.2f} -> {after['accept_length']:.2f}",
            f"  loss           {before['loss']:.3f} -> {after['loss']:.3f}",
            f"  accepted, by draft position: {chances(before['positions'])} -> {chances(after['positions'])}",
        ]
    )


def chances(positions: list[float | None]) -> str:
    """Format acceptance rates by draft position; "-" where unknown."""
    return " ".join("-" if chance is None else f"{chance:.2f}" for chance in positions)
