"""Fits stage costs to a recorded run: its steps.parquet against the tokens of each RL step, and how well that holds.

The error is of RL steps left out of the fit, one at a time. It is compared with a constant, the median of the other
steps: where the fit is no better, noise hides any dependence of the stage on tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from tltlab import console
from tltlab.arrays import Floats
from tltlab.costs.stages import (
    STAGES,
    InferenceCosts,
    RewardCosts,
    StageCosts,
    StepWorkload,
    SyncCosts,
    TrainCosts,
    Trained,
    fit,
)
from tltlab.errors import TraceError
from tltlab.records import Json, frozen
from tltlab.stats import Interval, paired_interval
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .cross_validation import Learner, Predictor, held_out_predictions, relative_errors

Columns = Callable[[StepWorkload], dict[str, float]]
"""The factors of the terms of a stage."""
_TERMS = ("per_response_s", "per_token_s", "base_s", "per_pair_s")
"""The order in which terms are tried. The number of updates is not recorded, and so in the base."""
_HELD_OUT = ["measured_s", "predicted_s", "constant_s", "stage", "rl_step"]
_STEPS_PER_TERM = 2
"""A run of few RL steps has its stages fitted with few terms: at least this many steps to each."""
_ALWAYS = 2
"""Terms that a stage has where there are RL steps enough; a further one has to earn its place."""
_WORTH = 0.9
"""It stays where the left-out error falls below this share of what it was without."""


@frozen
class StageFit:
    """`fit_stages`'s result.

    `residuals` has a row per stage and one for their sum, "all": stage, num_steps, mean_s, the absolute relative errors
    of left-out RL steps `mean_error`, `median_error`, `worst_error`, the `bias` of their sum, and `constant_error`, the
    mean error of a constant. NaN where only one RL step is known.
    """

    costs: StageCosts
    residuals: pd.DataFrame

    def table(self) -> str:
        """Residuals for people."""
        columns = (
            "stage: {stage}; steps: {num_steps}; mean s: {mean_s:.4f}; error: {mean_error:.1%}; "
            "median: {median_error:.1%}; worst: {worst_error:.1%}; constant: {constant_error:.1%}"
        )
        return console.table_text(self.residuals, columns, left=1)


def fit_stages(trace: Trace) -> StageFit:
    """Fit each stage of `trace.steps` to what its RL steps worked on.

    Coefficients are non-negative and fitted to relative errors, outliers set aside (`tltlab.costs.samples`). A
    stage has tokens and a base; attention pairs join them where they lower the left-out error by a tenth. Training is
    fitted to all responses and to those of groups whose rewards differ, whichever errs less. These two choices are made
    with the same left-out RL steps that the residuals report. The number of updates is not recorded and is part of the
    base. A stage with no known time is None in the costs. Raises TraceError where no stage is known at all.
    """
    works, measured = _workloads(trace)
    columns: dict[str, Columns] = {
        "inference_s": InferenceCosts().columns,
        # A base is not identified apart from the responses in a run with as many responses in each RL step.
        "reward_s": lambda work: {"per_response_s": work.num_responses, "per_token_s": work.num_response_tokens},
        "train_s": TrainCosts().columns,
        "sync_s": lambda work: {"base_s": 1.0},
    }
    known = [stage for stage in STAGES if measured[stage].notna().any()]
    models = {stage: _fit_stage(stage, works, measured, columns[stage]) for stage in known}
    trains: Trained = "all"
    if "train_s" in models:
        informative = _fit_stage("train_s", works, measured, TrainCosts(trains="informative").columns)
        if relative_errors(informative[1]).mean() < relative_errors(models["train_s"][1]).mean():
            trains, models["train_s"] = "informative", informative
    if not models:
        raise TraceError(
            f"{trace.path or 'the trace'}: no stage of an RL step has a time in steps.parquet; a recorded run has"
        )
    terms: Json = {stage: models[stage][0] if stage in models else None for stage in STAGES}
    if terms["train_s"] is not None:
        terms["train_s"]["trains"] = trains
    costs = StageCosts(
        **{stage.removesuffix("_s"): of_stage for stage, of_stage in terms.items()},
        provenance=f"fitted to {len(works)} RL steps of {trace.manifest.name or trace.path or 'a trace'}"
        + (f" on {trace.manifest.hardware}" if trace.manifest.hardware else ""),
    )
    rows = pd.concat([held_out for _, held_out in models.values()], ignore_index=True)
    return StageFit(costs=costs, residuals=_residuals(rows))


def stage_table(seconds: pd.DataFrame, whole: pd.Series) -> pd.DataFrame:
    """Seconds by stage with "step", the whole RL step (the sum where `whole` is unknown), and "other", in no stage.

    `seconds` has a column for each stage ("rollout_s", ...) and, as `whole`, a row for each RL step. RL steps without
    any time are left out.
    """
    seconds = seconds.rename(columns=lambda name: name.removesuffix("_s")).dropna(axis=1, how="all")
    seconds = seconds[seconds.notna().any(axis=1)]
    summed = seconds.sum(axis=1)
    whole = whole.reindex(seconds.index).fillna(summed)
    return seconds.assign(other=(whole - summed).clip(lower=0.0), step=whole)


def measured_stages(steps: pd.DataFrame) -> pd.DataFrame:
    """The `stage_table` of a trace's `steps`. "wait" stands for "rollout" where rollouts continue during training."""
    rows = steps.set_index("rl_step").reindex(columns=["rollout_s", "wait_s", *STAGES, "step_s"]).astype(np.float64)
    rows["rollout_s"] = rows["rollout_s"].where(rows["wait_s"].isna())
    return stage_table(rows.drop(columns="step_s"), rows["step_s"])


def rollout_rows(stages: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Rows of a `stage_table` that time the rollout, or waiting for it, and the name of that column."""
    part = "rollout" if "rollout" in stages else "wait"
    return (stages[stages[part].notna()] if part in stages else stages[:0]), part


def rollout_share(stages: pd.DataFrame) -> Interval | None:
    """Share of the RL step that its rollout takes, with a 95 % interval over RL steps; None where that is not known."""
    rows, part = rollout_rows(stages)
    if rows.empty or not (rows["step"] - rows[part]).gt(0).any():
        return None
    return paired_interval(rows[part].to_numpy(), rows["step"].to_numpy())


def mean_stages(stages: pd.DataFrame, name: str) -> StageCosts:
    """Stage costs that are the mean seconds of a `stage_table`; what is in no stage counts as training."""
    rows, part = rollout_rows(stages)
    mean = rows.fillna(0.0).mean()
    inference, reward, sync = (float(mean.get(stage, 0.0)) for stage in ("inference", "reward", "sync"))
    train = max(float(mean["step"] - mean[part]) - inference - reward - sync, 0.0)
    return StageCosts(
        inference=InferenceCosts(base_s=inference), reward=RewardCosts(base_s=reward), train=TrainCosts(base_s=train),
        sync=SyncCosts(base_s=sync), provenance=f"mean seconds of {len(rows)} RL steps of {name}",
    )  # fmt: skip


def workloads(trace: Trace) -> dict[int, StepWorkload]:
    """Work of the stages of each RL step with outcomes; RL steps are read one by one."""
    works = {}
    for step in trace.iter_rl_steps():
        rows = step.workload.merge(step.outcomes, on=list(KEY), how="inner", sort=False)
        if len(rows):
            works[step.rl_steps[0]] = StepWorkload.of_rows(rows)
    return works


def _workloads(trace: Trace) -> tuple[dict[int, StepWorkload], pd.DataFrame]:
    steps = trace.steps
    if steps is None or steps.empty:
        raise TraceError(f"{trace.path or 'the trace'}: no steps.parquet, so no stage times to fit; record a run")
    works = workloads(trace)
    measured = steps.set_index("rl_step")[list(STAGES)].astype(np.float64)
    common = [s for s in measured.index if s in works]
    return {s: works[s] for s in common}, measured.loc[common]


def fit_terms(choices: Sequence[Sequence[str]], rows: pd.DataFrame) -> tuple[dict[str, float], pd.Series[float]]:
    """Multiples of columns that make up `measured_s`, as many as the RL steps bear and need, and left-out predictions.

    Each of `choices` has more terms than the one before it. It stays where there are `_STEPS_PER_TERM` RL steps to each
    term, and where it lowers the left-out error to less than the share `_WORTH`.
    """
    best, held_out = choices[0], held_out_predictions(_of_terms(choices[0]), rows)
    for terms in choices[1:]:
        if len(rows) < _STEPS_PER_TERM * len(terms):
            break
        further = held_out_predictions(_of_terms(terms), rows)
        errors = [relative_errors(rows.assign(predicted_s=predicted)).mean() for predicted in (further, held_out)]
        if errors[0] < _WORTH * errors[1]:
            best, held_out = terms, further
    return _fitted(best, rows), held_out


def _of_terms(terms: Sequence[str]) -> Learner:
    """Fits non-negative multiples of the columns `terms`."""
    return lambda rows: partial(multiples_s, _fitted(terms, rows))


def multiples_s(multiples: Mapping[str, float], rows: pd.DataFrame) -> Floats:
    """Seconds of rows as multiples of their columns."""
    return np.asarray(sum(value * rows[name].to_numpy() for name, value in multiples.items()), np.float64)


def constant(rows: pd.DataFrame) -> Predictor:
    """Predicts the median of the RL steps that it was fitted to."""
    median = float(np.median(rows["measured_s"]))
    return lambda asked: np.full(len(asked), median)


def _fitted(terms: Sequence[str], rows: pd.DataFrame) -> dict[str, float]:
    return fit({name: rows[name].to_numpy() for name in terms}, rows["measured_s"].to_numpy())


def _fit_stage(
    stage: str, works: Mapping[int, StepWorkload], measured: pd.DataFrame, columns: Columns
) -> tuple[dict[str, float], pd.DataFrame]:
    """Terms of a stage, as many as pay, and stage, rl_step, measured_s and left-out predictions of each RL step."""
    seconds = measured[stage].dropna()
    table = pd.DataFrame([columns(works[s]) for s in seconds.index], dtype=np.float64)
    terms = [name for name in _TERMS if name in table]
    rows = table.assign(stage=stage, rl_step=seconds.index, measured_s=seconds.to_numpy(np.float64))
    affordable = min(max(1, len(rows) // _STEPS_PER_TERM), len(terms))
    sizes = sorted({min(affordable, _ALWAYS), affordable})
    found, held_out = fit_terms([terms[:size] for size in sizes], rows)
    rows["constant_s"] = held_out_predictions(constant, rows)
    return found, rows.assign(predicted_s=held_out)[_HELD_OUT]


def _residuals(held_out: pd.DataFrame) -> pd.DataFrame:
    sums = held_out.groupby("rl_step", as_index=False)[["measured_s", "predicted_s", "constant_s"]].sum(min_count=1)
    residuals = []
    for stage, rows in [*held_out.groupby("stage", sort=False), ("all", sums)]:
        error = relative_errors(rows)
        residuals.append(
            {
                "stage": stage,
                "num_steps": len(rows),
                "mean_s": rows["measured_s"].mean(),
                "mean_error": error.mean(),
                "median_error": error.median(),
                "worst_error": error.max(),
                "bias": rows["predicted_s"].sum(min_count=1) / rows["measured_s"].sum() - 1.0,
                "constant_error": relative_errors(rows, "constant_s").mean(),
            }
        )
    return pd.DataFrame(residuals)
