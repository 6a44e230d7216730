"""Every model of the simulator against measurements: one table, fitted anew from a folder of data."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from . import engine_overhead, validation
from .graph_pool_tlt import validation as graph_pool_validation

COLUMNS = ["model", "source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note"]


def rows(data: Path) -> pd.DataFrame:
    """One row per set of measurements: relative errors, and whether the points were used for the fit.

    Raises ConfigError where the data folder lacks a file.
    """
    parts = {
        "roofline": validation.rows(data),
        "table": engine_overhead.accuracy_rows(data),
        "graph pool": graph_pool_rows(),
    }
    return pd.concat([part.assign(model=name) for name, part in parts.items()], ignore_index=True)[COLUMNS]


def graph_pool_rows() -> pd.DataFrame:
    """TLT's graph-pool memory under the readings of it that are plausible, worst first."""
    found = [row for row in graph_pool_validation() if row.plausible]
    return pd.DataFrame(
        {
            "source": "TLT Table 5",
            "what": f"graph pool, {row.name}: {row.measured_gb} GB measured, {row.predicted_gb:.2f} predicted",
            "n_points": 1,
            "used_for_fit": row.fitted,
            "mean_abs_error": abs(row.error),
            "max_abs_error": abs(row.error),
            "note": f"{row.reading}; {row.num_free} free parameter",
        }
        for row in found
    )


def text(found: pd.DataFrame) -> str:
    """The table for people."""
    lines = [f"{'model':11s}{'source':34s}{'what':78s}{'points':>7s}{'fitted':>7s}{'mean':>8s}{'worst':>8s}"]
    for row in found.to_dict("records"):
        fitted = "yes" if row["used_for_fit"] else "no"
        lines.append(
            f"{row['model']:11s}{row['source'][:33]:34s}{row['what'][:77]:78s}{row['n_points']:7d}{fitted:>7s}"
            f"{row['mean_abs_error']:8.1%}{row['max_abs_error']:8.1%}"
        )
    return "\n".join(lines)
