"""`tltlab compare`."""

from pathlib import Path
from typing import Annotated

import typer

from tltlab.charts import FORMATS, save_figure
from tltlab.console import emit, json_rows, made_by
from tltlab.errors import ConfigError, RunError
from tltlab.files import check_writable, write_file, write_json
from tltlab.importers.sources import read
from tltlab.options import ALLOW_CODE_OPTION, Option, Without, command, option, to_json
from tltlab.own import code_allowed
from tltlab.planning.systems import SYSTEMS
from tltlab.records import Json
from tltlab.sim.options import counting
from tltlab.sim.printed import comparison_text
from tltlab.sim.scenario import named_policies
from tltlab.sim.simulate import outside_text
from tltlab.sim.study.compare import POLICIES, StudyConfig
from tltlab.sim.study.compare import compare as run
from tltlab.sim.study.logged import logged_stages

SAMPLED = "a:b, RL steps a to b - 1; or one; or all. [default: of more than 24 a sample]"


@command
def compare(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder, or a file of lengths.")],
    config: Annotated[StudyConfig, Without(jobs=Option(default=None))],
    policies: str | None = option(
        "Names, drafts (ngram:4@8), files or package.module:Class, with commas between; the first is the "
        f"baseline. [default: {POLICIES}]"
    ),
    systems: str | None = option(
        f"Systems from the literature instead: all, or {','.join(SYSTEMS)}; verl is the baseline."
    ),
    out: Path | None = option(
        "Write .json (for `tltlab report`), .csv, or a picture; an interrupted comparison goes on."
    ),
    allow_code: list[str] | None = ALLOW_CODE_OPTION,
) -> None:
    """Compare policies, or systems from the literature, on the same responses; lists of values make a grid.

    Ratios have paired 95 % intervals over RL steps; regret is to a clairvoyant bound. On a grid, such as --workers 4,8
    --acceptance 0.5,0.7, speed-ups are over plain decoding at the same point. With --out each finished cell is kept in
    OUT.cells until all are done: the same command continues where it was interrupted, also with more values.

    Example: tltlab compare traces/tiny --systems all --stages cpu-small
    """
    check_writable(out, ".json", ".csv", *FORMATS)
    source = read(trace)
    journal = None if out is None else out.with_name(f"{out.name}.cells")
    with code_allowed(allow_code or ()), counting():
        chosen = None if systems is not None and policies is None else named_policies(policies or POLICIES)
        if systems is None and chosen is not None and len(chosen) < 2 and not config.axes:
            raise ConfigError(f"--policies {policies!r}: give at least two to compare, or a list for an option")
        found = run(source, chosen, config, systems=systems, journal=journal)
    (_, share), rows = logged_stages(source), json_rows(found)
    names = ("axes", "baseline", "num_rl_steps", "num_rl_steps_of", "num_workers", "num_gpus", "evidence",
             "outside_calibration", "costs", "acceptance", "failed", "left_out")  # fmt: skip
    result: Json = {"rows": rows, "figures": "simulated", **{key: found.attrs[key] for key in names}}
    result |= {
        "logged_rollout_share": share, "trace": source.manifest.name or str(trace), "settings": to_json(config),
        **made_by(),
    }  # fmt: skip
    if out is not None:
        if out.suffix == ".json":
            write_json(out, result)
        elif out.suffix == ".csv":
            write_file(out, found.drop(columns="claim", errors="ignore").to_csv(index=False))
        else:
            save_figure(found.plot(), out)
    lines = [comparison_text(found, rows, sampled=config.rl_steps is None)]
    evidence, outside = found.attrs["evidence"], outside_text(found.attrs["outside_calibration"])
    error = evidence["speedup_error"]
    more = "" if error is None else f", ratios of speculating to not by less than {error:.0%}"
    lines += [f"costs: {evidence['says']}{more}", *([f"extrapolated: {outside}"] if outside else [])]
    lines += [] if share is None else [f"the rollout is {share:.0%} of the RL step in the log"]
    lines += [f"failed: {label}: {why}" for label, why in found.attrs["failed"].items()]
    emit(result, "\n".join([*lines, *([] if out is None else [f"wrote {out}"])]))
    if found.attrs["failed"]:
        raise RunError(f"{len(found.attrs['failed'])} cells failed: {', '.join(found.attrs['failed'])}")
    if journal is not None:
        journal.unlink(missing_ok=True)
