"""Errors of predictions, as every verification has them, and their table for people."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import pandas as pd

from tltlab.console import table_text, verdict_text
from tltlab.records import Json, frozen


@frozen
class Errors:
    """Predictions beside measurements, a row each; the column `error` is predicted / measured - 1.

    Where rollouts were done twice, `repeat_bias` is the median of repeat / rollout - 1 and `repeat_spread` the median
    distance from that: what all second runs have in common is no noise. None where none was. `columns` and `sentences`
    are templates for people, `advice` what to do where the goal is missed, and where it is met.
    """

    columns: ClassVar[str]
    sentences: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[tuple[str, str]]

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

    def json(self) -> Json:
        """The rows and their errors as JSON types."""
        return {
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "num_steps": len(self.rows),
            "steps": json.loads(self.rows.to_json(orient="records")),
        }

    @property
    def number(self) -> str:
        """The errors beside their goal, in a sentence."""
        met = "met" if self.median_error <= self.goal else "missed"
        errors = f"{self.median_error:.1%} off in the median, {self.worst_error:.1%} at worst"
        return f"Predicted times are {errors}; the goal of {self.goal:.1%} is {met}."

    def judged(self, figures: Json) -> Json:
        """Return figures with the goal, whether it is met, and the `verdict`: the errors, why, and what to do next."""
        met, twice = self.median_error <= self.goal, "no rollout was run twice"
        if self.repeat_spread is not None:
            twice = f"a second run of a rollout takes {self.repeat_bias:+.1%}, give or take {self.repeat_spread:.1%}"
        why = [twice]
        for sentence in self.sentences:
            # The format of a number refuses None.
            with suppress(TypeError):
                why.append(sentence.format_map(figures))
        verdict = f"{self.number}\nWhy: {'; '.join(why)}.\nNext: {self.advice[met]}"
        return {"goal": self.goal, "met": met, "verdict": verdict, **figures}

    def text(self, lists: Mapping[str, Sequence[str]] = {}) -> str:
        """The verdict for people, what it was made of, and the table."""
        return f"{verdict_text(self.json()['verdict'], lists)}\n\n{table_text(self.rows, self.columns)}"
