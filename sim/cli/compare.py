"""`tltlab compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tltlab.charts import FORMATS, save_figure
from tltlab.console import AllowCode, Json, emit, json_rows, made_by, progress_bar, table
from tltlab.errors import ConfigError, RunError
from tltlab.files import write_file, write_json
from tltlab.importers.sources import read
from tltlab.options import Option, Without, command, to_json
from tltlab.own import code_allowed
from tltlab.planning.systems import SYSTEMS
from tltlab.sim.scenario import named_policies
from tltlab.sim.simulate import outside_text
from tltlab.sim.study.compare import POLICIES, StudyConfig
from tltlab.sim.study.compare import compare as run
from tltlab.sim.study.jobs import counted
from tltlab.sim.study.logged import logged_share
from tltlab.sim.study.reduce import DRAWS_ONLY, REGRET, Comparison, drafters_text, granted_text, speed_up_cells
from tltlab.sim.study.sample import sample_text

SAMPLED = "a:b, RL steps a to b - 1; or one; or all. [default: of more than 24 a sample]"
_ENDINGS = (".json", ".csv", *FORMATS)


@command
def compare(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder, or a file of lengths.")],
    config: Annotated[StudyConfig, Without(jobs=Option(default=None))],
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names, drafts (ngram:4@8), files or package.module:Class, with commas between; the first is the "
            f"baseline. [default: {POLICIES}]"
        ),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(help=f"Systems from the literature instead: all, or {','.join(SYSTEMS)}; verl is the baseline."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write .json (for `tltlab report`), .csv, or a picture; an interrupted comparison goes on."),
    ] = None,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Compare policies, or systems from the literature, on the same responses; lists of values make a grid.

    Ratios have paired 95 % intervals over RL steps; regret is to a clairvoyant bound. On a grid, such as --workers 4,8
    --acceptance 0.5,0.7, speed-ups are over plain decoding at the same point. With --out each finished cell is kept in
    OUT.cells until all are done: the same command continues where it was interrupted, also with more values.

    Example: tltlab compare traces/tiny --systems all --stages cpu-small
    """
    if out is not None and (out.is_dir() or out.suffix not in _ENDINGS):
        raise ConfigError(f"--out {out}: name a file that ends in {', '.join(_ENDINGS)}")
    source = read(trace)
    journal = None if out is None else out.with_name(f"{out.name}.cells")
    with code_allowed(allow_code or ()), progress_bar("simulation", None) as bar, counted(lambda: bar("")):
        chosen = None if systems is not None and policies is None else named_policies(policies or POLICIES)
        if systems is None and chosen is not None and len(chosen) < 2 and not config.axes:
            raise ConfigError(f"--policies {policies!r}: give at least two to compare, or a list for an option")
        found = run(source, chosen, config, systems=systems, journal=journal)
    share, rows = logged_share(source), json_rows(found)
    names = ("axes", "baseline", "num_rl_steps", "num_rl_steps_of", "num_workers", "num_gpus", "evidence",
             "outside_calibration", "costs", "acceptance", "failed")  # fmt: skip
    result: dict[str, Any] = {"rows": rows, "figures": "simulated", **{key: found.attrs[key] for key in names}}
    result |= {
        "logged_rollout_share": share, "trace": source.manifest.name or str(trace), "settings": to_json(config),
        **made_by("numpy", "scipy", "simpy"),
    }  # fmt: skip
    if out is not None:
        if out.suffix == ".json":
            write_json(out, result)
        elif out.suffix == ".csv":
            write_file(out, found.drop(columns="claim", errors="ignore").to_csv(index=False))
        else:
            save_figure(found.plot(), out)
    lines = [text(found, rows, sampled=config.rl_steps is None)]
    evidence, outside = found.attrs["evidence"], outside_text(found.attrs["outside_calibration"])
    error = evidence["speedup_error"]
    more = "" if error is None else f", ratios of speculating to not by less than {error:.0%}"
    lines += [f"costs: {evidence['says']}{more}", *([f"extrapolated: {outside}"] if outside else [])]
    lines += [] if share is None else [f"the rollout is {share:.0%} of the RL step in the log"]
    lines += [f"failed: {label}: {why}" for label, why in found.attrs["failed"].items()]
    emit(result, as_json=as_json, text="\n".join([*lines, *([] if out is None else [f"wrote {out}"])]))
    if found.attrs["failed"]:
        raise RunError(f"{len(found.attrs['failed'])} cells failed: {', '.join(found.attrs['failed'])}")
    if journal is not None:
        journal.unlink(missing_ok=True)


def text(found: Comparison, rows: Sequence[Mapping[str, Any]], *, sampled: bool) -> str:
    """Return the comparison for people, what was assumed below it; `sampled` if it chose its RL steps itself."""
    kind, attrs = found.compared, found.attrs
    whole = any(row.get("step_s") is not None for row in rows)
    shown = [_cells(row, kind, attrs["axes"], whole=whole) for row in rows]
    lines = [table(list(shown[0]), [list(cells.values()) for cells in shown], left=2 + len(attrs["axes"]))]
    lines += filter(None, [granted_text(rows, kind)])
    nums = [row.get("num_rl_steps", attrs["num_rl_steps"]) for row in rows]
    steps = sample_text(nums, attrs["num_rl_steps_of"], sampled=sampled)
    lines.append(f"simulated, {steps}; speed-up: over {attrs['baseline']}; {DRAWS_ONLY}; {REGRET}")
    notes: dict[str, list[str]] = {}
    for row in rows if kind == "system" else ():
        marked = [f"* {note}" for note in row["stand_ins"]] + [f"+ {note}" for note in row["defaults"]]
        marked += [] if row["lossless"] else ["not lossless"]
        marked += [] if row["runs_here"] is True else [str(row["runs_here"])]
        marked += (
            []
            if row["workers"] == attrs["num_workers"]
            else [f"generates on {row['workers']} workers, the others train"]
        )
        if row["length_bias"] != 1.0:
            marked.append(f"length of what is trained on over what is begun: {row['length_bias']:.2f}")
        for note in marked:
            notes.setdefault(note, []).append(row["system"])
    lines += [f"{note} ({', '.join(dict.fromkeys(names))})" for note, names in notes.items()]
    if kind == "system":
        lines.append("--json has each system's assumptions, source and claim, and the rest of its figures")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], kind: str, axes: Mapping[str, Any], *, whole: bool) -> dict[str, str]:
    """Return the cells of a row by column."""
    marks = "*" * bool(row.get("stand_ins")) + "+" * bool(row.get("defaults"))
    times, draws = speed_up_cells(row)
    cells = {kind: row[kind] + marks} | {name: str(row[name]) for name in axes}
    cells |= {"drafters": drafters_text(row["drafters"]), "rollout s": f"{row['makespan_s']:.4g}", "speed-up": times}
    if whole:
        times, draws = speed_up_cells(row, "step_speed_up")
        cells |= {"RL step s": f"{row['step_s']:.4g}", "speed-up ": times}
    cells["draws only"] = draws
    if kind == "system" and not whole:
        cells["tokens/s"] = f"{row['tokens_per_s_ratio']:.2f}x"
    return cells | {"regret": "" if row["regret"] is None else f"{row['regret']:.1%}"}
