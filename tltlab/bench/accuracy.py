"""Every model of the simulator against measurements: one table, fitted anew from a folder of data."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

import pandas as pd

from tltlab.experiments.graph_readings import READINGS
from tltlab.experiments.graph_readings import validation as graph_pool_validation

from . import engine_overhead, profiles
from . import roofline as roofline_accuracy

COLUMNS = ["model", "source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note"]
WIDTH = 160
_NUMBERS = f"{'points':>7s}{'fitted':>7s}{'mean':>8s}{'worst':>8s}"


def rows(data: Path, *, left_out: bool = True) -> pd.DataFrame:
    """One row per set of measurements: relative errors, and whether the points were used for the fit.

    `left_out` fits engine profiles again without each model, GPU and engine, which takes most of the time. Raises
    ConfigError where the data folder lacks a file.
    """
    parts = {
        "roofline": roofline_accuracy.rows(data),
        "table": engine_overhead.accuracy_rows(data),
        "profile": profiles.rows(data, left_out=left_out),
        "graph pool": graph_pool_rows(),
    }
    return pd.concat([part.assign(model=name) for name, part in parts.items()], ignore_index=True)[COLUMNS]


def graph_pool_rows() -> pd.DataFrame:
    """TLT's graph-pool memory under every reading of it, in their order; the note of the first says why it is there."""
    why = {reading.name: reading.why for reading in READINGS}
    return pd.DataFrame(
        {
            "source": "TLT Table 5",
            "what": f"{row.name}, {row.measured_gb} GB: {row.reading}",
            "n_points": 1,
            "used_for_fit": row.fitted,
            "mean_abs_error": abs(row.error),
            "max_abs_error": abs(row.error),
            "note": f"{row.predicted_gb:.2f} GB, {row.error:+.1%}; parameters fitted: {row.num_free}"
            + (f"; {why[row.reading]}" if row.name == "single" else ""),
        }
        for row in graph_pool_validation()
    )


def text(found: pd.DataFrame) -> str:
    """The table for people, at most `WIDTH` columns wide: what does not fit goes on below, as do graph pools' notes."""
    widths = {name: max(len(name), int(found[name].str.len().max())) for name in ("model", "source")}
    widths["what"] = WIDTH - sum(widths.values()) - len(_NUMBERS) - 2
    lines = [" ".join(f"{name:{width}s}" for name, width in widths.items()) + _NUMBERS]
    indent = " " * (widths["model"] + widths["source"] + 2)
    for row in found.to_dict("records"):
        first, *rest = wrap(row["what"], widths["what"])
        names = " ".join(
            f"{cell:{width}s}"
            for cell, width in zip((row["model"], row["source"], first), widths.values(), strict=True)
        )
        fitted = "yes" if row["used_for_fit"] else "no"
        errors = f"{row['mean_abs_error']:8.1%}{row['max_abs_error']:8.1%}"
        lines.append(f"{names}{row['n_points']:7d}{fitted:>7s}{errors}")
        lines += [indent + line for line in rest]
        if row["model"] == "graph pool":
            lines += [f"{indent}  {line}" for line in wrap(row["note"], WIDTH - len(indent) - 2)]
    return "\n".join(lines)
