"""The trace format, version 1: its tables, their columns and its manifest; and the one builder of a trace's rows.

A trace is a folder with `manifest.json` and for each table a Parquet file `NAME.parquet`, or a folder `NAME/` of such
files, its parts. `workload` (what a policy may know before the rollout) and `outcomes` (what was measured) are
required, the other tables optional. Times are seconds since the start of the RL step a row names (`steps.t_start`:
since the start of the run). Unknown is null, never a sentinel.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from pydantic import (
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from tltlab.arrays import Ints
from tltlab.config import Count, FrozenModel, faults
from tltlab.drafters.specs import DrafterTraits
from tltlab.errors import TraceError
from tltlab.files import read_text, replace_durably, sealed, unsealed
from tltlab.records import Fields, Json, frozen
from tltlab.state import Key
from tltlab.strategy import Strategy

FORMAT = "tltlab-trace"
VERSION = 1
MANIFEST_FILE = "manifest.json"
_PARTS, _UNFINISHED = "parts", "unfinished"
REQUIRED_TABLES = ("workload", "outcomes")

KEY = ("rl_step", "prompt_id", "sample", "turn")
"""One row of `workload` and `outcomes`. The samples of one prompt in one RL step are its group."""

FINISH_REASONS = ("stop", "length", "abort")
"""How a response ended; "abort" is right-censored: its response_tokens is a lower bound."""

TRAINING_ENDS = ("stopped", "killed", "failed", "declined")
"""How a worker's part in a training period ended: by order, killed (it did not yield, or its process died), by an
error of its own, or by itself because it has trained all that it may."""

GRAPH_KINDS = ("full", "piecewise", "eager")
"""CUDA graphs of the target's pass in an iteration: one full graph, piecewise graphs around attention, or none."""

_TEXTS = tomllib.loads(files(__package__).joinpath("tables.toml").read_text(encoding="utf-8"))

UNIQUE: dict[str, tuple[str, ...]] = {name: tuple(columns) for name, columns in _TEXTS["unique"].items()}
"""The columns that together name one row of a table; spans may overlap and have none."""


def _type(kind: str) -> pa.DataType:
    """The type by its alias, in brackets that of a list."""
    return pa.list_(_type(kind[1:-1])) if kind[0] == "[" else pa.type_for_alias(kind)


def _schema(columns: str) -> pa.Schema:
    """Columns as in `tables.toml`."""
    parts = [column.partition(":") for column in columns.split()]
    return pa.schema([pa.field(n, _type(kind.rstrip("?")), nullable=kind.endswith("?")) for n, _, kind in parts])


TABLES: dict[str, pa.Schema] = {name: _schema(columns) for name, columns in _TEXTS["tables"].items()}
"""Arrow schema of each table; where `nullable` is false there is no null.

`steps`, of the drafter in service during the rollout: `drafter_age` is RL steps since it was published,
`drafter_updates` its optimizer updates. `drift_kl` is KL(behaviour || updated policy) per token of the step's update.
Training logs also give `accept_length` (tokens per draft, bonus token included), `draft_rate` (share of drafted tokens
that is kept), `step_s` (the whole RL step, time between stages included) and `wait_s` (waiting for rollouts that
continue during training).

`plans` has one row each time a planner was asked, the first of a rollout for its begin: the requests that had not
ended, in the planner's order, with their `workers` of the active `shape` (0 at the places `held`, which have none) and
tokens; `switch_s` until engines of each shape run, as it knew; and the `actions` that it returned, in words. Of a
rollout states of a million requests are kept.

`acceptance` may have several rows per response and drafter: one for the drafter in service and one for each published
earlier, whose `drafter_age` is counted from the RL step that it was published for to the annotated one.

`spot_training` has one row per worker and training period (`term`, a period of the coordinator); rows of one RL step
and term are a group. `t_start` is the order to train, `duration` lasts until the device is free again. Within it:
`setup_s` pauses to form the group, `train_s` completed updates, `wait_s` no data, `blocked_s` checkpoints, and
`yield_s` from the order to stop until the device is free. `members` is the largest size of the group. `updates`
counts the group's optimizer updates while the worker was in it, `checkpoints` those written meanwhile, `tokens` and
`sequences` what this worker trained on, each time it did. `loss` is the last update's, on the texts trained on.
`accept`, at the end of a worker's last period of the RL step, is by draft position: the target's mean probability, at
the rollout's temperature, of the drafter's greedy token given that the ones before were kept, on responses to prompts
that are held out of training; null where none was measured. `ended` is one of `TRAINING_ENDS`; `detail` is an error or
a remark.
"""

Row = Json
"""A row of a table, or a table by column; None is unknown.

A value given for a column is the same for all rows, or a list or array with a value per row.
"""

Rows: TypeAlias = "Sequence[Fields] | pa.Table"
"""Rows of a table: a dict for each, or an Arrow table of its columns."""

_NAMES = {name: tuple(schema.names) for name, schema in TABLES.items()}
_FIELDS = attrgetter(*Strategy.__slots__)


class Manifest(FrozenModel):
    """Kind and origin of a trace: `manifest.json`. Unknown is None.

    `engine` holds name and version, `created` is ISO 8601, `num_workers` counts rollout workers (engines, not GPUs),
    `group_size` samples per prompt. `drafters` has the traits of drafters with other than the standard names. Where
    `without_iterations` is not None the iterations of every RL step with responses were recorded, except for the RL
    steps that it names, whose requests ran in the iterations of other RL steps or whose iterations were lost.

    >>> Manifest(kind="recorded", engine="vllm 0.32.0", num_workers=8).version
    1
    """

    format: Literal["tltlab-trace"] = "tltlab-trace"
    version: Literal[1] = 1
    kind: Literal["recorded", "synthetic", "imported", "simulated"]
    name: str | None = None
    created: str | None = None
    model: str | None = None
    hardware: str | None = None
    engine: str | None = None
    num_workers: Count | None = None
    max_response_tokens: Count | None = None
    group_size: Count | None = None
    num_rl_steps: NonNegativeInt | None = None
    license: str | None = None
    source: str | None = None
    seed: int | None = None
    notes: str | None = None
    drafters: dict[str, DrafterTraits] = Field(default={})
    drafting: str | None = None
    without_iterations: tuple[int, ...] | None = None

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> Json:
        unset: Json = {"drafters": {}, "drafting": None, "without_iterations": None}
        return {name: value for name, value in dump(self).items() if name not in unset or value != unset[name]}

    @field_validator("created")
    @classmethod
    def _iso_8601(cls, value: str | None) -> str | None:
        if value is not None:
            datetime.fromisoformat(value)
        return value


@frozen
class Contents:
    """The contents of `manifest.json`: the trace and its files. Replacing it is the moment at which the trace changes.

    `parts` has the SHA-256 of the files of tables, by their place in the folder; None: its writer gave none.
    In a folder `NAME/` nothing else counts, and where a trace is `unfinished`, because its recording was not closed, no
    file at all.
    """

    manifest: Manifest
    parts: Mapping[str, str] | None = None
    unfinished: bool = False

    @classmethod
    def read(cls, folder: Path) -> Contents:
        """Read the manifest of a trace, also one of an earlier version, which had sums of whole tables.

        Keys unknown to this version are ignored. Raises TraceError.
        """
        file = folder / MANIFEST_FILE
        try:
            content: Any = unsealed(read_text(file))
        except OSError as error:
            raise TraceError(f"{file}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise TraceError(f"{file}: not JSON, or not what was written: {error}") from error
        if not isinstance(content, dict):
            raise TraceError(f"{file}: got a {type(content).__name__}, a manifest is a JSON object")
        for name, known in (("format", FORMAT), ("version", VERSION)):
            if isinstance(content.get(name), bool) or content.get(name) != known:
                raise TraceError(f"{file}: {name} is {content.get(name)!r}, this reads {name} {known!r}")
        parts = content.get(_PARTS, content.get("sums"))
        if parts is not None and not (isinstance(parts, dict) and all(isinstance(s, str) for s in parts.values())):
            raise TraceError(f"{file}: its {_PARTS!r} are no checksums by file")
        try:
            fields = {name: value for name, value in content.items() if name in Manifest.model_fields}
            manifest = Manifest.model_validate(fields)
        except ValidationError as error:
            raise TraceError(f"{file}: {faults(error)}") from error
        return cls(manifest=manifest, parts=parts, unfinished=content.get(_UNFINISHED) is True)

    def write(self, folder: Path) -> None:
        """Replace the manifest, durably and in one move. Raises OSError."""
        replace_durably(folder / MANIFEST_FILE, self.to_json().encode())

    def to_json(self) -> str:
        """The text of `manifest.json`, sealed (`files.sealed`); every field is there, or null.

        Empty `drafters`, and `drafting` and `without_iterations` of None, are left out.
        """
        content = self.manifest.model_dump()
        content |= {} if self.parts is None else {_PARTS: dict(self.parts)}
        content |= {_UNFINISHED: True} if self.unfinished else {}
        return json.dumps(sealed(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def files_of(self, folder: Path, table: str) -> dict[str, Path]:
        """The files of a table by their place, in the order of its rows; none where it is not there. TraceError."""
        whole, inside = folder / f"{table}.parquet", folder / table
        if self.parts is not None:
            named = {part: folder / part for part in self.parts if part.startswith(f"{table}/")}
            files = {part: file for part, file in named.items() if file.parent == inside} if inside.is_dir() else {}
        else:
            found = sorted(inside.glob("*.parquet"), key=lambda file: (len(file.name), file.name))
            files = {f"{table}/{file.name}": file for file in found}
            if files and whole.exists():
                raise TraceError(f"{folder}: has both {whole.name} and {table}/, and only one of them is the table")
        counts = not self.unfinished or whole.name in (self.parts or {})
        return {whole.name: whole, **files} if counts and whole.exists() else files


def is_trace(path: Path) -> bool:
    """Return True if the manifest of a folder names this format (the trace is not checked)."""
    try:
        return f'"{FORMAT}"' in read_text(path / MANIFEST_FILE)
    except (OSError, ValueError):
        return False


def columns(table: str, **values: Any) -> Row:
    """Return the values in the order of the format. Columns of which nothing is known may be left out."""
    row = {name: values[name] for name in _NAMES[table] if name in values}
    assert len(row) == len(values), f"{table} has no {values.keys() - row.keys()}"
    return row


def by_column(name: str, rows: Rows) -> pa.Table:
    """Rows as a table of the schema's columns, any of them with null. Raises TraceError naming the column."""
    if name not in TABLES:
        raise TraceError(f"no table named {name!r}; there are: {', '.join(TABLES)}")
    given = set(rows.column_names) if isinstance(rows, pa.Table) else set().union(*rows)
    if unknown := given.difference(TABLES[name].names):
        raise TraceError(f"{name}: no column named {min(unknown)!r}; there are: {', '.join(TABLES[name].names)}")
    # Null is refused where the row can be named.
    fields = [field.with_nullable(True) for field in TABLES[name]]
    if isinstance(rows, pa.Table):
        columns = [rows[f.name] if f.name in given else pa.nulls(len(rows), f.type) for f in fields]
        return pa.table(columns, names=TABLES[name].names).cast(pa.schema(fields))
    # All columns in one go, which takes a third of the time.
    try:
        return pa.Table.from_struct_array(pa.array(rows, pa.struct(fields)))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # A column is at fault, which is named, or rows are no dicts.
        columns = []
        for field in fields:
            try:
                columns.append(pa.array([row.get(field.name) for row in rows], field.type))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise TraceError(f"{name}: column {field.name}: {error}; it must be {field.type}") from error
        return pa.table(columns, schema=pa.schema(fields))


def key_columns(key: Key) -> Row:
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
