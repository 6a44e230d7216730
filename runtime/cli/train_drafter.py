"""`tltlab train-drafter`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tltlab.config import counted, faults_in
from tltlab.console import emit, progress
from tltlab.options import command, option
from tltlab.records import Json
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig, TextConfig, WarmUpConfig


@command
def train_drafter(
    model: Annotated[Path, typer.Argument(help="The target: a Hugging Face folder.")],
    data: Annotated[
        Path,
        typer.Argument(help="A trace with tokens, or JSONL or Parquet: prompts and responses, or prompts alone."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the drafter's checkpoint.")],
    config: WarmUpConfig,
    texts: TextConfig,
    method: Annotated[
        Literal["eagle", "hass", "eagle3"],
        typer.Option(help="eagle (one step), hass (three steps, the same head) or eagle3 (seven steps, another head)."),
    ] = "eagle",
    lr: float = option("Learning rate of AdamW, after 20 updates of warm-up.", 1e-3),
) -> None:
    """Warm up a drafter for a model, offline, on responses of that model; report held-out acceptance.

    Prompts alone are answered by the model in a vLLM engine first. The checkpoint shares the model's embedding and LM
    head; `export-drafter` makes one that stock vLLM serves by itself.

    Example: tltlab train-drafter models/tiny models/tiny/train.jsonl --until-accept-length 2 --out heads/tiny
    """
    # torch takes seconds to import: --help should not wait for it.
    from tltlab.runtime.drafter.offline.warm_up import train_drafter as train

    with faults_in("train-drafter"):
        changed = {"loss": LossConfig(kind=method), "optim": OptimConfig(lr=lr), "texts": texts}
    report = train(model, data, out, config.model_copy(update=changed), progress)
    emit(report, _text(report))


def _text(report: Json) -> str:
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
