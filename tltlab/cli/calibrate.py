"""`tltlab calibrate`: costs, acceptance, stages and drafter training from a trace; costs from a table."""

from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.files import sealed, write_json
from tltlab.options import command
from tltlab.sim.fits import CalibrateConfig, fit_all


@command
def calibrate(
    source: Annotated[
        Path,
        typer.Argument(help="A recorded trace, RUN folder or training log; or a .csv or .parquet of iterations."),
    ],
    config: CalibrateConfig,
) -> None:
    """Fit costs, acceptance and drafter training to a trace, costs to a table; print residuals and held-out errors.

    A table has the columns batch, tokens_to_verify, context_tokens (of the whole batch) and seconds; draft_depth
    and prefill_tokens where not 0. For a training log a level of iterations and a time outside of them
    are fitted to rollout times.

    Example: tltlab calibrate run/trace --out run/costs.json
    """
    fits, outs = fit_all(source, config)
    for name, model in fits.models().items():
        if model is not None and (path := outs[name]) is not None:
            write_json(path, sealed(model.model_dump(mode="json")))
    emit(fits.json(outs), fits.text())
