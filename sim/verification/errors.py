"""Errors of predictions, as every verification has them, and their table for people."""

import json
from contextlib import suppress
from typing import ClassVar

import pandas as pd

from tltlab.console import table_text
from tltlab.records import Json, frozen


@frozen
class Errors:
    """Predictions beside measurements, a row each; the column `error` is predicted / measured - 1.

    Where rollouts were done twice, `repeat_bias` is the median of repeat / rollout - 1 and `repeat_spread` the median
    distance from that: what all second runs have in common is no noise. None where none was. `columns` and `sentences`
    are templates for people.
    """

    columns: ClassVar[str]
    sentences: ClassVar[tuple[str, ...]] = ()

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
    def verdict(self) -> Json:
        """The goal, and True if the errors are within it."""
        return {"goal": self.goal, "met": self.median_error <= self.goal}

    def json(self) -> Json:
        """The rows and their errors as JSON types."""
        return {
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "num_steps": len(self.rows),
            "steps": json.loads(self.rows.to_json(orient="records")),
        }

    @property
    def in_words(self) -> str:
        """The errors, the machine's variation and the goal, for a line of text."""
        twice = "no rollout was run twice"
        if self.repeat_spread is not None:
            twice = f"a second run of a rollout takes {self.repeat_bias:+.1%}, give or take {self.repeat_spread:.1%}"
        errors = f"median error {self.median_error:.1%}, worst {self.worst_error:.1%}"
        met = "met" if self.median_error <= self.goal else "MISSED"
        return f"{errors}; {twice}; goal {self.goal:.1%}: {met}"

    def text(self) -> str:
        """The table for people, and a line for each of `sentences` whose figures are known."""
        lines, figures = [table_text(self.rows, self.columns), "", self.in_words], self.json()
        for sentence in self.sentences:
            # The format of a number refuses None.
            with suppress(TypeError):
                lines.append(sentence.format_map(figures))
        return "\n".join(lines)
