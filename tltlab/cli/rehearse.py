"""`tltlab rehearse`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.importers.sources import read_lengths
from tltlab.options import ALLOW_CODE_OPTION, command, option
from tltlab.own import code_allowed
from tltlab.rehearsal.settings import RehearsalConfig


@command
def rehearse(
    trace: Annotated[Path, typer.Argument(help="A trace, or lengths in any format that `what-if` takes.")],
    model: Annotated[str, typer.Option(help="A shape: a name such as Qwen2.5-7B, a config.json, or tiny-shape.")],
    config: RehearsalConfig,
    minutes: float | None = option("Plan what fits into so many, starts of engines included.", min=0.1),
    out: Path = option("A RUN; the same command goes on with what is not there yet.", Path("rehearsal")),
    allow_code: list[str] | None = ALLOW_CODE_OPTION,
) -> None:
    """Play a recorded rollout on a real engine, with a model's shape and no weights, under each policy.

    Lengths are forced and drafts are kept at given rates, so makespans are measured and need neither weights nor data.

    Example: tltlab rehearse traces/base-rl-16k --model tiny-shape --responses 32 --cap 256
    """
    # Two threads on a busy machine stall for seconds; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch takes seconds to import: --help should not wait for it.
    from tltlab.rehearsal.plan import plan_of
    from tltlab.rehearsal.result import judged
    from tltlab.rehearsal.run import rehearse as play

    with code_allowed(allow_code or ()):
        source = read_lengths(trace)
        plan = plan_of(source.trace, model, config)
        play(plan, out, minutes=minutes)
        result = judged(plan, out)
    lists = {"read": source.read, "ignored": source.ignored, "wrote": [str(out)]}
    emit(result.json() | {"out": str(out)}, result.text(lists))
