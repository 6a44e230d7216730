"""`tltlab map`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from tltlab.charts import FORMATS, save_figure
from tltlab.console import Json, emit, made_by, progress, table
from tltlab.costs.profiles import parse_dtype
from tltlab.errors import ConfigError
from tltlab.files import write_file, write_json

from .options import words

_FAST_CONTEXTS, _FAST_LOADS = "32K", "8,128"


def map_families(
    models: Annotated[str, typer.Option(help="Dense and sparse ones, with commas between.")] = (
        "Qwen3-32B,Qwen3-30B-A3B"
    ),
    weights: Annotated[str, typer.Option(help="Types of the engine's weights.")] = "bf16,fp8",
    schedules: Annotated[str, typer.Option(help="synchronous, one step off.")] = "synchronous,one step off",
    contexts: Annotated[
        str | None, typer.Option(help="Length limits of responses, to 128K. [default: 16K,32K,128K]")
    ] = None,
    loads: Annotated[str | None, typer.Option(help="Responses to a worker. [default: 8,32,128]")] = None,
    gpu: Annotated[str, typer.Option(help="One that `tltlab costs` knows.")] = "H100",
    workers: Annotated[int, typer.Option(help="Rollout workers; half of them train where one step off.")] = 4,
    regime: Annotated[str, typer.Option(help="Lengths: reasoning or base-rl.")] = "reasoning",
    rl_steps: Annotated[int, typer.Option(help="RL steps of each point that count, behind a first one.")] = 5,
    fast: Annotated[bool, typer.Option("--fast", help="A length limit and two loads: a minute.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the points.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, policies and intervals.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write a row per point and family.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture, .png or .svg.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Show where each family of systems pays: models, weights, schedules, length limits and loads, simulated.

    The families are a fixed model-free drafter, a trained one under a bandit, prompts in the order of their lengths,
    and both; each against plain decoding on the same responses. How sure: over RL steps, over what the engine's costs
    are off where they were left out of their fit, and at the low end of acceptance.

    Example: tltlab map --fast --plot map.png
    """
    from tltlab.sim.maps.grid import MapGrid, Schedule
    from tltlab.sim.maps.survey import ASSUMPTIONS, survey, table_rows

    if plot is not None and plot.suffix not in FORMATS:
        raise ConfigError(f"--plot {plot}: name a file that ends in {' or '.join(FORMATS)}")
    for option, path in (("--csv", csv), ("--plot", plot), ("--out", out)):
        if path is not None and path.is_dir():
            raise ConfigError(f"{option} {path} is a folder: give the name of a file")
    contexts = contexts or (_FAST_CONTEXTS if fast else "16K,32K,128K")
    loads = loads or (_FAST_LOADS if fast else "8,32,128")
    known_schedules: tuple[Schedule, ...] = get_args(Schedule)
    names = words(schedules)
    if unknown := [name for name in names if name not in known_schedules]:
        raise ConfigError(f"--schedules: no {unknown[0]!r}; there are {', '.join(known_schedules)}")
    grid = MapGrid(
        models=words(models), weights=[parse_dtype(word) for word in words(weights)],
        schedules=[name for name in known_schedules if name in names],
        contexts=[_tokens(word) for word in words(contexts)], loads=[_whole(word, "--loads") for word in words(loads)],
        gpu=gpu, workers=workers, regime=regime, rl_steps=rl_steps, seed=seed,
    )  # fmt: skip
    surveyed = survey(grid, jobs=jobs, say=progress)
    result = surveyed.json() | {"figures": "simulated", "seed": seed, **made_by("numpy", "scipy", "simpy")}
    if csv is not None:
        write_file(csv, surveyed.to_frame().to_csv(index=False).encode())
    if plot is not None:
        save_figure(surveyed.plot(), plot)
    if out is not None:
        write_json(out, result)
    lines = [
        surveyed.verdict,
        "",
        table(*table_rows(surveyed.results)),
        *(f"assumed: {note}" for note in ASSUMPTIONS),
    ]
    lines += [f"wrote {path}" for path in (csv, plot, out) if path is not None]
    emit(result, as_json=as_json, text="\n".join([*lines, f"simulated in {surveyed.wall_s:.0f} s"]))


def _tokens(word: str) -> int:
    """
    >>> _tokens("32K"), _tokens("1000")
    (32768, 1000)
    """
    number = word.removesuffix("K").removesuffix("k")
    return _whole(number, "--contexts") * (1024 if number != word else 1)


def _whole(word: str, option: str) -> int:
    if not word.isdecimal():
        raise ConfigError(f"{option}: {word!r} is no whole number")
    return int(word)
