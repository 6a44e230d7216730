"""The one builder of a trace's rows, for engines that record, drivers and the simulator.

`schema.TABLES` defines the columns of a table. A value given for a column is the same for all rows, or a list or array
with a value per row. The result is a row, or a table by column, which `as_rows` turns into rows. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from tltlab.arrays import Ints
from tltlab.strategy import Strategy

from .schema import KEY, TABLES

Row = dict[str, Any]

_NAMES = {name: tuple(schema.names) for name, schema in TABLES.items()}
_REQUIRED = {name: {field.name for field in schema if not field.nullable} for name, schema in TABLES.items()}
_FIELDS = attrgetter(*Strategy.__slots__)


def columns(table: str, **values: Any) -> Row:
    """Return the values in the order of the format. Columns of which nothing is known may be left out."""
    row = {name: values[name] for name in _NAMES[table] if name in values}
    assert len(row) == len(values), f"{table} has no {values.keys() - row.keys()}"
    assert row.keys() >= _REQUIRED[table], f"{table} lacks {_REQUIRED[table] - row.keys()}"
    return row


def as_rows(table: Row) -> list[Row]:
    """Return the rows of a table by column, at least one of which is a list."""
    values = [value if isinstance(value, list) else repeat(value) for value in table.values()]
    return [dict(zip(table, row, strict=True)) for row in zip(*values, strict=False)]


def key_columns(key: tuple[int, str, int, int]) -> Row:
    """Return the columns of a request's key."""
    return dict(zip(KEY, key, strict=True))


def strategy_columns(strategies: Sequence[Strategy], at: Ints | None = None) -> Row:
    """Return the columns of the strategies of some rows; with `at`, arrays in which row i has `strategies[at[i]]`.

    >>> strategy_columns([Strategy.parse("ngram:4"), Strategy.parse("none")])["tokens_to_verify"]
    [5, 1]
    """
    fields = zip(*map(_FIELDS, strategies), strict=True) if strategies else [()] * len(Strategy.__slots__)
    chosen: Row = dict(zip(Strategy.__slots__, map(list, fields), strict=True))
    if at is None:
        return chosen
    return {name: np.array(each, object if name == "drafter" else np.int64)[at] for name, each in chosen.items()}


def span(rl_step: int, lane: Any, kind: Any, t_start: Any, duration: Any, batch: Any = None, detail: Any = None) -> Row:
    """Return a span, or many of one lane by column."""
    return dict(zip(_NAMES["spans"], (rl_step, lane, kind, t_start, duration, batch, detail), strict=True))


def span_detail(strategy: Strategy) -> str | None:
    """Return the `detail` of a span of iterations under a strategy."""
    return str(strategy) if strategy.speculates else None


def idle_spans(
    rl_step: int, worker: int, end_s: float, until_s: float, busy: Iterable[tuple[float, float]] = ()
) -> Iterator[Row]:
    """Yield the idle times of a worker between `end_s`, the end of its last request, and `until_s`.

    In the intervals `busy`, which are in order, it did something else. All are in seconds since the RL step began.
    """
    for start_s, done_s in [*busy, (until_s, until_s)]:
        if start_s > end_s:
            yield span(rl_step, f"worker {worker}", "idle", end_s, start_s - end_s, 0)
        end_s = max(end_s, done_s)
