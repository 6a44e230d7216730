"""`tltlab profile`: measure step times of a real engine and write them as a table."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tltlab.config import counted, faults_in, json_or_text
from tltlab.console import emit, progress, whole_numbers
from tltlab.errors import ConfigError
from tltlab.files import check_writable, write_file, write_json
from tltlab.options import command, option

if TYPE_CHECKING:
    import pandas as pd

    from tltlab.drafters.specs import LearnedSpec

_QUIET = 0.1
"""Median relative difference of two visits to a cell above which other load on the machine is likely."""


@command
def profile(
    model: Annotated[str, typer.Argument(help="A Hugging Face model folder.")],
    out: Annotated[
        Path, typer.Option(help="Table to write, .csv or .parquet; TABLE.json beside it describes the measurement.")
    ],
    batches: str = option("Requests in a batch, with commas between them.", "1,2,4,8,16,32"),
    depths: str = option("Tokens drafted per request; 0 is plain decoding.", "0,1,3,7"),
    contexts: str = option("Tokens of prompt per request; two or more show attention.", "64,512"),
    drafter: str | None = option(
        "A learned drafter: eagle, eagle3 or draft_model. [default: drafts that cost nothing, as 'ngram']",
        metavar="NAME=METHOD:PATH",
    ),
    vllm: list[str] | None = option("An argument of vllm.LLM.", metavar="KEY=VALUE"),
    iterations: int = option("Iterations timed per cell, over two visits.", 30, min=2),
    seed: int = option("Seed of prompts, dummy weights and the order.", 0, min=0),
) -> None:
    """Time a real engine over batch x draft depth x context, for `tltlab calibrate TABLE`.

    Prefills of each context are timed too. Cells that do not fit the engine are left out and named. The
    weights do not matter to the times, so --vllm load_format=dummy does. On a GPU a second engine, scheduled
    asynchronously, times plain decoding, for what waiting for the host takes; --vllm async_scheduling=... has one.

    Example: tltlab profile models/subset-sum-small --out steps.csv --batches 1,4,16 --contexts 64,256
    """
    check_writable(out, ".csv", ".parquet")
    learned = None if drafter is None else _learned(drafter)
    args = dict(map(vllm_setting, vllm or []))
    options = {"--batches": batches, "--depths": depths, "--contexts": contexts}
    numbers = {option[2:]: tuple(whole_numbers(option, text)) for option, text in options.items()}
    # As for the workers of a run: an engine with two threads stalls where the machine is busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # vLLM and torch take seconds to import: wrong options must not wait for them.
    import pandas as pd
    import torch

    from tltlab.runtime.engine.environment import hardware, versions
    from tltlab.runtime.engine.profile import ProfileGrid, engine_settings, start_engine
    from tltlab.runtime.engine.profile import profile as measure

    grid = ProfileGrid(**numbers, iterations=iterations)
    started = time.perf_counter()
    engine = start_engine(model, grid, learned, args, seed)
    try:
        profiled = measure(engine, grid, seed=seed, report=progress)
        settings = engine_settings(engine)
    finally:
        engine.close()
    rows = profiled.table
    if torch.cuda.is_available() and "async_scheduling" not in args:
        plain = replace(grid, depths=(0,))
        engine = start_engine(model, plain, None, args | {"async_scheduling": True}, seed)
        try:
            other = measure(engine, plain, seed=seed, report=progress).table
        finally:
            engine.close()
        rows = pd.concat([rows, other[other["prefill_tokens"] == 0]], ignore_index=True)
    about = {
        "model": model,
        "hardware": hardware(),
        "versions": versions(),
        "engine": settings,
        "vllm_args": args,
        "drafter": drafter or "forced: arbitrary tokens that cost nothing, written as ngram",
        "iterations": iterations,
        "seed": seed,
        "num_cells": int((profiled.table["prefill_tokens"] == 0).sum()),
        "num_prefill_rows": int((profiled.table["prefill_tokens"] > 0).sum()),
        "skipped": profiled.skipped,
        "spread": profiled.spread,
        "repeat_error": profiled.repeat_error,
        "measured_s": profiled.seconds,
        "seconds": time.perf_counter() - started,
    }
    beside = out.with_name(out.name + ".json")
    write_json(beside, about)
    write_table(rows, out)
    emit({"out": str(out), "about": str(beside), **about}, _text(out, about))


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a `.csv` or `.parquet` file atomically; InputError where the folder cannot be written to."""
    write_file(path, table.to_parquet(index=False) if path.suffix == ".parquet" else table.to_csv(index=False))


def vllm_setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, the value as JSON where it is JSON (numbers, lists, true), else the text itself."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"--vllm is {text!r}: give KEY=VALUE, such as load_format=dummy")
    return key, json_or_text(value)


def _learned(text: str) -> tuple[str, LearnedSpec]:
    from tltlab.drafters.specs import STANDARD, LearnedSpec

    name, _, head = text.partition("=")
    method, colon, model = head.partition(":")
    if not colon or name not in STANDARD or not STANDARD[name].has_network:
        raise ConfigError(f"--drafter is {text!r}: give NAME=METHOD:PATH, such as learned=eagle:heads/eagle")
    with faults_in(f"--drafter is {text!r}"):
        return name, LearnedSpec.model_validate({"method": method, "model": model})


def _text(out: Path, about: dict[str, Any]) -> str:
    def share(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.1%}"

    lines = [
        f"{out}: {counted(about['num_cells'], 'cell')} and {counted(about['num_prefill_rows'], 'prefill')} of "
        f"{about['model']} on {about['hardware']}, vLLM {about['versions']['vllm']}, in {about['seconds']:.0f} s",
        f"spread of a cell (interquartile range): {share(about['spread'])} of its time; "
        f"two visits apart: {share(about['repeat_error'])}; all medians",
    ]
    if (about["repeat_error"] or 0.0) > _QUIET:
        lines.append("the machine was not quiet: measure again when nothing else runs on it")
    if about["skipped"]:
        lines.append(f"left out: {counted(len(about['skipped']), 'cell')}, such as {about['skipped'][0]['why']}")
    return "\n".join(lines)
