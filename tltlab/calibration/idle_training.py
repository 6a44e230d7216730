"""Fits the rates and pauses of drafter training on idle workers to spot_training.parquet, and says how they hold.

Rows of one RL step and term are a group: who was in it when follows from their times. A member's updates are those of
its group while it was in it, so that updates = rate * (training seconds + efficiency * (others training beside it)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from tltlab import console
from tltlab.arrays import Floats
from tltlab.coordination.progress import SpotTraining
from tltlab.errors import ConfigError
from tltlab.traces.trace import Trace

from .cross_validation import cross_validated, each_left_out

_ROUND = (1000, 500, 100, 50, 25, 10, 5, 2, 1)
"""People set round numbers: of several that explain the data, one that the largest of these divides."""
_ALONE = 0.05
"""Up to this many others beside it on average a row counts as one of a single worker."""


@dataclass(frozen=True, kw_only=True)
class SpotFit:
    """`fit_spot`'s result.

    `residuals` has a row per RL step with training: rl_step, num_periods, train_s (worker-seconds in updates), updates
    (the drafter's), predicted_updates for the recorded training seconds by the fit to the other RL steps, and error
    (predicted / recorded - 1); NaN with one RL step only. `notes` says what keeps its default, and why.
    """

    model: SpotTraining
    residuals: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def median_error(self) -> float | None:
        """Median absolute error over RL steps left out of the fit; None where there is one only."""
        errors = self.residuals["error"].abs().dropna()
        return float(errors.median()) if len(errors) else None

    def table(self) -> str:
        """Residuals for people."""
        header = ["RL step", "periods", "train s", "updates", "predicted", "error"]
        rows = []
        for row in self.residuals.to_dict("records"):
            prediction = (
                ("", "") if np.isnan(row["error"]) else (f"{row['predicted_updates']:.1f}", f"{row['error']:+.1%}")
            )
            rows.append((row["rl_step"], row["num_periods"], f"{row['train_s']:.2f}", row["updates"], *prediction))
        return console.table(header, rows, left=0)


def fit_spot(trace: Trace) -> SpotFit:
    """Fit `SpotTraining` to the trace's spot_training.parquet.

    What a term needs and the table lacks leaves it at its default, with a note. The table does not tell how long an
    optimizer step alone takes (part of the rate), what padding would cost (the factor stays TLT's), nor what
    limits training but time: `carried_share`, `max_epochs`. `scaling_efficiency` counts updates, not tokens. Raises
    ConfigError for a trace without the table, and for one without a single update.
    """
    table = trace.spot_training
    place = trace.path or "the trace"
    if table is None or table.empty:
        raise ConfigError(
            f"{place} has no spot_training.parquet to fit spot training to: record a run that trains its drafter"
        )
    rows = _beside(table)
    if not (rows["updates"] > 0).any():
        raise ConfigError(f"{place}: no training period came to an update, so nothing tells how fast training is")
    model, notes = _fit(rows)
    return SpotFit(model=model, residuals=_residuals(rows), notes=tuple(notes))


def recorded_updates(table: pd.DataFrame) -> dict[int, int]:
    """Updates of the drafter in each RL step of spot_training.parquet: those of a group count once."""
    per_period = table.groupby(["rl_step", "term"], as_index=False)["updates"].max()
    per_step = per_period.groupby("rl_step", as_index=False)["updates"].sum()
    return {int(step): int(n) for step, n in zip(per_step["rl_step"], per_step["updates"], strict=True)}


def _beside(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that held a device, with `opens` (first of their period), `changes` of the group while they were in it, and
    `others`: how many trained beside them on average.

    A killed trainer's row tells when it held its device and little else: it opens nothing where another row does.
    """
    rows = table[table["duration"] > 0].reset_index(drop=True)
    opens = np.zeros(len(rows), bool)
    changes, num_beside = np.zeros(len(rows), np.int64), np.zeros(len(rows))
    for _, period in rows.groupby(["rl_step", "term"]):
        at = period.sort_values(["t_start", "worker"], kind="stable").index.to_numpy()
        start = rows["t_start"].to_numpy()[at]
        end = start + rows["duration"].to_numpy()[at]
        ready = np.minimum(start + rows["setup_s"].to_numpy()[at], end)
        opens[next((row for row in at if rows["ended"][row] != "killed"), at[0])] = True
        moments = np.unique(np.concatenate([start, end]))
        for i, row in enumerate(at):
            changes[row] = int(((moments > start[i]) & (moments < end[i])).sum())
            shared = np.minimum(end, end[i]) - np.maximum(ready, ready[i])
            shared[i] = 0.0
            training_s = end[i] - ready[i]
            num_beside[row] = float(np.maximum(shared, 0.0).sum() / training_s) if training_s > 0 else 0.0
    return rows.assign(opens=opens, changes=changes, others=num_beside)


def _fit(rows: pd.DataFrame) -> tuple[SpotTraining, list[str]]:
    notes: list[str] = []
    rate, efficiency = _rate(rows, notes)
    samples, tokens = _update(rows, notes)
    default = SpotTraining()
    start_s, join_s = _pauses(rows, default, notes)
    model = SpotTraining(
        padded_samples_per_s=samples * rate / default.packing_factor,
        scaling_efficiency=efficiency,
        samples_per_update=samples,
        sample_tokens=tokens / samples,
        start_s=start_s,
        join_s=join_s,
        checkpoint_every=_checkpoint_every(rows, default, notes),
        checkpoint_s=_checkpoint_s(rows, default, notes),
        yield_s=_yield_s(rows, default, notes),
    )
    held_s, wait_s = float(rows["duration"].sum()), float(rows["wait_s"].sum())
    if wait_s > 0.05 * held_s:
        notes.append(
            f"{wait_s / held_s:.0%} of the time in training was spent waiting for data: what limits it is not in the "
            f"table, and the model does not foresee it"
        )
    return model, notes


def _rate(rows: pd.DataFrame, notes: list[str]) -> tuple[float, float]:
    """Updates per second of one worker, and `scaling_efficiency`: weighted least squares, as of counts."""
    training = rows[rows["train_s"] > 0]
    alone = training["train_s"].to_numpy(np.float64)
    beside = alone * training["others"].to_numpy(np.float64)
    updates = training["updates"].to_numpy(np.float64)
    if not len(alone) or updates.sum() <= 0:
        raise ConfigError("spot_training.parquet has updates, but no seconds of training that they took")
    aa, ab, bb = alone.sum(), beside.sum(), float((beside**2 / alone).sum())
    ua, ub = updates.sum(), float((updates * beside / alone).sum())
    determinant = aa * bb - ab * ab
    if determinant <= 1e-3 * aa * max(bb, aa * _ALONE**2):
        efficiency = SpotTraining().scaling_efficiency
        notes.append(
            "scaling_efficiency keeps its default: "
            + ("no workers trained together" if bb <= aa * _ALONE**2 else "all training was in groups of one size")
        )
    else:
        efficiency = float((aa * ub - ab * ua) / max(bb * ua - ab * ub, 1e-12))
        if not 0.0 <= efficiency <= 1.0:
            notes.append(f"scaling_efficiency: the data say {efficiency:.2f}, the model takes 0 to 1")
            efficiency = float(np.clip(efficiency, 0.0, 1.0))
    seconds = alone + efficiency * beside
    return float((updates * seconds / alone).sum() / (seconds**2 / alone).sum()), efficiency


def _update(rows: pd.DataFrame, notes: list[str]) -> tuple[int, float]:
    """Samples of an update, as a whole number, and its tokens: those of one worker that trains alone."""
    training = rows[rows["updates"] > 0]
    updates, group_size = training["updates"].to_numpy(np.float64), 1.0 + training["others"].to_numpy(np.float64)
    shared = _is_shared(training["tokens"].to_numpy(np.float64) / updates, group_size, updates)
    size = 1.0 / group_size if shared else 1.0
    if np.ndim(size) == 0 and (group_size > 1.0 + _ALONE).any():
        notes.append(
            "each member trains tokens of its own: a larger group trains more tokens in an update and, unless "
            "scaling_efficiency says so, not more updates; the model's tokens are those of one worker"
        )
    whole_updates = float((updates * size).sum())
    samples, tokens = (float(training[name].sum()) / whole_updates for name in ("sequences", "tokens"))
    whole = max(1, round(samples))
    if tokens <= 0:
        notes.append("sample_tokens keeps its default: the table counts no tokens")
        return whole, whole * SpotTraining().sample_tokens
    return whole, tokens


def _is_shared(tokens: Floats, group_size: Floats, weight: Floats) -> bool:
    """Whether members share the tokens of an update, which falls with the group's size then, or have their own."""
    errors = []
    for shape in (np.ones(len(tokens)), 1.0 / group_size):
        level = float((weight * tokens * shape).sum() / (weight * shape**2).sum())
        errors.append(float((weight * (tokens - level * shape) ** 2).sum()))
    return errors[1] < 0.5 * errors[0]


def _pauses(rows: pd.DataFrame, default: SpotTraining, notes: list[str]) -> tuple[float, float]:
    """`start_s` and `join_s`: whoever joins a group pauses for that and for every later change, who opens it starts."""
    alive = rows[rows["ended"] != "killed"]
    openers, joiners = alive[alive["opens"]], alive[~alive["opens"]]
    if openers.empty:
        notes.append("start_s and join_s keep their defaults: every period was killed")
        return default.start_s, default.join_s
    if joiners.empty:
        notes.append("join_s keeps its default: no worker joined another's group")
        return float(openers["setup_s"].median()), default.join_s
    join_s = float((joiners["setup_s"] / (1 + joiners["changes"])).median())
    return max(0.0, float((openers["setup_s"] - join_s * openers["changes"]).median())), join_s


def _checkpoint_s(rows: pd.DataFrame, default: SpotTraining, notes: list[str]) -> float:
    saving = rows[rows["checkpoints"] > 0]
    if saving.empty:
        notes.append("checkpoint_s keeps its default: no checkpoint was written")
        return default.checkpoint_s
    return float(saving["blocked_s"].sum()) / float(saving["checkpoints"].sum())


def _checkpoint_every(rows: pd.DataFrame, default: SpotTraining, notes: list[str]) -> int | None:
    """The number of updates that explains the checkpoints of whole periods best; the last one is written at the end."""
    whole = rows[rows["opens"] & (rows["updates"] > 0)]
    updates, checkpoints = whole["updates"].to_numpy(np.int64), whole["checkpoints"].to_numpy(np.int64)
    # Whoever is not killed saves at the end what it has not saved yet.
    saves = (whole["ended"] != "killed").to_numpy()
    most = int(updates.max(initial=0))
    if not (checkpoints > saves).any():
        if default.checkpoint_every is not None and most >= default.checkpoint_every:
            notes.append("checkpoint_every is None: the only checkpoints are those at the end of a period")
            return None
        notes.append(f"checkpoint_every keeps its default: no period of up to {most} updates tells more")
        return default.checkpoint_every
    tried = np.arange(1, most + 1)
    expected = updates // tried[:, None] + (saves & (updates % tried[:, None] > 0))
    errors = np.abs(expected - checkpoints).sum(axis=1)
    best = tried[errors == errors.min()]
    if len(best) > 1:
        notes.append(f"checkpoint_every: anything from {best[0]} to {best[-1]} agrees with the checkpoints written")
    roundest = max(best.tolist(), key=lambda every: next(step for step in _ROUND if every % step == 0))
    return int(roundest)


def _yield_s(rows: pd.DataFrame, default: SpotTraining, notes: list[str]) -> float:
    yields = rows.loc[(rows["ended"] == "stopped") & rows["yield_s"].notna(), "yield_s"]
    if yields.empty:
        notes.append("yield_s keeps its default: no row tells how long a worker took to stop")
        return default.yield_s
    return float(yields.mean())


class RateEstimator:
    """Updates of an RL step by its training seconds; learned: `rate_` per worker and second, and `efficiency_`."""

    def fit(self, rows: pd.DataFrame) -> Self:
        self.rate_, self.efficiency_ = _rate(rows, [])
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        """One number per RL step: whoever opens a period trains its updates."""
        openers = rows[rows["opens"]]
        train_s = openers["train_s"] * (1.0 + self.efficiency_ * openers["others"])
        steps = [train_s[openers["rl_step"] == step] for step in np.sort(rows["rl_step"].unique())]
        return np.array([float(of_step.sum()) * self.rate_ for of_step in steps])


def _residuals(rows: pd.DataFrame) -> pd.DataFrame:
    """Each RL step's updates from its own training seconds and the rates of the other steps."""
    predicted: dict[int, float] = {}
    for fold, result in cross_validated(RateEstimator(), each_left_out(rows, "rl_step")):
        if not isinstance(result, ConfigError):
            predicted[int(fold.test["rl_step"].iloc[0])] = float(result[0])
    residuals = []
    for step, updates in recorded_updates(rows).items():
        of_step = rows[rows["rl_step"] == step]
        residuals.append(
            {
                "rl_step": step,
                "num_periods": int(of_step["opens"].sum()),
                "train_s": float(of_step["train_s"].sum()),
                "updates": updates,
                "predicted_updates": (foreseen := predicted.get(step, np.nan)),
                "error": foreseen / updates - 1.0 if updates else np.nan,
            }
        )
    return pd.DataFrame(residuals)
