"""`tltlab tune`."""

from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit, made_by
from tltlab.errors import ConfigError
from tltlab.files import check_writable
from tltlab.importers.sources import read
from tltlab.options import Option, Without, command, option, to_json
from tltlab.sim.options import counting
from tltlab.sim.printed import tuning_text
from tltlab.sim.tuning.tune import TuneConfig
from tltlab.sim.tuning.tune import tune as run


@command
def tune(
    traces: Annotated[list[Path], typer.Argument(help="Traces or RUN folders; with several, tuned on all of them.")],
    config: Annotated[TuneConfig, Without("mode", "spot", jobs=Option(default=None))],
    out: Annotated[Path, typer.Option(help="Where the policy file goes.")],
    resume: bool = option("Go on with the trials that an interrupted tune left in OUT.trials.", False),
) -> None:
    """Find a policy for a trace in simulation, judge it on RL steps held out, and report whether it was worth it.

    `simulate` and `train` take the file, export-policy turns it into settings of plain vLLM. Costs and acceptance are
    taken as right on all RL steps; `calibrate` and `verify` test whether they are.
    Until all is done the trials' scores are in OUT.trials.

    Example: tltlab tune traces/subset-sum-small --out policy.json --trials 20
    """
    check_writable(out)
    journal = out.with_name(out.name + ".trials")
    if journal.exists() and not resume:
        raise ConfigError(f"{journal} has the trials of an interrupted tune: continue with --resume, or remove it")
    sources = [read(path) for path in traces]
    origin = made_by() | {"paths": [str(path) for path in traces]}
    with counting() as stage:
        result = run(sources, config, provenance=origin, on_stage=stage, journal=journal)
    result.policy.write(out)
    journal.unlink(missing_ok=True)
    emit(result.json(str(out)) | {"settings": to_json(config)}, tuning_text(result, out))
