"""Every model of the simulator against measurements: one table, fitted anew from a folder of data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from bench.harness import Table, Text
from tltlab.console import table

from . import profiles
from . import roofline as roofline_accuracy

COLUMNS = ["model", *profiles.COLUMNS]


def rows(data: Path, *, left_out: bool = True) -> pd.DataFrame:
    """One row per set of measurements: relative errors, and whether the points were used for the fit.

    `left_out` fits engine profiles again without each model, GPU and engine, which takes most of the time. Raises
    ConfigError where the data folder lacks a file.
    """
    parts = {
        "roofline": roofline_accuracy.rows(data),
        "profile": profiles.rows(data, left_out=left_out),
    }
    errors = pd.concat([part.assign(model=name) for name, part in parts.items()], ignore_index=True)[COLUMNS]
    # What only profiles have is null elsewhere, in JSON too.
    return errors.astype(object).where(errors.notna(), None)


def summary(errors: pd.DataFrame) -> str:
    """One screen: each engine profile by what was left out of its fit, then the other models by source."""
    pooled = errors[errors["pooled"].eq(True)]
    engines = []
    for (source, what), part in pooled.groupby(["source", pooled["what"].str.rsplit(": ", n=2).str[0]], sort=False):
        cells = {row["left_out"]: _cell(row) for row in part.to_dict("records")}
        engines.append(
            (source, what, part["n_points"].iloc[0], *(cells.get(fold, "") for fold in ("", *profiles.FOLDS)))
        )
    models = []
    unpooled = errors[errors["pooled"].isna()]
    for (name, source, used), part in unpooled.groupby(["model", "source", "used_for_fit"], sort=False):
        points = part["n_points"].astype(float)
        mean = float((part["mean_abs_error"] * points).sum() / points.sum())
        worst = float(part["max_abs_error"].max())
        models.append((name, source, "yes" if used else "no", int(points.sum()), f"{mean:.1%}", f"{worst:.1%}"))
    heads = ("engine", "what", "points", "fitted", *(f"{fold} left out" for fold in profiles.FOLDS))
    parts = [
        "Errors in %: bias (median of signed ones), median, worst; then the share of points in their 90 % intervals.",
        table(heads, engines, left=2),
        table(("model", "source", "fitted", "points", "mean", "worst"), models, left=3),
        "--all shows every set of measurements.",
    ]
    return "\n\n".join(parts)


def _cell(row: Mapping[Hashable, Any]) -> str:
    bias, median, worst = (100 * row[name] for name in ("bias", "median_abs_error", "max_abs_error"))
    inside = "-" if row["inside"] is None else f"{100 * row['inside']:.0f}"
    return f"{bias:+5.1f} {median:4.1f} {worst:3.0f} {inside:>3}"


TEXT: Text = (
    Table(
        "rows",
        "model: {model}; source: {source}; what: {what}; points: {n_points}; fitted: {used_for_fit:yes|no}; "
        "mean: {mean_abs_error:.1%}; worst: {max_abs_error:.1%}; note: {note}",
        left=3,
    ),
)
"""Every row, as wide as it takes."""
