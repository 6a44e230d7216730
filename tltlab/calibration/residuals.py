"""How far a fitted cost model is from iterations: those it was fitted to, regime by regime, and those left out."""

import numpy as np
import pandas as pd

from tltlab import console
from tltlab.arrays import Floats
from tltlab.costs.samples import BANDS, REGIMES, Iterations, band


def _band_name(band: int) -> str:
    low = BANDS[band - 1] + 1 if band else 1
    if band == len(BANDS) - 1:
        return f"batch {low}+"
    return f"batch {low}" if low == BANDS[band] else f"batch {low}-{BANDS[band]}"


def residuals(iterations: Iterations, predicted: Floats) -> pd.DataFrame:
    """Per regime and batch band: iterations, mean absolute relative error, and the bias of the sum."""
    bands, regime = band(iterations.batch), iterations.regime
    parts = [("all", np.ones(len(predicted), dtype=bool))]
    for i, name in enumerate(REGIMES):
        parts.append((name, regime == i))
        if i < 2:
            parts += [(f"{name}, {_band_name(int(b))}", (regime == i) & (bands == b)) for b in np.unique(bands)]
    rows = []
    for name, mask in parts:
        measured = iterations.seconds[mask]
        if measured.sum() > 0:
            error = np.abs(predicted[mask] - measured) / np.maximum(measured, 1e-9)
            bias = predicted[mask].sum() / measured.sum() - 1.0
            rows.append((name, len(measured), float(error.mean()), float(bias)))
    return pd.DataFrame(rows, columns=["regime", "num_iterations", "mean_abs_relative_error", "bias"])


def seconds_of(rows: Iterations, predicted_s: Floats) -> pd.DataFrame:
    """RL step and worker of iterations with their measured and predicted seconds."""
    keys = {"rl_step": rows.rl_step, "worker": rows.worker}
    return pd.DataFrame(keys | {"measured_s": rows.seconds, "predicted_s": predicted_s})


def worker_sums(seconds: pd.DataFrame) -> pd.DataFrame:
    """Sums of `seconds_of` per RL step and worker: what a rollout time is made of."""
    by = ["rl_step", "worker"]
    sums = seconds.groupby(by, as_index=False)[["measured_s", "predicted_s"]].sum()
    return sums.assign(bias=sums["predicted_s"] / sums["measured_s"] - 1.0)


def coverage(table: pd.DataFrame, steps: pd.DataFrame | None) -> list[str]:
    """A note where the busiest worker's iterations leave part of the rollout time unexplained."""
    if steps is None or steps["rollout_s"].isna().all():
        return []
    busiest = table.groupby(["rl_step", "worker"])["duration"].sum().groupby("rl_step").max()
    rollout = steps.dropna(subset=["rollout_s"]).set_index("rl_step")["rollout_s"]
    share = float(busiest.reindex(rollout.index).sum() / rollout.sum())
    if share > 0.98:
        return []
    return [f"the busiest worker's iterations cover {share:.1%} of rollout_s, the rest is not modelled"]


def held_out_table(errors: pd.DataFrame) -> str:
    """Held-out errors for people."""
    if errors.empty:
        return "not cross-validated"
    columns = "left out: {fold}; iterations: {num}; error: {mean_abs_relative_error:.1%}"
    if errors["num_sums"].notna().any():
        columns += "; rollouts: error: {sums_mean_abs_relative_error:.1%}; bias: {sums_bias:+.2%}"
    return console.table_text(errors, columns, left=1, unknown="unknown")


def residuals_table(errors: pd.DataFrame, sums: pd.DataFrame) -> str:
    """Residuals for people."""
    columns = "regime: {regime}; iterations: {num_iterations}; error: {mean_abs_relative_error:.1%}; bias: {bias:+.2%}"
    lines = [console.table_text(errors, columns, left=1)]
    if len(off := sums["bias"].abs()):
        lines.append(f"rollouts (RL step x worker): {len(off)}, mean |bias| {off.mean():.2%}, largest {off.max():.2%}")
    return "\n".join(lines)
