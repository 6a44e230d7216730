"""Options that several commands of the simulator have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from tltlab.console import progress_bar
from tltlab.sim.study.jobs import counted
from tltlab.traces.trace import Trace

Workers = Annotated[int | None, typer.Option(help="Rollout workers. [default: the manifest's]")]
Costs = Annotated[
    str | None,
    typer.Option(help="Cost file, preset or module:Class. [default: the trace's costs.json, else cpu-small]"),
]
Gpus = Annotated[str | None, typer.Option(help="Such as 8xH100, in place of costs and workers. [with --model: 8xH100]")]
Model = Annotated[
    str | None, typer.Option(help="On --gpus: Qwen/Qwen2.5-7B or another name, or a config.json. [default: Qwen2.5-7B]")
]
Engine = Annotated[
    str | None, typer.Option(help="On --gpus: the engine's profile. [default: measured nearest to GPUs and model]")
]
TensorParallel = Annotated[
    int | None, typer.Option("--tp", min=1, help="On --gpus: GPUs of a worker. [default: the fewest that hold it]")
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        help="By drafter, learned=geometric:0.7,ngram=geometric:0.42, or all=MODEL; a MODEL is geometric:ALPHA, "
        "constant:A, 0.8/0.6/0.5 by token, lengths:1.8/2.4 by depth, a fitted file, module:Class; MODEL@2k falls "
        "beyond the 2,048 tokens at which the drafter was trained (@short, @window, @long, @mtp); also trace, default. "
        "[default: what the trace has, else with --gpus the default of each drafter]"
    ),
]
Mode = Annotated[str, typer.Option(help="fluid (expected tokens) or sampled.")]
RlSteps = Annotated[
    str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one; or all. [default: all]")
]
SampledRlSteps = Annotated[
    str | None,
    typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one; or all. [default: of more than 24 a sample]"),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes. [default: the cores here]")]
DefaultDecisionBlock = Annotated[
    int | None,
    typer.Option(help="Iterations between decisions. [default: 1; systems on long or many responses: cap / 256]"),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching",
        help="A group's prompt is prefilled, and held, once on each worker, and a preempted request goes on from what "
        "is left of it in the KV cache: engines' own default.",
    ),
]
GpusPerWorker = Annotated[
    int | None,
    typer.Option(min=1, help="With --stages: GPUs of a rollout worker. [default: the costs' tp, else 1]"),
]
Prefix = Annotated[
    str,
    typer.Option(help="Between turns a prefix is kept (cached while there is room) or recomputed."),
]
MaxTools = Annotated[int | None, typer.Option(help="Tools that may run at once; other calls wait. [default: any]")]
ToolSeconds = Annotated[
    float | None, typer.Option(help="Seconds of a tool between turns where the trace does not know. [default: refuse]")
]
LogCosts = Annotated[
    str | None,
    typer.Option(help="Of a log: costs whose level it shows, a preset, profile or file. [default: linear ones]"),
]
LogWorkers = Annotated[int | None, typer.Option(min=1, help="Of a log: the engines that it ran on.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of policies, of searches and of what is sampled.")]


@contextmanager
def counting() -> Iterator[None]:
    """Show on standard error how many simulations are done, while the block runs."""
    with progress_bar("simulation", None) as bar, counted(lambda: bar("")):
        yield


def decisions(block: int | None, trace: Trace, systems: str | None) -> int:
    """Iterations between decisions: what was asked for, else `decision_interval` of systems and 1 of policies."""
    from tltlab.sim.config import decision_interval

    return block if block is not None else 1 if systems is None else decision_interval(trace)
