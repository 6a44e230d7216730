"""Rules of a valid trace; a fault is a TraceError that names the file, the column and the first offending row.

`conform` casts one table to its schema without loss, `check` tests values and how the tables fit together. All keys
start with the RL step, so a trace can be checked some RL steps at a time. Everything is vectorised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tltlab.arrays import Flags, Ints
from tltlab.errors import TraceError
from tltlab.records import frozen

from .schema import FINISH_REASONS, GRAPH_KINDS, KEY, TABLES, TRAINING_ENDS, UNIQUE

_AT_LEAST_ONE = {"max_response_tokens", "tokens_to_verify", "max_depth", "members"}
_ANY_SIGN = {"reward", "reward_mean", "drift_kl", "loss"}
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "outcomes": {"finish_reason": FINISH_REASONS},
    "iterations": {"graph": GRAPH_KINDS},
    "spot_training": {"ended": TRAINING_ENDS},
}
_ROUNDING = 1e-4
"""Means of float32 probabilities may lie this far outside [0, 1]."""
_PER_TOKEN = {"token_ids", "logprobs", "token_versions", "accept_if_drafted"}


@frozen
class TablePart:
    """A table, or some of its rows; `sources` are the files that they come from in turn, with the row numbers there."""

    name: str
    table: pa.Table
    sources: tuple[tuple[str, Ints], ...]

    @classmethod
    def of(cls, name: str, table: pa.Table, place: str, first: int = 0) -> TablePart:
        """Rows that follow each other in one place, from number `first` on."""
        return cls(name=name, table=table, sources=((place, np.arange(first, first + len(table))),))

    @classmethod
    def joined(cls, name: str, parts: Sequence[TablePart]) -> TablePart:
        """The rows of conformed parts of a table."""
        table = pa.concat_tables([TABLES[name].empty_table(), *(part.table for part in parts)])
        return cls(name=name, table=table, sources=tuple(source for part in parts for source in part.sources))

    def place(self, row: int) -> tuple[str, int]:
        """The file of a row of this part, and the row's number there."""
        for file, rows in self.sources:
            if row < len(rows):
                return file, int(rows[row])
            row -= len(rows)
        raise IndexError(row)

    def fault(self, column: str, row: int, message: str) -> NoReturn:
        """Raise the TraceError for the `row`-th row of this part."""
        file, number = self.place(row)
        raise TraceError(f"{file}: column {column}, row {number}{self._key(row)}: {message}")

    def require(self, ok: Flags, column: str, message: str, *others: Any) -> None:
        """Every row must be ok; the first `{}` in the message is the offending value, others are those of its row."""
        if not ok.all():
            row = int(np.argmin(ok))
            values = [other[row] for other in others]
            self.fault(column, row, message.format(repr(self.table[column][row].as_py()), *values))

    def numpy(self, column: str) -> Any:
        """A numeric column as an array, null as 0."""
        return self.table[column].fill_null(0).to_numpy()

    def is_known(self, column: str) -> Flags:
        """Where a column is not null."""
        return np.asarray(pc.is_valid(self.table[column]))

    def _key(self, row: int) -> str:
        names = [n for n in UNIQUE.get(self.name, ("rl_step",)) if n in self.table.column_names]
        values = ", ".join(f"{n} {self.table[n][row].as_py()!r}" for n in names)
        return f" ({values})" if values else ""


def check_columns(name: str, file: str, schema: pa.Schema) -> None:
    """Raise TraceError unless `schema` has the columns of table `name` in types that can hold them.

    A nullable column may be missing (unknown), and so may `turn` (0).
    """
    for field in TABLES[name]:
        if schema.names.count(field.name) > 1:
            raise TraceError(f"{file}: column {field.name} is there {schema.names.count(field.name)} times")
        if field.name not in schema.names:
            if not field.nullable and field.name != "turn":
                raise TraceError(f"{file}: column {field.name} is missing; there are: {', '.join(schema.names)}")
        elif not _can_hold(schema.field(field.name).type, field.type):
            got = schema.field(field.name).type
            raise TraceError(
                f"{file}: column {field.name} has type {got}, it must be {field.type} or cast without loss"
            )


def conform(part: TablePart) -> TablePart:
    """Cast rows of one file to their schema without loss, columns in order; `turn` may be missing (0), unknown ones go.

    Raises TraceError for a value that does not fit, null in a column that has none, and NaN or infinity.
    """
    check_columns(part.name, part.sources[0][0], part.table.schema)
    columns = []
    for field in TABLES[part.name]:
        if field.name not in part.table.column_names:
            empty = pa.nulls(len(part.table), field.type)
            columns.append(empty if field.nullable else pa.array(np.zeros(len(part.table), np.int32)))
            continue
        column = part.table[field.name]
        if column.null_count and not field.nullable:
            part.require(part.is_known(field.name), field.name, "got null, this column has no unknown values")
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowInvalid:
                row = _first_uncastable(part.table[field.name], field.type)
                value = column[row].as_py()
                part.fault(field.name, row, f"got {value!r}, which is no {field.type}")
        if pa.types.is_string(field.type):
            _require_utf_8(part, field.name, column)
        columns.append(column)
    return replace(part, table=pa.table(columns, schema=TABLES[part.name]))


def check(parts: Mapping[str, TablePart], without_iterations: Collection[int] | None = None) -> None:
    """Check the values of conformed tables and that they fit together; all hold the same RL steps.

    Responses that ran need iterations in their RL step, except in `without_iterations`; None: nowhere (`Manifest`).
    """
    for part in parts.values():
        check_values(part)
    for part in parts.values():
        _check_unique(part)
    workload, outcomes = parts["workload"], parts["outcomes"]
    at = _find(outcomes, workload)
    outcomes.require(at >= 0, "prompt_id", "got {}: this outcome has no row in workload.parquet")
    tokens = outcomes.numpy("response_tokens")
    caps = workload.numpy("max_response_tokens")[at]
    outcomes.require(tokens <= caps, "response_tokens", "got {}, its max_response_tokens is {}", caps)
    if without_iterations is not None:
        steps = outcomes.numpy("rl_step")
        there = parts["iterations"].numpy("rl_step") if "iterations" in parts else np.arange(0)
        ok = (tokens == 0) | np.isin(steps, there) | np.isin(steps, list(without_iterations))
        outcomes.require(
            ok,
            "response_tokens",
            "got {}, and its RL step has no row in iterations.parquet, though by the manifest's without_iterations "
            "iterations were recorded: they were lost",
        )
    for name in ("tokens", "acceptance"):
        if name in parts:
            at = _find(parts[name], outcomes)
            parts[name].require(at >= 0, "prompt_id", "got {}: this row has no row in outcomes.parquet")
            _check_list_lengths(parts[name], tokens[at])


def check_values(part: TablePart) -> None:
    """Check each row of one conformed table by itself."""
    for field in part.table.schema:
        _check_column(part, field)
    for column, words in _WORDS.get(part.name, {}).items():
        in_words = pc.is_in(part.table[column], pa.array(words)).to_numpy()
        part.require(in_words | ~part.is_known(column), column, f"got {{}}, it must be one of {', '.join(words)}")
    if part.name == "outcomes":
        aborted = pc.equal(part.table["finish_reason"], "abort").to_numpy()
        ok = (part.numpy("response_tokens") >= 1) | aborted
        part.require(ok, "response_tokens", 'got {}, it must be at least 1 (0 only with finish_reason "abort")')
        submitted = part.numpy("t_submit")
        ok = ~part.is_known("t_finish") | (part.numpy("t_finish") >= submitted)
        part.require(ok, "t_finish", "got {}, before its t_submit {}", submitted)
    if part.name == "decisions":
        chance = part.numpy("propensity")
        part.require((chance > 0) & (chance <= 1), "propensity", "got {}, it must be a probability above 0")
    if part.name == "acceptance":
        lengths, column = _flat(part.table["accept_if_drafted"])
        depths = part.numpy("max_depth")
        if (over := column.to_numpy() > np.repeat(depths, lengths)).any():
            row = _row_of(over, lengths)
            part.fault("accept_if_drafted", row, f"got {column[np.argmax(over)]}, more than max_depth {depths[row]}")
    if part.name == "spot_training":
        lengths, column = _flat(part.table["accept"])
        if (wrong := np.abs(column.to_numpy() - 0.5) > 0.5 + _ROUNDING).any():
            part.fault("accept", _row_of(wrong, lengths), f"got {column[np.argmax(wrong)]}, it must be a probability")


def _can_hold(got: pa.DataType, want: pa.DataType) -> bool:
    """Return True if both are lists of what can hold each other, texts or numbers; of nothing, a null, all can."""
    kinds = pa.types
    if kinds.is_dictionary(got):
        got = got.value_type
    if kinds.is_list(want):
        return kinds.is_null(got) or (hasattr(got, "value_type") and _can_hold(got.value_type, want.value_type))
    if kinds.is_string(want):
        return got in (pa.null(), pa.string(), pa.large_string(), pa.string_view())
    return bool(kinds.is_null(got) or kinds.is_integer(got) or kinds.is_floating(got))


def _require_utf_8(part: TablePart, name: str, column: pa.ChunkedArray) -> None:
    # Parquet files of other writers, and damaged ones, may hold any bytes; Arrow looks at them only when asked.
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        row = _first_uncastable(column.cast(pa.binary()), column.type)
        file, number = part.place(row)
        raise TraceError(f"{file}: column {name}, row {number}: the text is not UTF-8") from error


def _first_uncastable(column: pa.ChunkedArray, to: pa.DataType) -> int:
    low, high = 0, len(column)  # the first `low` rows cast, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            # A copy: casting a slice of lists would also cast the values outside it.
            column.take(pa.array(range(low, middle))).cast(to)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _check_column(part: TablePart, field: pa.Field) -> None:
    column, kind, lengths = part.table[field.name], field.type, None
    if pa.types.is_list(kind):
        lengths, column = _flat(column)
        kind = kind.value_type
    if pa.types.is_string(kind) or not len(column):
        return
    values = column.fill_null(0).to_numpy() if column.null_count else column.to_numpy()
    ok: Flags = np.ones(len(values), bool)
    rule = ""
    if column.null_count and lengths is not None:
        ok, rule = pc.is_valid(column).to_numpy(), "null in a list"
    elif pa.types.is_floating(kind):
        ok, rule = np.isfinite(values), "it must be a finite number, unknown is null"
        if ok.all() and field.name not in _ANY_SIGN and lengths is None:
            ok, rule = values >= 0, "it must not be negative"
    elif not pa.types.is_unsigned_integer(kind):
        least = 1 if field.name in _AT_LEAST_ONE else 0
        ok, rule = values >= least, f"it must be at least {least}"
        if column.null_count:
            ok |= pc.is_null(column).to_numpy()
    if not ok.all():
        at = int(np.argmin(ok))
        row = at if lengths is None else _row_of(~ok, lengths)
        part.fault(field.name, row, f"got {column[at].as_py()!r}, {rule}")


def _flat(column: pa.ChunkedArray) -> tuple[Ints, pa.ChunkedArray]:
    """Length of each list (0 for null) and all elements one by one."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    return lengths, pc.list_flatten(column)


def _row_of(wrong: Flags, lengths: Ints) -> int:
    """The list that holds the first wrong element of lists of these lengths laid end to end."""
    return int(np.searchsorted(np.cumsum(lengths), np.argmax(wrong), side="right"))


def _check_unique(part: TablePart) -> None:
    if (columns := UNIQUE.get(part.name)) is None:
        return
    if (twice := part.table.select(columns).to_pandas().duplicated().to_numpy()).any():
        part.fault(columns[-1], int(np.argmax(twice)), f"this row is there twice: {', '.join(columns)} must be unique")


def _check_list_lengths(part: TablePart, response_tokens: Ints) -> None:
    for field in part.table.schema:
        if field.name in _PER_TOKEN:
            lengths, _ = _flat(part.table[field.name])
            ok = ~part.is_known(field.name) | (lengths == response_tokens)
            message = "the list has {1} entries, response_tokens is {2}"
            part.require(ok, field.name, message, lengths, response_tokens)


def _find(part: TablePart, among: TablePart) -> Ints:
    """Position of each row's key in another part, -1 where it is not there."""
    keys, others = (pd.MultiIndex.from_frame(each.table.select(KEY).to_pandas()) for each in (part, among))
    return np.asarray(others.get_indexer(keys), np.int64)
