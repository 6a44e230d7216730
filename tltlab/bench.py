"""`tltlab bench ...`: the commands behind every figure in the README."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli import Json, emit, progress

app = typer.Typer(
    help="Benchmarks, as ratios within one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _group() -> None:
    """Benchmarks, as ratios within one run."""


@app.command()
def sim(
    rounds: Annotated[int, typer.Option(min=2, help="Times that every case runs, in turn.")] = 7,
    configurations: Annotated[
        int, typer.Option(min=0, help="Tables in the sweep over ten RL steps; 0 for none.")
    ] = 1000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the sweep.")] = 1,
    as_json: Json = False,
) -> None:
    """How fast the simulator is, against an event per iteration and against a pure closed form.

    Example: tltlab bench sim --rounds 7 --configurations 1000
    """
    from tltlab.sim.bench import bench_sim, text

    progress(f"{rounds} rounds, then a sweep of {configurations} tables")
    found = bench_sim(rounds, configurations, jobs)
    emit(found, as_json=as_json, text=text(found))


@app.command()
def accuracy(
    data: Annotated[Path, typer.Option(help="Folder of the measurements that the cost models are held against.")],
    as_json: Json = False,
) -> None:
    """Predicted against measured: cost and memory models, fitted anew, on data not used for the fit where it says so.

    Example: tltlab bench accuracy --data measurements
    """
    from .accuracy import rows, text

    found = rows(data)
    emit({"rows": found.to_dict("records")}, as_json=as_json, text=text(found))


@app.command()
def trace(
    responses: Annotated[int, typer.Option(min=1000, help="Responses to write, describe and read back.")] = 2_000_000,
    as_json: Json = False,
) -> None:
    """Peak memory and speed of writing, describing and reading a large synthetic trace.

    Example: tltlab bench trace --responses 10000000
    """
    from .stream_bench import bench_stream, text

    found = bench_stream(responses)
    emit(found, as_json=as_json, text=text(found))
