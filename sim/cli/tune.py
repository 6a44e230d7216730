"""`tltlab tune`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import Json, emit, made_by, progress, progress_bar, table
from tltlab.errors import ConfigError
from tltlab.files import check_writable
from tltlab.importers.sources import read
from tltlab.options import Option, Without, command, to_json
from tltlab.sim.study.jobs import counted
from tltlab.sim.study.reduce import DRAWS_ONLY, REGRET, drafters_text, granted_text, speed_up_cells
from tltlab.sim.tuning.tune import TuneConfig, TuneResult
from tltlab.sim.tuning.tune import tune as run


@command
def tune(
    traces: Annotated[list[Path], typer.Argument(help="Traces or RUN folders; with several, tuned on all of them.")],
    config: Annotated[TuneConfig, Without("mode", "spot", jobs=Option(default=None))],
    out: Annotated[Path, typer.Option(help="Where the policy file goes.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the trials that an interrupted tune left in OUT.trials.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find a policy for a trace in simulation, judge it on RL steps held out, and report whether it was worth it.

    `simulate` and `train` take the file, export-policy turns it into settings of plain vLLM. Costs and acceptance are
    taken as right on all RL steps, save with --cost-error; `calibrate` and `verify` test whether they are.
    Until all is done the trials' scores are in OUT.trials.

    Example: tltlab tune traces/subset-sum-small --out policy.json --trials 20
    """
    check_writable(out)
    journal = out.with_name(out.name + ".trials")
    if journal.exists() and not resume:
        raise ConfigError(f"{journal} has the trials of an interrupted tune: continue with --resume, or remove it")
    sources = [read(path) for path in traces]
    progress(f"tuning on {', '.join(str(s.manifest.name or p) for s, p in zip(sources, traces, strict=True))}")
    origin = made_by("numpy", "scipy", "simpy", "optuna") | {"paths": [str(path) for path in traces]}
    with ExitStack() as showing:
        bar = showing.enter_context(progress_bar("simulation", None))
        showing.enter_context(counted(lambda: bar("")))

        @cache
        def trials() -> Callable[[str], None]:
            """Return the bar of trials; up to the first trial simulations are counted."""
            showing.close()
            return showing.enter_context(progress_bar("trials", config.trials))

        result = run(
            sources, config, provenance=origin, done=lambda part: trials()(part), on_stage=progress, journal=journal
        )
    result.policy.write(out)
    journal.unlink(missing_ok=True)
    emit(result.json(str(out)) | {"settings": to_json(config)}, as_json=as_json, text=text(result, out))


def text(result: TuneResult, out: Path) -> str:
    """Return the result for people."""
    rows: list[tuple[str, ...]] = []
    for row in result.candidates:
        ratio = {"": row.ratio, "_low": row.ratio_high, "_high": row.ratio_low}
        speed_up = speed_up_cells({f"speed_up{end}": value and 1.0 / value for end, value in ratio.items()})
        regret = "" if row.regret is None else f"{row.regret:.1%}"
        name = row.name if len(row.name) <= 29 else row.name[:26] + "..."
        rows.append((name, drafters_text(row.drafters), f"{row.makespan_s:.4g}", *speed_up, regret))
    rows += [
        ("per-iteration oracle", "", f"{result.oracle_s:.4g}"),
        ("clairvoyant bound", "", f"{result.bound_s:.4g}"),
    ]
    lines = [
        table(["policy", "drafters", "makespan s", "speed-up", "draws only", "regret"], rows, left=2),
        *filter(None, [granted_text([asdict(row) for row in result.candidates], "name")]),
        "",
        f"simulated, on RL steps held out; speed-up: over {result.best_fixed}, the best fixed strategy; {DRAWS_ONLY}; "
        f"{REGRET}",
        f"minimised: {result.policy.provenance['objective']}",
        f"verdict: {result.verdict}",
    ]
    if (gain := result.placement_gain - 1) >= 0.005:
        lines.append(f"placement by expected lengths would make it {gain:.0%} faster still")
    if result.trials:
        settings = ", ".join(f"{name} {value}" for name, value in result.trials[0].settings.items())
        lines.append(f"tuned {result.tuned}: {settings}")
    counts = f"{len(result.searched)} policies and {len(result.trials)} settings were searched"
    lines += [f"{counts}; {result.wall_s:.0f} s", f"{result.name} -> {out}"]
    return "\n".join(lines + [f"note: {note}" for note in result.notes])
