"""Fits the rates and pauses of drafter training on idle workers to spot_training.parquet: ratios and medians.

Rows of one RL step and term are a group, whose updates are rate * (its own training seconds + efficiency * those of
who trained next to it), "it" being the member that trained longest.
"""

import numpy as np
import pandas as pd

from tltlab import console
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.traces.trace import Trace

_SIZES = 0.05
"""Groups whose mean numbers of others differ by less are of one size."""


@frozen
class SpotFit:
    """`fit_spot`'s result.

    `residuals` has a row per RL step with training: rl_step, num_periods, train_s (worker-seconds in updates), updates
    (the drafter's), predicted_updates for the recorded training seconds by the fit, and error (predicted / recorded -
    1). `notes` lists the terms that keep their default, and why.
    """

    model: SpotTraining
    residuals: pd.DataFrame
    notes: tuple[str, ...]

    def table(self) -> str:
        """Residuals for people."""
        columns = (
            "RL step: {rl_step}; periods: {num_periods}; train s: {train_s:.2f}; updates: {updates}; "
            "by the fit: {predicted_updates:.1f}; error: {error:+.1%}"
        )
        return console.table_text(self.residuals, columns, left=0)


def fit_spot(trace: Trace) -> SpotFit:
    """Fit `SpotTraining` to the trace's spot_training.parquet.

    A term that the table does not identify keeps its default, with a note. The table does not identify how long an
    optimizer step alone takes (part of the rate), nor what limits training but time: `carried_share`.
    `scaling_efficiency` counts updates, not tokens, and `checkpoint_every` is somewhat large: what periods trained
    after their last whole one counts too. Raises ConfigError for a trace without the table, and for one without a
    single update.
    """
    table = trace.spot_training
    place = trace.path or "the trace"
    if table is None or table.empty:
        raise ConfigError(
            f"{place} has no spot_training.parquet to fit spot training to: record a run that trains its drafter"
        )
    # A killed trainer's row has only the times at which it held its device.
    rows = table[(table["duration"] > 0) & (table["ended"] != "killed")]
    if not (rows["updates"] > 0).any():
        raise ConfigError(f"{place}: no training period completed an update, so the speed of training is unknown")
    periods = _periods(rows)
    rate, efficiency = _rate(periods)
    start_s, join_s = _pauses(rows)
    updates, tokens, checkpoints = (float(rows[name].sum()) for name in ("updates", "tokens", "checkpoints"))
    # The last one of a period is written because it ends.
    between = checkpoints - float((rows["checkpoints"] > 0).sum())
    samples = max(1, round(float(rows["sequences"].sum()) / updates))
    terms = {
        "scaling_efficiency": efficiency,
        "sample_tokens": tokens / updates / samples if tokens else np.nan,
        "start_s": start_s,
        "join_s": join_s,
        "checkpoint_every": max(1, round(updates / between)) if between else np.nan,
        "checkpoint_s": float(rows["blocked_s"].sum()) / checkpoints if checkpoints else np.nan,
        "yield_s": float(rows.loc[rows["ended"] == "stopped", "yield_s"].mean()),
    }
    known = {name: value for name, value in terms.items() if np.isfinite(value)}
    notes = [f"{name} keeps its default: the table does not identify it" for name in terms if name not in known]
    held_s, wait_s = float(rows["duration"].sum()), float(rows["wait_s"].sum())
    if wait_s > 0.05 * held_s:
        notes.append(
            f"{wait_s / held_s:.0%} of the time in training was spent waiting for data: what limits it is not in the "
            f"table, and the model does not foresee it"
        )
    rates = {"samples_per_s": samples * rate, "samples_per_update": samples}
    model = SpotTraining.model_validate(rates | known)
    return SpotFit(model=model, residuals=_residuals(periods, rate, model.scaling_efficiency), notes=tuple(notes))


def recorded_updates(table: pd.DataFrame) -> dict[int, int]:
    """Updates of the drafter in each RL step of spot_training.parquet: those of a group count once."""
    per_period = table.groupby(["rl_step", "term"], as_index=False)["updates"].max()
    per_step = per_period.groupby("rl_step", as_index=False)["updates"].sum()
    return {int(step): int(n) for step, n in zip(per_step["rl_step"], per_step["updates"], strict=True)}


def _periods(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per group: its `updates`, `train_s` of its longest member and `others_s`, that of all others together."""
    by = rows.groupby(["rl_step", "term"], as_index=False)
    periods = by.agg(train_s=("train_s", "max"), total_s=("train_s", "sum"), updates=("updates", "max"))
    return periods.assign(others_s=periods["total_s"] - periods["train_s"])


def _rate(periods: pd.DataFrame) -> tuple[float, float]:
    """Updates per second of one worker, and `scaling_efficiency`: least squares, weighted as counts are.

    The efficiency is NaN, and the rate the one at its default, where all groups were of one size on average.
    """
    trained = periods[periods["train_s"] > 0]
    if trained["updates"].sum() <= 0:
        raise ConfigError("spot_training.parquet has updates, but no seconds of training that they took")
    seconds, updates = trained[["train_s", "others_s"]].to_numpy(np.float64), trained["updates"].to_numpy(np.float64)
    if np.ptp(seconds[:, 1] / seconds[:, 0]) > _SIZES:
        weight = 1.0 / np.sqrt(seconds[:, 0])
        alone, beside = np.linalg.lstsq(weight[:, None] * seconds, weight * updates)[0].tolist()
        if alone > 0:
            efficiency = min(max(beside / alone, 0.0), 1.0)
            return float(updates.sum() / (seconds @ [1.0, efficiency]).sum()), efficiency
    return float(updates.sum() / (seconds @ [1.0, SpotTraining().scaling_efficiency]).sum()), np.nan


def _pauses(rows: pd.DataFrame) -> tuple[float, float]:
    """`start_s` and `join_s`, NaN if no member joined: a later member pauses the group, and itself, for `join_s`."""
    come = rows.groupby(["rl_step", "term"])["t_start"]
    joined = come.rank(method="dense") - 1
    later = come.rank(method="dense", ascending=False) - 1
    opens = joined == 0
    join_s = float((rows["setup_s"] / (1 + later))[~opens].median())
    start_s = float((rows["setup_s"] - np.nan_to_num(join_s) * later)[opens].median())
    return max(0.0, start_s), join_s


def _residuals(periods: pd.DataFrame, rate: float, efficiency: float) -> pd.DataFrame:
    sums = periods.groupby("rl_step")[["train_s", "others_s", "total_s", "updates"]].sum()
    predicted = rate * (sums["train_s"] + efficiency * sums["others_s"])
    return pd.DataFrame(
        {
            "num_periods": periods.groupby("rl_step").size(),
            "train_s": sums["total_s"],
            "updates": sums["updates"],
            "predicted_updates": predicted,
            "error": predicted / sums["updates"].where(sums["updates"] > 0) - 1.0,
        }
    ).reset_index()
