"""Every model of the simulator against measurements: one table, fitted anew from a folder of data."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bench.harness import Table, Text

from . import profiles, roofline, server

COLUMNS = ["model", *profiles.COLUMNS]


def rows(data: Path, *, left_out: bool = True) -> pd.DataFrame:
    """One row per set of measurements: relative errors, and whether the points were used for the fit.

    `left_out` fits engine profiles again without each model, GPU and engine. ConfigError where a file is missing.
    """
    parts = {
        "roofline": roofline.rows(data),
        "shipped": server.rows(data),
        "profile": profiles.rows(data, left_out=left_out),
    }
    errors = pd.concat([part.assign(model=name) for name, part in parts.items()], ignore_index=True)[COLUMNS]
    # Columns of profiles alone are null elsewhere, in JSON too.
    return errors.astype(object).where(errors.notna(), None)


def coverage(data: Path, *, left_out: bool = True) -> pd.DataFrame:
    """`profiles.coverage`; empty where nothing was left out."""
    found = profiles.coverage(data) if left_out else pd.DataFrame()
    return found.astype(object).where(found.notna(), None)


def summary(errors: pd.DataFrame) -> pd.DataFrame:
    """One screen: each engine profile by what was left out of its fit, and the rows of the other models."""
    return errors[~errors["pooled"].eq(False)]


TEXT: Text = (
    Table(
        "rows",
        "model: {model}; source: {source}; what: {what}; points: {n_points}; fitted: {used_for_fit:yes|no}; "
        "mean: {mean_abs_error:.1%}; worst: {max_abs_error:.1%}; in 90 % interval: {inside:.0%}; "
        "right side of 1: {sign:.0%}",
        left=3,
    ),
    Table(
        "coverage",
        "models: {kind}; predicted: {asked}; distance: {distance}; left out: {left_out}; sets: {sets}; "
        "points: {n_points}; median error: {median:.1%}; stated 90 % error: {width:.0%}; "
        "in 90 % interval: {inside:.0%}; right side of 1: {sign:.0%}",
        left=4,
    ),
)
