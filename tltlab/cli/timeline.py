"""`tltlab timeline`: a trace as a picture, or as a file for Perfetto."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tltlab.charts import FORMATS
from tltlab.console import emit
from tltlab.errors import ConfigError
from tltlab.files import check_writable
from tltlab.importers.sources import read
from tltlab.options import command, option
from tltlab.report.timeline import Size, write_perfetto
from tltlab.report.timeline import timeline as draw
from tltlab.traces.lanes import median_step


@command
def timeline(
    trace: Annotated[Path, typer.Argument(metavar="TRACE|RUN", help="A trace folder, or a run that has one.")],
    out: Path = option(".png, .svg or .pdf: a picture; .json: for ui.perfetto.dev.", Path("timeline.png")),
    rl_step: str | None = option("RL step; default: the one of median rollout time (json: all).", metavar="N|all"),
    compare: Path | None = option("A second trace, recorded or simulated, drawn below and aligned.", metavar="TRACE2"),
    size: Size = option("Of a page, of a paper's column (85 mm), or of a talk's slide.", "page"),
) -> None:
    """Draw what every worker did over time, and how many requests were running.

    Example: tltlab timeline runs/demo --out timeline.png --rl-step 3
    """
    check_writable(out, ".json", *FORMATS)
    traces = [read(path) for path in (trace, compare) if path is not None]
    step = _rl_step(rl_step)
    if out.suffix == ".json":
        chosen = step if step is not None else "all"
        write_perfetto(out, *traces, rl_step=chosen)
    else:
        chosen = step if step is not None else median_step(*traces)
        draw(*traces, rl_step=chosen, out=out, size=size)
    emit({"out": str(out), "rl_step": chosen}, f"wrote {out} (RL step {chosen})")


def _rl_step(text: str | None) -> int | Literal["all"] | None:
    if text is None or text == "all":
        return "all" if text else None
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--rl-step {text}: it must be a number or 'all'") from error
