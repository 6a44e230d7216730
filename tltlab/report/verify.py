"""The part of a report that holds predictions against measurements, from the run's summary or computed anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tltlab.charts import scatter_identity
from tltlab.console import progress
from tltlab.errors import TltlabError
from tltlab.traces.trace import Trace

from .page import Absent, Paragraph, Part, Picture, Section, number, records

TITLE = "Predicted against measured"


def verify_part(run: Path, trace: Trace, summary: Mapping[str, Any], *, compute: bool) -> Part:
    """Every RL step predicted from the others: what `summary` has of it, else by `tltlab verify` where `compute`."""
    verification = summary.get("verify")
    if isinstance(verification, dict) and verification.get("steps"):
        try:
            return from_result(verification, "As the run wrote it (summary.json).")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return Absent(title=TITLE, reason=f"summary.json has it otherwise than tltlab writes it ({error})")
    if not compute:
        return Absent(title=TITLE, reason="left out by --no-verify")
    if trace.iterations is None or trace.steps is None or trace.manifest.kind != "recorded":
        return Absent(title=TITLE, reason="only a recorded run with iterations and steps can be predicted")
    progress(f"predicting {len(trace.rl_steps)} RL steps from the others (--no-verify leaves this out)")
    try:
        from tltlab.sim.verification.rollouts import verify

        return from_result(verify(trace, jobs=None).json(), "Computed for this page (tltlab verify).")
    except TltlabError as error:
        return Absent(title=TITLE, reason=str(error))
    except ModuleNotFoundError as error:
        return Absent(title=TITLE, reason=f"{error.name} is not installed: pip install 'tltlab[sim]'")


def from_result(verification: Mapping[str, Any], source: str) -> Part:
    """The part that a result of `tltlab verify --json` makes."""
    rows = verification["steps"]
    median, worst = verification.get("median_error"), verification.get("worst_error")
    spread = verification.get("repeat_spread")
    twice = (
        "No rollout was run twice, so what the machine itself varies by is not known."
        if spread is None
        else f"The same rollout run twice varies by {spread:.1%}."
    )
    text = (
        f"Rollout time of a step, predicted by simulation from costs and acceptance of other steps: median error "
        f"{number(median, '.1%')}, worst {number(worst, '.1%')}. {twice}"
    )
    policies = [str(row.get("policy") or "run") for row in rows]
    figure = scatter_identity(
        [row.get("measured_s") for row in rows], [row.get("predicted_s") for row in rows],
        labels=policies, xlabel="measured, s", ylabel="predicted (simulated), s", title="Rollout time of each RL step",
    )  # fmt: skip
    columns = {
        "rl_step": ("RL step", "d"), "policy": ("policy", ""), "measured_s": ("measured s", ".3f"),
        "predicted_s": ("predicted s", ".3f"), "error": ("error", "+.1%"), "step_time_ratio": ("step time", ".2f"),
        "forecast_s": ("forecast s", ".2f"), "forecast_low_s": ("10 %", ".2f"), "forecast_high_s": ("90 %", ".2f"),
    }  # fmt: skip
    caption = (
        "Step time: recorded iterations over those of the fit, how much slower the machine was. Forecast: from earlier "
        "RL steps alone, which knows neither lengths nor what is accepted."
    )
    return Section(
        title=TITLE,
        blocks=(
            Paragraph(text=text),
            Picture.of(
                figure, shape="square", alt=f"Predicted over measured rollout seconds of {len(rows)} RL steps: median "
                f"error {number(median, '.1%')}, worst {number(worst, '.1%')}.",
                caption=f"On the dashed line prediction and measurement agree. {source}",
            ),
            records(rows, columns, caption=caption, text=("policy",), summary="Every RL step"),
        ),
    )  # fmt: skip
