"""How far a fitted cost model is from iterations: those it was fitted to, regime by regime, and those left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tltlab.arrays import Flags, Floats, Ints

BANDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper ends of the batch bands; the last is open."""
MOST_FOLDS = 8
NUM_BANDS = len(BANDS)
REGIMES = ("plain", "speculative", "prefill")


def band(batch: Floats) -> Ints:
    """Which batch band each row falls in."""
    return np.searchsorted(BANDS[:-1], batch, side="left").astype(np.int64)


def regimes(prefill: Floats, spec: Flags) -> Ints:
    """Index into REGIMES: an iteration that prefills is of no other regime."""
    return np.where(prefill > 0, 2, spec.astype(np.int64))


def _band_name(band: int) -> str:
    low = BANDS[band - 1] + 1 if band else 1
    if band == len(BANDS) - 1:
        return f"batch {low}+"
    return f"batch {low}" if low == BANDS[band] else f"batch {low}-{BANDS[band]}"


def residuals(regime: Ints, batch: Floats, duration: Floats, predicted: Floats) -> pd.DataFrame:
    """Per regime and batch band: iterations, mean absolute relative error, and the bias of the sum."""
    bands = band(batch)
    parts = [("all", np.ones(len(predicted), dtype=bool))]
    for i, name in enumerate(REGIMES):
        parts.append((name, regime == i))
        if i < 2:
            parts += [(f"{name}, {_band_name(int(b))}", (regime == i) & (bands == b)) for b in np.unique(bands)]
    found = []
    for name, chosen in parts:
        measured = duration[chosen]
        if measured.sum() > 0:
            error = np.abs(predicted[chosen] - measured) / np.maximum(measured, 1e-9)
            bias = predicted[chosen].sum() / measured.sum() - 1.0
            found.append((name, len(measured), float(error.mean()), float(bias)))
    return pd.DataFrame(found, columns=["regime", "num_iterations", "mean_abs_relative_error", "bias"])


def worker_sums(table: pd.DataFrame, measured: Floats, predicted: Floats) -> pd.DataFrame:
    """Measured and predicted seconds per RL step and worker: what a rollout time is made of."""
    frame = table[["rl_step", "worker"]].assign(measured_s=measured, predicted_s=predicted)
    sums = frame.groupby(["rl_step", "worker"], as_index=False).sum()
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


def folds(rl_steps: Sequence[int], most: int = MOST_FOLDS) -> dict[str, list[int]]:
    """RL steps in at most `most` runs of neighbours, each to be left out once; none where there is one step only.

    >>> folds([0, 1, 2, 5], 2)
    {'RL steps 0-1': [0, 1], 'RL steps 2-5': [2, 5]}
    """
    if len(rl_steps) < 2 or most < 2:
        return {}
    parts = [part.tolist() for part in np.array_split(np.asarray(rl_steps), min(most, len(rl_steps)))]
    return {f"RL step {p[0]}" if len(p) == 1 else f"RL steps {p[0]}-{p[-1]}": p for p in parts}


def held_out_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of iterations that the fit had not seen, a row per fold and one for all of them, "overall".

    `rows` has `fold`, `measured_s`, `predicted_s` (nan where the rest of the data could not predict) and, of a trace,
    `rl_step` and `worker`. Found: `fold`, `num`, `mean_abs_relative_error`, and the same of sums per RL step and worker
    with their `sums_bias`, nan where there are none.
    """
    found = []
    for name, part in [*rows.groupby("fold", sort=False), ("overall", rows)] if len(rows) else []:
        seen = part[part["predicted_s"].notna()]
        error = (seen["predicted_s"] - seen["measured_s"]).abs() / seen["measured_s"].clip(lower=1e-9)
        row = {"fold": name, "num": len(part), "mean_abs_relative_error": error.mean()}
        if "worker" in rows:
            off = worker_sums(seen, seen["measured_s"].to_numpy(), seen["predicted_s"].to_numpy())
            total = seen["predicted_s"].sum() / seen["measured_s"].sum() - 1.0 if len(seen) else np.nan
            row |= {"num_sums": len(off), "sums_mean_abs_relative_error": off["bias"].abs().mean(), "sums_bias": total}
        found.append(row)
    columns = ["fold", "num", "mean_abs_relative_error", "num_sums", "sums_mean_abs_relative_error", "sums_bias"]
    return pd.DataFrame(found).reindex(columns=columns)


def held_out_table(found: pd.DataFrame) -> str:
    """Held-out errors for people."""
    if found.empty:
        return "not cross-validated"
    sums = found["num_sums"].notna().any()
    lines = [f"{'left out':28s}{'iterations':>10s}{'error':>9s}{'rollouts: error':>18s}{'bias':>9s}"]
    if not sums:
        lines = [f"{'left out':28s}{'iterations':>10s}{'error':>9s}"]
    for row in found.itertuples(index=False):
        line = f"{row.fold!s:28s}{row.num:10d}{_percent(row.mean_abs_relative_error):>9s}"
        if sums:
            line += f"{_percent(row.sums_mean_abs_relative_error):>18s}{_percent(row.sums_bias, sign=True):>9s}"
        lines.append(line)
    return "\n".join(lines)


def _percent(share: Any, *, sign: bool = False) -> str:
    if pd.isna(share):
        return "unknown"
    return f"{share:+.2%}" if sign else f"{share:.1%}"


def table(found: pd.DataFrame, sums: pd.DataFrame) -> str:
    """Residuals for people."""
    lines = [f"{'regime':28s}{'iterations':>10s}{'error':>9s}{'bias':>9s}"]
    for row in found.itertuples(index=False):
        lines.append(f"{row[0]!s:28s}{row[1]:10d}{row[2]:9.1%}{row[3]:+9.2%}")
    if len(off := sums["bias"].abs()):
        lines.append(f"rollouts (RL step x worker): {len(off)}, mean |bias| {off.mean():.2%}, largest {off.max():.2%}")
    return "\n".join(lines)
