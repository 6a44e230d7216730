"""Options that several commands of the simulator have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from tltlab.console import progress_bar
from tltlab.sim.study.jobs import counted

RlSteps = Annotated[
    str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one; or all. [default: all]")
]
GpusPerWorker = Annotated[
    int | None,
    typer.Option(min=1, help="With --stages: GPUs of a rollout worker. [default: the costs' tp, else 1]"),
]
LogCosts = Annotated[
    str | None,
    typer.Option(help="Of a log: costs whose level it shows, a preset, profile or file. [default: linear ones]"),
]
LogWorkers = Annotated[int | None, typer.Option(min=1, help="Of a log: the engines that it ran on.")]


@contextmanager
def counting() -> Iterator[None]:
    """Show on standard error how many simulations are done, while the block runs."""
    with progress_bar("simulation", None) as bar, counted(lambda: bar("")):
        yield
