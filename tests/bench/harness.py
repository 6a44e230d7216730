"""Common parts of benchmarks: cases in turn, ratios with intervals, results as text.

A benchmark is a table of cases, a function that measures one of them, and a `Text` that says what people see.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tltlab.arrays import Floats
from tltlab.console import table
from tltlab.records import Json
from tltlab.stats import finite, interval_json, mean_of_few, paired_interval

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")
S = TypeVar("S", bound="DataclassInstance")
Progress = Callable[[str], None]


def quiet(message: str) -> None:
    """Progress that nobody reads."""


def changed(sizes: S, **changes: Any) -> S:
    """Return the sizes of a benchmark, changed where a value is not None."""
    return replace(sizes, **{name: value for name, value in changes.items() if value is not None})


def in_turn(
    cases: Iterable[C],
    measure: Callable[[C, int], R],
    rounds: int,
    *,
    rng: np.random.Generator | None = None,
    progress: Progress = quiet,
) -> dict[C, list[R]]:
    """Measure every case once per round, so that a busy machine slows all of them; what each round gave, by case.

    Rounds are numbered from 0; one that warms up has the number -1 and does not count. With `rng` the order changes
    from round to round.
    """
    chosen = list(cases)
    measured: dict[C, list[R]] = {case: [] for case in chosen}
    for number in range(-1, rounds):
        for at in range(len(chosen)) if rng is None else rng.permutation(len(chosen)):
            value = measure(chosen[at], number)
            if number >= 0:
                measured[chosen[at]].append(value)
        progress(f"round {number + 1} of {rounds}" if number >= 0 else "warmed up")
    return measured


def ratio(
    above: Sequence[float] | Floats, below: Sequence[float] | Floats, rng: np.random.Generator | None = None
) -> dict[str, float | None]:
    """sum(above) / sum(below) over rounds with its 95 % interval; ends are None where one round is all there is."""
    interval = paired_interval(above, below, rng=rng or np.random.default_rng(0))
    return {"ratio": interval.estimate, "low": finite(interval.low), "high": finite(interval.high)}


def reward_difference(pairs: Sequence[tuple[float, float]], num_prompts: int) -> Json:
    """`difference`: mean of first minus second over `seeds`, each a mean reward (0 or 1) of `num_prompts` responses.

    Its interval is Student's over seeds, no narrower than what samples of so many prompts vary by; `equal` says whether
    it holds 0, None for one seed.
    """
    chance = sum(reward * (1 - reward) / num_prompts for pair in pairs for reward in pair)
    found = mean_of_few([a - b for a, b in pairs], least_error=math.sqrt(max(chance, 0.0)) / len(pairs))
    equal = found.low <= 0 <= found.high if len(pairs) > 1 else None
    return {"seeds": len(pairs), "difference": interval_json(found), "equal": equal}


class _Fields(string.Formatter):
    """Format strings over JSON: `{a.b}` is a path, `{x:1e3*.1f}` scales, `{x:yes|no|unknown}` chooses.

    A list of numbers is its mean, with `max ` before the rest its largest; an interval has its ends in brackets, and
    what is not there or None is a dash.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value: Any = kwargs
        for part in field_name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if "|" in format_spec:
            names = format_spec.split("|")
            return [*names, "-"][2] if value is None else names[not value]
        if value is None:
            return "-"
        if isinstance(value, list) and value and not isinstance(value[0], str):
            value = max(value) if format_spec.startswith("max ") else fmean(value)
        format_spec = format_spec.removeprefix("max ")
        scaled = re.fullmatch(r"([\d.e-]+)\*(.*)", format_spec)
        scale, spec = (float(scaled[1]), scaled[2]) if scaled else (1.0, format_spec)
        if isinstance(value, Mapping) and "low" in value:
            ends = [value.get("estimate", value.get("ratio")), value["low"], value["high"]]
            middle, *around = (self.format_field(end, f"{scale}*{spec or '.2f'}") for end in ends)
            return middle if ends[1] is None else f"{middle} [{', '.join(around)}]"
        return format(value * scale if scaled else value, spec)


_FIELDS = _Fields()


@dataclass(frozen=True)
class Table:
    """A table: a row for each mapping in the list at `rows`, or for each item of the mapping there, its key as `name`.

    `columns` are headings and format strings, "heading: {field}; heading: {field}"; `left` of them begin at the left.
    """

    rows: str
    columns: str
    left: int = 1

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        rows = _at(result, self.rows) or ()
        if isinstance(rows, Mapping):
            rows = [{"name": name, **(r if isinstance(r, Mapping) else {"value": r})} for name, r in rows.items()]
        columns = [column.split(": ", 1) for column in self.columns.split("; ")]
        cells = [[_FIELDS.format(cell, **row) for _, cell in columns] for row in rows]
        if cells:
            yield table([heading for heading, _ in columns], cells, left=self.left)


@dataclass(frozen=True)
class Goals:
    """A line for each goal in the list at `rows`: whether it is `met`, and the format string `each`.

    With `missed_only` those that are met are counted.
    """

    rows: str
    each: str
    missed_only: bool = False

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        goals = _at(result, self.rows) or []
        if self.missed_only:
            yield f"{sum(bool(goal['met']) for goal in goals)} of {len(goals)} goals met"
        for goal in goals:
            if not (self.missed_only and goal["met"]):
                yield _FIELDS.format("  {met:met    |MISSED |unknown} " + self.each, **goal)


Text = Sequence[str | Table | Goals]
"""Parts of a result for people: a string is a line with fields, left out where the result has none of them."""


def shown(result: Mapping[str, Any], text: Text) -> str:
    """A result for people."""
    lines: list[str] = []
    for part in text:
        if not isinstance(part, str):
            lines += part.lines(result)
        elif _has_any(part, result):
            lines.append(_FIELDS.format(part, **result))
    return "\n".join(lines)


def _at(result: Mapping[str, Any], path: str) -> Any:
    return _FIELDS.get_field(path, (), result)[0]


def _has_any(line: str, result: Mapping[str, Any]) -> bool:
    names = [name for _, name, _, _ in _FIELDS.parse(line) if name]
    return not names or any(_at(result, name) is not None for name in names)
