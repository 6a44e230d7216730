"""Errors of predictions, as every verification has them, and their table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tltlab.console import table


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Predictions beside measurements, a row each; the column `error` is predicted / measured - 1.

    Where rollouts were done twice, `repeat_bias` is the median of repeat / rollout - 1 and `repeat_spread` the median
    distance from that: what all second runs have in common is no noise. None where none was.
    """

    rows: pd.DataFrame
    repeat_spread: float | None = None
    repeat_bias: float | None = None

    @property
    def median_error(self) -> float:
        return float(self.rows["error"].abs().median())

    @property
    def worst_error(self) -> float:
        return float(self.rows["error"].abs().max())

    @property
    def goal(self) -> float:
        """Bound of the median error: 5 %, or the machine's own variation."""
        return max(0.05, self.repeat_spread or 0.0)

    @property
    def verdict(self) -> dict[str, Any]:
        """The goal, and True if the errors are within it."""
        return {"goal": self.goal, "met": self.median_error <= self.goal}

    def json(self) -> dict[str, Any]:
        """The rows and their errors as JSON types."""
        return {
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "num_steps": len(self.rows),
            "steps": json.loads(self.rows.to_json(orient="records")),
        }

    @property
    def in_words(self) -> str:
        """The errors and the machine's variation, for a line of text."""
        twice = "no rollout was run twice"
        if self.repeat_spread is not None:
            twice = f"a second run of a rollout takes {self.repeat_bias:+.1%}, give or take {self.repeat_spread:.1%}"
        return f"median error {self.median_error:.1%}, worst {self.worst_error:.1%}; {twice}"


def table_text(rows: pd.DataFrame, columns: Mapping[str, str], left: int = 2) -> str:
    """Return a table for people, with a template for each column's cells; a cell of an unknown number is empty.

    >>> print(table_text(pd.DataFrame({"step": [1], "error": [0.25]}), {"step": "{step}", "error": "{error:+.1%}"}))
    step  error
    1     +25.0%
    """
    cells = [
        ["" if "nan" in (cell := template.format_map(row)) else cell for template in columns.values()]
        for row in rows.to_dict("records")
    ]
    return table(list(columns), cells, left=left)
