"""How far a fitted cost model is from the iterations it was fitted to, regime by regime."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

FloatArray = npt.NDArray[np.float64]

BANDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper ends of the batch bands; the last is open."""
NUM_BANDS = len(BANDS)
REGIMES = ("plain", "speculative", "prefill")


def band(batch: FloatArray) -> npt.NDArray[np.int64]:
    """Which batch band each row falls in."""
    return np.searchsorted(BANDS[:-1], batch, side="left").astype(np.int64)


def _band_name(band: int) -> str:
    low = BANDS[band - 1] + 1 if band else 1
    if band == len(BANDS) - 1:
        return f"batch {low}+"
    return f"batch {low}" if low == BANDS[band] else f"batch {low}-{BANDS[band]}"


def residuals(
    regime: npt.NDArray[np.int64], batch: FloatArray, duration: FloatArray, predicted: FloatArray
) -> pd.DataFrame:
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


def worker_sums(table: pd.DataFrame, measured: FloatArray, predicted: FloatArray) -> pd.DataFrame:
    """Measured and predicted seconds per RL step and worker: what a rollout time is made of."""
    frame = table[["rl_step", "worker"]].assign(measured_s=measured, predicted_s=predicted)
    sums = frame.groupby(["rl_step", "worker"], as_index=False).sum()
    return sums.assign(bias=sums["predicted_s"] / sums["measured_s"] - 1.0)


def table(found: pd.DataFrame, sums: pd.DataFrame) -> str:
    """Residuals for people."""
    lines = [f"{'regime':28s}{'iterations':>10s}{'error':>9s}{'bias':>9s}"]
    for row in found.itertuples(index=False):
        lines.append(f"{row[0]!s:28s}{row[1]:10d}{row[2]:9.1%}{row[3]:+9.2%}")
    off = sums["bias"].abs()
    lines.append(f"rollouts (RL step x worker): {len(off)}, mean |bias| {off.mean():.2%}, largest {off.max():.2%}")
    return "\n".join(lines)
