"""`tltlab sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tltlab.calibration.api import parse_rl_steps
from tltlab.charts import FORMATS, save_figure
from tltlab.console import AllowCode, Json, emit, json_rows, made_by, progress, progress_bar, table, whole_numbers
from tltlab.errors import ConfigError
from tltlab.files import write_file, write_json
from tltlab.importers.sources import read
from tltlab.own import code_allowed, split
from tltlab.planning.systems import SYSTEMS, find_systems
from tltlab.sim.study.sample import sample_text
from tltlab.sim.study.sweep import drafters_text, granted_text, speed_up_cells
from tltlab.sim.config import SimulationConfig

from . import options

_ENDINGS = (".csv", ".json", *FORMATS)


def sweep(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder, or a file of lengths.")],
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names, drafts (ngram:4@8), files or package.module:Class, with commas between. [default: adaptive]"
        ),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help=f"Systems from the literature instead: all, or {','.join(SYSTEMS)}. With --gpus whole RL steps too."
        ),
    ] = None,
    workers: Annotated[str | None, typer.Option(help="Rollout workers, such as 1,2,4.")] = None,
    caps: Annotated[str | None, typer.Option(help="Caps that responses are cut at, such as 8192,16384.")] = None,
    group_sizes: Annotated[str | None, typer.Option(help="First samples of each prompt to keep, such as 4,8.")] = None,
    gpus: Annotated[str | None, typer.Option(help="In place of workers and costs, such as 4xH100,8xH100.")] = None,
    model: options.Model = None,
    engine: options.Engine = None,
    tp: options.TensorParallel = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="As simulate's, several: 0.5,0.7,0.85 of a token, or by drafter with ; between, such as "
            "learned=0.6,ngram=0.4;all=0.5."
        ),
    ] = None,
    costs: options.Costs = None,
    mode: options.Mode = "fluid",
    rl_steps: options.SampledRlSteps = None,
    decision_block: options.DefaultDecisionBlock = None,
    seed: options.Seed = 0,
    jobs: options.Jobs = None,
    out: Annotated[
        Path | None, typer.Option(help="Write .csv, .json, or .png or .svg (a heat map); an interrupted sweep goes on.")
    ] = None,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Simulate policies, or systems, at every combination of workers, caps, group sizes, GPUs and acceptance.

    The result is a table or a heat map. Speed-ups are over plain decoding at the same point. With --out each point is
    kept as it ends, in OUT.points, until all are done: the same command continues where it was interrupted, also with
    more values.

    Example: tltlab sweep traces/tiny --workers 1,2,4 --acceptance 0.5,0.7 --policies ngram:4,beg-mab --out sweep.csv
    """
    from tltlab.costs.deployment import GPUS, MODEL
    from tltlab.sim.study.grid import BASELINES, Axes
    from tltlab.sim.study.grid import sweep as run

    if out is not None and (out.is_dir() or out.suffix not in _ENDINGS):
        raise ConfigError(f"--out {out}: name a file that ends in {', '.join(_ENDINGS)}")
    if gpus is not None and costs is not None:
        raise ConfigError("--gpus bring their costs: leave out --costs")
    if gpus is None and any(option is not None for option in (model, engine, tp)):
        gpus = GPUS
    axes = Axes(
        workers=_numbers("--workers", workers), caps=_numbers("--caps", caps),
        group_sizes=_numbers("--group-sizes", group_sizes), gpus=tuple(split(gpus or "")),
        acceptance=tuple(split(acceptance or "", ";" if "=" in (acceptance or "") else ",")), model=model or MODEL,
        systems=() if systems is None else tuple(system.name for system in find_systems(systems)),
    )  # fmt: skip
    source = read(trace)
    config = SimulationConfig(
        costs=costs, mode=mode, seed=seed, rl_steps=parse_rl_steps(rl_steps, source.rl_steps),
        decision_block=options.decisions(decision_block, source, systems), engine=engine, tp=tp,
    )  # fmt: skip
    journal = None if out is None else out.with_name(out.name + ".points")
    with progress_bar("points", len(axes.points())) as done, code_allowed(allow_code or ()):
        grid = run(source, axes, policies, config, jobs=jobs, journal=journal, done=done)
    if grid.resumed:
        progress(f"{grid.resumed} points were done before")
    rows, swept = json_rows(grid.frame), [*axes.names, *(["systems"] if axes.systems else [])]
    result: dict[str, Any] = {
        "points": rows, "axes": {name: list(getattr(axes, name)) for name in swept}, "figures": "simulated",
        "trace": source.manifest.name or str(trace), "resumed": grid.resumed, "seed": seed,
        "num_rl_steps_of": grid.num_rl_steps_of,
        **made_by("numpy", "scipy", "simpy"),
    }  # fmt: skip
    if out is not None:
        if out.suffix == ".csv":
            write_file(out, grid.frame.to_csv(index=False))
        elif out.suffix == ".json":
            write_json(out, result)
        else:
            save_figure(grid.plot(), out)
    if journal is not None:
        journal.unlink(missing_ok=True)
    names = [*axes.names, axes.compared]
    whole = "step_s" in grid.frame
    cells = [
        (
            *(row[name] for name in names),
            drafters_text(row["drafters"]),
            f"{row['makespan_s']:.4g}",
            *([f"{row['step_s']:.4g}"] if whole else []),
            *speed_up_cells(row, "step_speed_up" if whole else "speed_up"),
        )
        for row in rows
    ]
    header = [*names, "drafters", "rollout s", *(["RL step s"] if whole else []), "speed-up", "draws only"]
    assumed = dict.fromkeys(f"{row[axes.compared]}: {row['assumed']}" for row in rows if row.get("assumed"))
    one = [] if "acceptance" in axes.names else [granted_text(rows, axes.compared, "granted")]
    nums = [row["num_rl_steps"] for row in rows]
    few = min(nums) < grid.num_rl_steps_of
    lines = [
        table(header, cells, left=len(names) + 1),
        *filter(None, one),
        f"speed-up: over plain decoding ({BASELINES[axes.compared]}) at the same point; all simulated",
        *assumed,
        *([f"simulated on {sample_text(nums, grid.num_rl_steps_of, sampled=rl_steps is None)}"] if few else []),
        *([] if out is None else [f"wrote {out}"]),
    ]
    emit(result, as_json=as_json, text="\n".join(lines))


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    return tuple(whole_numbers(option, text)) if text else ()
