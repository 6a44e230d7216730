"""A table of measured iterations, as CSV or Parquet: batch, tokens to verify, context and seconds of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError

REQUIRED = ("batch", "tokens_to_verify", "context_tokens", "seconds")
OPTIONAL = {"draft_depth": 0.0, "top_k": 1.0, "prefill_tokens": 0.0}
"""Columns that may be missing or empty, and what that means."""
_LEAST = {
    "batch": 1, "tokens_to_verify": 1, "context_tokens": 0, "draft_depth": 0, "top_k": 1, "prefill_tokens": 0,
}  # fmt: skip
_WHOLE = ("batch", "draft_depth", "top_k")


def read_step_times(path: Path) -> pd.DataFrame:
    """Read and check a `.csv` or `.parquet` file; ConfigError says what is wrong and in which row."""
    try:
        found = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a table of measured iterations: {error}") from error
    return checked(found, str(path))


def checked(points: pd.DataFrame, where: str = "measured iterations") -> pd.DataFrame:
    """The table with all of REQUIRED and OPTIONAL as floats, other columns as they are.

    A row is one measured iteration: `batch` requests, each verifying `tokens_to_verify` tokens (the pending one
    counts), contexts that sum to `context_tokens`, `prefill_tokens` prompt tokens beside them, in `seconds`.
    `draft_depth` levels of `top_k` branches were drafted within that time, by `drafter` where that column is there: a
    roofline gives model-free ones no network. Raises ConfigError.

    >>> checked(pd.DataFrame({"batch": [1], "tokens_to_verify": [1], "context_tokens": [9], "seconds": [0.1]})).shape
    (1, 7)
    """
    if missing := [name for name in REQUIRED if name not in points]:
        raise ConfigError(
            f"{where}: no column {', '.join(missing)} among {', '.join(map(str, points.columns))}; a table of measured "
            f"iterations has {', '.join(REQUIRED)}"
        )
    if points.empty:
        raise ConfigError(f"{where}: no rows, so there is nothing to fit")
    found = points.reset_index(drop=True).copy()
    for name in (*REQUIRED, *OPTIONAL):
        given = found[name] if name in found else pd.Series(np.nan, index=found.index)
        values = pd.to_numeric(given, errors="coerce").astype(np.float64)
        if name in OPTIONAL:
            values = values.where(given.notna(), OPTIONAL[name])
        wrong = ~np.isfinite(values)
        wrong |= values <= 0 if name == "seconds" else values < _LEAST[name]
        if name in _WHOLE:
            wrong |= values != np.floor(values)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            bound = "a time above 0" if name == "seconds" else f"{'a whole number' if name in _WHOLE else 'a number'}"
            least = "" if name == "seconds" else f", at least {_LEAST[name]}"
            raise ConfigError(f"{where}: row {at}: {name} is {given.tolist()[at]!r}; it is {bound}{least}")
        found[name] = values
    return found
