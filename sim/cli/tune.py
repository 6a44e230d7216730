"""`tltlab tune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tltlab.calibration.api import parse_rl_steps
from tltlab.charts import FORMATS, save_figure
from tltlab.config import faults_in
from tltlab.console import Json, emit, made_by, progress, progress_bar, table, whole_numbers
from tltlab.errors import ConfigError
from tltlab.files import check_writable, read_json
from tltlab.importers.sources import read
from tltlab.own import split
from tltlab.planning.graph_pool import GraphPool, sglang_sizes
from tltlab.traces.trace import Trace

from . import options

if TYPE_CHECKING:
    from tltlab.planning.graph_pool import GraphMemory
    from tltlab.sim.tuning.tune import TuneResult

_GIB = 2**30


def tune(
    traces: Annotated[list[Path], typer.Argument(help="Traces or RUN folders; with several, tuned on all of them.")],
    out: Annotated[Path, typer.Option(help="Where the policy file goes.")],
    costs: options.Costs = None,
    gpus: options.Gpus = None,
    model: options.Model = None,
    engine: options.Engine = None,
    tp: options.TensorParallel = None,
    acceptance: options.Acceptance = None,
    workers: options.Workers = None,
    placement: Annotated[
        str | None, typer.Option(help="As simulate's. [default: recorded where known, else contiguous]")
    ] = None,
    depths: Annotated[str, typer.Option(help="Draft depths to try, with commas between.")] = "1,2,4,8",
    drafters: Annotated[
        str | None, typer.Option(help="Drafters to try, with commas between. [default: those the acceptance knows]")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Further candidates, with commas between: shipped names, files, module:Class.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=LOW..HIGH", help="Tune this setting of --policies; or KEY=A|B|C. Repeatable."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="a:b, RL steps to judge on; the rest is tuned on. [default: every other one]")
    ] = None,
    max_buckets: Annotated[int, typer.Option(min=1, help="Most rows of a table and buckets of a bandit.")] = 4,
    trials: Annotated[int, typer.Option(min=0, help="Settings to try, of the bandit or --search; 0: none.")] = 40,
    rl_steps: Annotated[
        str | None,
        typer.Option(help="a:b, RL steps to use. [default: all of 24 or fewer, else a sample spread over the run]"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds that a sampled score is the mean of. [default: 3; of a sample of RL steps 1]"),
    ] = None,
    decision_block: Annotated[
        int | None,
        typer.Option(min=1, help="Iterations per decision. [default: 1; of long or many responses: cap / 256]"),
    ] = None,
    robust: Annotated[
        bool, typer.Option("--robust", help="Worst case over the traces and the cost error instead of the mean.")
    ] = False,
    cost_error: Annotated[
        float | None,
        typer.Option(help="With --robust: costs and chances of drafted tokens may be off by this share, such as 0.2."),
    ] = None,
    graph_memory: Annotated[float | None, typer.Option(help="GiB on each GPU that CUDA graphs may take.")] = None,
    graph_pool: Annotated[
        Path | None, typer.Option(help="With --graph-memory: the engine's pool, a JSON file of GraphPool's fields.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="With --graph-memory: the largest batch that is captured.")
    ] = 256,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the trials that an interrupted tune left in OUT.trials.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the trials' scores in their order: .png or .svg.")] = None,
    seed: options.Seed = 0,
    jobs: options.Jobs = None,
    as_json: Json = False,
) -> None:
    """Find a policy for a trace in simulation, judge it on RL steps held out, and report whether it was worth it.

    `simulate` and `train` take the file, export-policy turns it into settings of plain vLLM. Costs and acceptance are
    taken as right on all RL steps, save with --cost-error; `calibrate` and `verify` test whether they are.
    Until all is done the trials are in OUT.trials, a study that Optuna's own tools read too.

    Example: tltlab tune traces/subset-sum-small --out policy.json --trials 20
    """
    check_writable(out)
    journal = out.with_name(out.name + ".trials")
    if plot is not None and (plot.suffix not in FORMATS or not trials):
        raise ConfigError(f"--plot {plot}: it shows the settings that were tried (--trials), as {' or '.join(FORMATS)}")
    if journal.exists() and not resume:
        raise ConfigError(f"{journal} has the trials of an interrupted tune: continue with --resume, or remove it")
    sources = [read(path) for path in traces]
    draft_depths, graphs = whole_numbers("--depths", depths), _graphs(graph_memory, graph_pool, max_batch)
    from tltlab.sim.tuning.config import TuneConfig
    from tltlab.sim.tuning.tune import tune as run

    progress(f"tuning on {', '.join(str(s.manifest.name or p) for s, p in zip(sources, traces, strict=True))}")
    config = TuneConfig(
        costs=costs, acceptance=acceptance, workers=workers, placement=placement, decision_block=decision_block,
        seed=seed, depths=draft_depths, judge_steps=_steps("--judge", judge, sources),
        rl_steps=_steps("--rl-steps", rl_steps, sources), max_buckets=max_buckets,
        drafters=split(drafters) if drafters is not None else None, trials=trials,
        policies=policies or (), search=_searched(search or ()), repeats=repeats, robust=robust,
        cost_error=cost_error, jobs=jobs, graphs=graphs, gpus=gpus, model=model, engine=engine, tp=tp,
    )  # fmt: skip
    origin = made_by("numpy", "scipy", "simpy", "optuna") | {"paths": [str(path) for path in traces]}
    with ExitStack() as showing:
        showing.enter_context(options.counting())

        @cache
        def bar() -> Callable[[str], None]:
            """The bar of trials; up to the first trial simulations are counted."""
            showing.close()
            return showing.enter_context(progress_bar("trials", trials))

        result = run(
            sources, config, provenance=origin, done=lambda part: bar()(part), on_stage=progress, journal=journal
        )
    result.policy.write(out)
    if plot is not None:
        save_figure(result.history(), plot)
    journal.unlink(missing_ok=True)
    emit(result.json(str(out)), as_json=as_json, text=text(result, out))


def text(result: TuneResult, out: Path) -> str:
    """The result for people."""
    from tltlab.sim.cli.compare import DRAWS_ONLY
    from tltlab.sim.study.sweep import drafters_text, granted_text, speed_up_cells, speed_ups

    rows: list[tuple[str, ...]] = []
    for row in result.candidates:
        ends = {name: math.nan if value is None else value for name, value in asdict(row).items()}
        speed_up = speed_up_cells(speed_ups("speed_up", ends, "ratio"), "speed_up")
        bound = "" if row.regret_to_bound is None else f"{row.regret_to_bound:.1%}"
        name = row.name if len(row.name) <= 29 else row.name[:26] + "..."
        times = (f"{row.makespan_s:.4g}", *speed_up, f"{row.regret:.1%}", bound)
        rows.append((name, drafters_text(row.drafters), *times))
    rows += [
        ("per-iteration oracle", "", f"{result.oracle_s:.4g}"),
        ("clairvoyant, no noise", "", f"{result.bound_s:.4g}"),
    ]
    columns = ["policy", "drafters", "makespan s", "speed-up", "draws only", "regret", "to bound"]
    lines = [
        table(columns, rows, left=2),
        *filter(None, [granted_text([asdict(row) for row in result.candidates], "name")]),
        "",
        f"simulated, on RL steps held out; speed-up: over {result.best_fixed}, the best fixed strategy; {DRAWS_ONLY}; "
        "regret: to the per-iteration oracle, which knows costs and acceptance; to bound: to the clairvoyant bound",
        f"minimised: {result.policy.provenance['objective']}",
        f"verdict: {result.verdict}",
        f"{len(result.searched)} policies and {len(result.trials)} settings were searched; {result.wall_s:.0f} s",
        f"{result.name} -> {out}",
    ]
    if result.trials:
        settings = ", ".join(f"{name} {value}" for name, value in result.trials[0].settings.items())
        lines.insert(-1, f"tuned {result.tuned}: {settings}")
    return "\n".join(lines + [f"note: {note}" for note in result.notes])


def _searched(search: Sequence[str]) -> dict[str, str]:
    """Values of `--search` by setting; ConfigError for a setting without values, or that comes twice."""
    values: dict[str, str] = {}
    for text in search:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in values:
            raise ConfigError(f"--search {text}: give KEY=LOW..HIGH or KEY=A|B|C, each key once")
        values[key] = value
    return values


def _steps(option: str, text: str | None, sources: list[Trace]) -> list[int] | None:
    if text is None:
        return None
    try:
        return sorted({step for source in sources for step in parse_rl_steps(text, list(source.rl_steps)) or []})
    except ConfigError as error:
        raise ConfigError(str(error).replace("--rl-steps", option)) from error


def _graphs(memory: float | None, pool: Path | None, max_batch: int) -> GraphMemory | None:
    from tltlab.planning.graph_pool import GraphMemory

    if (memory is None) != (pool is None):
        raise ConfigError("--graph-memory and --graph-pool belong together: how much there is, and what graphs take")
    if memory is None or pool is None:
        return None
    if not 0.0 < memory < math.inf:
        raise ConfigError(f"--graph-memory is the GiB that graphs may take, above 0, got {memory:g}")
    value: Any = read_json(pool)
    with faults_in(pool):
        graph_pool = GraphPool.model_validate(value)
    return GraphMemory(pool=graph_pool, cap_bytes=memory * _GIB, max_batch=max_batch, sizes=sglang_sizes(max_batch))
