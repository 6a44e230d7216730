"""Options that several commands of the simulator have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from tltlab.console import progress_bar
from tltlab.options import Option
from tltlab.sim.study.jobs import counted

RlSteps = Annotated[str | None, Option("a:b, RL steps a to b - 1; or one; or all. [default: all]")]
LogCosts = Annotated[
    str | None, Option("Of a log: costs whose level it shows, a preset, profile or file. [default: linear ones]")
]
LogWorkers = Annotated[int | None, Option("Of a log: the engines that it ran on.", min=1)]
Jobs = Annotated[int | None, Option("Processes. [default: the cores here]", min=1)]


@contextmanager
def counting() -> Iterator[Callable[[str], None]]:
    """Show on standard error how many simulations are done, while the block runs; yield what takes a stage's name."""
    with progress_bar() as bar, counted(lambda: bar("")):
        yield bar
