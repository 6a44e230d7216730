"""Whole RL steps of a training log from earlier ones: the predicted rollout and the time outside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tltlab.calibration.stages import measured_stages, rollout_rows, rollout_share, workloads
from tltlab.traces.trace import Trace

from .training_log import FEWEST, LogVerification, StepColumns

TERMS = (("base_s",), ("base_s", "per_token_s"))
"""Terms of the time outside a rollout: a constant and, where it lowers the left-out error, a time per token."""


@dataclass(frozen=True, kw_only=True)
class WholeSteps:
    """Predictions of whole RL steps and of rollouts of a log.

    Columns of `rows`: `rl_step`, `measured_s`, `predicted_s`, `error`. Empty where the log does not time whole RL
    steps. `share` is the rollout's of the RL step, None where that is not known.
    """

    rows: pd.DataFrame
    rollouts: pd.DataFrame | None
    share: float | None

    def json(self) -> dict[str, Any]:
        """The keys that whole RL steps add to `tltlab verify --json` for a log."""
        return {
            "rollout": _errors(self.rollouts),
            "step": _errors(self.rows),
            "rollout_share": self.share,
            "whole_steps": json.loads(self.rows.to_json(orient="records")),
        }

    def text(self) -> str:
        """A line for people; empty where there are no errors to report."""
        errors = _errors(self.rows)
        if errors is None:
            return ""
        share = "" if self.share is None else f"; the rollout is {self.share:.0%} of the RL step"
        return (
            f"whole RL steps from earlier ones: mean error {errors['mean_error']:.1%}, worst "
            f"{errors['worst_error']:.1%}, {errors['num_steps']} RL steps{share}"
        )


def whole_steps(trace: Trace, log: LogVerification, window: int) -> WholeSteps:
    """Predict the RL steps that `log` predicts the rollouts of, with the `window` before each.

    The time outside a rollout is fitted to earlier RL steps and this one's tokens. Where rollouts continue beside
    training the RL step as a whole is.
    """
    predicted = log.rows[["rl_step", "measured_s", "predicted_s", "error"]]
    steps = trace.steps
    assert steps is not None
    table = measured_stages(steps)
    found = rollout_share(table)
    share = None if found is None else found.estimate
    if log.unit != "rollout":
        return WholeSteps(rows=predicted, rollouts=None, share=share)
    rows, part = rollout_rows(table)
    timed = steps.reindex(columns=["rl_step", "step_s"]).dropna()
    rows = rows[rows.index.isin(timed["rl_step"])]
    works = workloads(trace)
    beside = rows["step"] - (rows[part] if part == "rollout" else 0.0)
    columns = pd.DataFrame({"rl_step": rows.index, "measured_s": beside.to_numpy(np.float64), "base_s": 1.0})
    columns["per_token_s"] = [float(works[step].num_tokens) for step in rows.index]
    columns = columns[columns["measured_s"] > 0]
    stages = StepColumns(rows=columns, terms=TERMS, workers=1, accept_length=pd.Series(dtype=np.float64))
    whole = []
    for _, rollout in predicted.iterrows():
        rl_step = int(rollout["rl_step"])
        earlier = columns[columns["rl_step"] < rl_step].tail(window)
        current = columns[columns["rl_step"] == rl_step]
        if len(earlier) < FEWEST or current.empty:
            continue
        estimator, _ = stages.fit(earlier)
        own = float(rollout["predicted_s"]) if part == "rollout" else 0.0
        measured_s, predicted_s = float(rows["step"].loc[rl_step]), own + float(estimator.predict(current)[0])
        error = predicted_s / measured_s - 1
        whole.append({"rl_step": rl_step, "measured_s": measured_s, "predicted_s": predicted_s, "error": error})
    return WholeSteps(rows=pd.DataFrame(whole, columns=predicted.columns), rollouts=predicted, share=share)


def _errors(rows: pd.DataFrame | None) -> dict[str, float] | None:
    if rows is None or rows.empty:
        return None
    error = rows["error"].abs()
    return {"mean_error": float(error.mean()), "worst_error": float(error.max()), "num_steps": len(rows)}
