"""`tltlab experiment`: lists the experiments, or runs one and writes its verdict, table and picture."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import Json, emit, made_by, progress, table
from tltlab.experiments import EXPERIMENTS, find
from tltlab.experiments.result import check_replaceable, describe_settings, read_settings, settings_json


def experiment(
    name: Annotated[str | None, typer.Argument(help="Which one; without it they are listed.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, over the experiment's settings.", metavar="[KEY=VALUE]...")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A folder of `tltlab make-model`; without one a model is trained first.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write NAME/ into, and a model where one is trained.")] = Path(
        "experiments"
    ),
    fast: Annotated[
        bool, typer.Option("--fast", help="Small enough to see that it works, too small to believe.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")] = 0,
    as_json: Json = False,
) -> None:
    """The experiments that everyone asks of TLT: each ends in a verdict, a table and a picture.

    Example: tltlab experiment batch-size rounds=10 --model models/subset-sum-deep
    """
    if name is None:
        _list(as_json)
        return
    # Two threads on a busy machine stall for seconds; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = find(name)
    kind = chosen.Settings
    assignments = list(overrides or [])
    if model is not None:
        assignments.append(f"model={model}")
    settings = read_settings(kind, chosen.FAST if fast else None, assignments)
    check_replaceable(out / name)
    progress(f"{name}: {describe_settings(settings)}")
    result = replace(
        chosen(settings, folder=out, seed=seed, progress=progress).run(),
        name=name,
        question=EXPERIMENTS[name][0],
        settings=settings_json(settings, seed=seed),
        **made_by("vllm", "torch", "ray", "transformers", "simpy", "numpy"),
    )
    result.write(out / name)
    emit(
        result.json() | {"out": str(out / name)},
        as_json=as_json,
        text=f"{result.text()}\n\nwritten to {out / name}: result.json, table.csv, picture.png",
    )


def _list(as_json: bool) -> None:
    rows = [{"name": name, "question": asked, "takes": takes} for name, (asked, takes) in EXPERIMENTS.items()]
    text = table([], [(row["name"], f"{row['question']} ({row['takes']})") for row in rows], left=2)
    emit({"experiments": rows}, as_json=as_json, text=f"{text}\n\ntltlab experiment NAME [key=value ...] runs one")
