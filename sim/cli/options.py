"""Options that several commands of the simulator have."""

from typing import Annotated

import typer

from tltlab.own import split
from tltlab.traces.trace import Trace

Workers = Annotated[int | None, typer.Option(help="Rollout workers. [default: the manifest's]")]
Costs = Annotated[
    str | None,
    typer.Option(help="Cost file, preset or module:Class. [default: the trace's costs.json, else cpu-small]"),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        help="constant:A, geometric:ALPHA, trace, a fitted file or module:Class. [default: the trace's, or measured]"
    ),
]
AcceptanceSpread = Annotated[
    float,
    typer.Option(help="Standard deviation, in logits, of acceptance between requests; the mean over drafts is kept."),
]
Mode = Annotated[str, typer.Option(help="fluid (expected tokens) or sampled.")]
RlSteps = Annotated[str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one. [default: all]")]
DecisionBlock = Annotated[int, typer.Option(help="Iterations per decision of a learning policy; more is faster.")]
DefaultDecisionBlock = Annotated[
    int | None,
    typer.Option(help="Iterations between decisions. [default: 1; systems on long responses: their cap / 256]"),
]
PrefixCaching = Annotated[
    bool, typer.Option("--prefix-caching", help="A group's prompt is prefilled, and held, once on each worker.")
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
RayAddress = Annotated[
    str | None, typer.Option("--ray", help="Run on a Ray cluster instead: auto, local, or its address.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of policies, of searches and of what is sampled.")]


def words(text: str | None) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(split(text or ""))


def decisions(block: int | None, trace: Trace, systems: str | None) -> int:
    """Iterations between decisions: of systems that get long responses some hundred decisions each, else 1."""
    if block is not None or systems is None:
        return 1 if block is None else block
    cap = trace.workload["max_response_tokens"].max()
    # That of a trace without responses is not a number, and not above anything.
    return int(cap) // 256 if cap >= 4096 else 1
