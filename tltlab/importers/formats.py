"""Traces from what other programs write: rollout dumps, requests of vLLM, a CSV of lengths, logs of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import pandas as pd

from tltlab.errors import ConfigError, TraceError
from tltlab.files import open_input
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

from .length_table import (
    LengthTable,
    is_length_record,
    trace_of,
)
from .metrics_log import is_metrics_log, records_of, refuse_wandb, unknown_log
from .responses import group_size_of, tables_of_responses
from .rows import Row, rows_of
from .step_metrics import says_means, steps_of, tables_of_steps
from .text_dumps import read_trl, read_verl, trl_files, verl_files
from .token_counts import NoTokenCounter, TokenCounter
from .vllm import is_request, is_timed, read_vllm

Format = Literal["verl", "trl", "vllm", "csv", "metrics"]
FORMATS: tuple[Format, ...] = get_args(Format)

_CALLED = {
    "verl": "verl rollout dump", "trl": "TRL completions", "vllm": "vLLM requests", "metrics": "log of metrics",
}  # fmt: skip


def import_dump(
    path: str | Path,
    *,
    form: Format | None = None,
    tokens: TokenCounter | None = None,
    workers: int | None = None,
    group_size: int | None = None,
    max_response_tokens: int | None = None,
    column: str | None = None,
    reward_columns: Sequence[str] = (),
    responses: int | None = None,
) -> Trace:
    """Make a trace of kind "imported" of a dump; its manifest says the source and every assumption (`notes`).

    `form` is guessed from the content by default (`guess`). `tokens` counts the tokens of dumps that hold text alone
    (verl, trl). `max_response_tokens` is the run's cap: unknown, the longest response is taken for it.
    `group_size` goes with csv, vllm and metrics, `column` (of the lengths) with csv, `reward_columns` with trl,
    `responses` per RL step, where a log does not say them, with metrics.
    The dump's numbers, not its texts, are held in memory. Raises TraceError naming file, line and field, ConfigError.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    form = form or ("csv" if column is not None and ".csv" in path.suffixes else guess(path))
    options = {
        "a token counter": (tokens is not None, ("verl", "trl")),
        "a group size": (group_size is not None, ("csv", "vllm", "metrics")),
        "a column of lengths": (column is not None, ("csv",)),
        "reward columns": (bool(reward_columns), ("trl",)),
        "a number of responses": (responses is not None, ("metrics",)),
    }
    for name, (is_given, goes_with) in options.items():
        if is_given and form not in goes_with:
            raise ConfigError(f"{name} does not go with format {form}, only with {' and '.join(goes_with)}")
    counts = {"workers": workers, "group size": group_size, "maximum": max_response_tokens, "responses": responses}
    for quantity, number in counts.items():
        if number is not None and number < 1:
            raise ConfigError(f"{quantity} is {number}, it must be at least 1")
    if form == "csv":
        table = LengthTable.read(path, column)
        return trace_of(table, workers=workers, group_size=group_size, max_response_tokens=max_response_tokens)
    if form == "metrics":
        steps, notes = steps_of(records_of(path))
        tables, assumed = tables_of_steps(
            steps,
            place=str(path),
            responses=responses,
            group_size=group_size,
            max_response_tokens=max_response_tokens,
            said=notes,
        )
        return _trace(path, form, tables, [*notes, *assumed], workers)
    counter = NoTokenCounter() if tokens is None else tokens
    if form == "vllm":
        dump = read_vllm(path, group_size or 1)
    else:
        dump = read_verl(path, counter) if form == "verl" else read_trl(path, counter, reward_columns)
    if not dump.responses:
        raise TraceError(f"{path}: no responses in it")
    return _trace(path, form, *tables_of_responses(dump, max_response_tokens), workers)


def _trace(
    path: Path, form: Format, tables: Mapping[str, pd.DataFrame], notes: Sequence[str], workers: int | None
) -> Trace:
    name = path.resolve().name
    cap = int(tables["workload"]["max_response_tokens"].max())
    manifest = Manifest(
        kind="imported", name=name.split(".")[0], source=f"{_CALLED[form]} {name}", num_workers=workers,
        max_response_tokens=cap, group_size=group_size_of(tables["workload"]), notes="; ".join(notes) or None,
    )  # fmt: skip
    return Trace.from_tables(manifest, tables)


def guess(path: Path) -> Format:
    """Which format a dump has, by its first record. Raises TraceError that says what it found."""
    if path.is_dir():
        if trl_files(path):
            return "trl"
        if files := verl_files(path):
            return _record_format(first_row(files[0]))
        if is_metrics_log(path):
            return "metrics"
        raise TraceError(
            f"{path}: neither <step>.jsonl (verl) nor completions_<step>.parquet (TRL) nor events of TensorBoard in it"
        )
    refuse_wandb(path)
    if ".csv" in path.suffixes:
        # Lengths alone need no header; a log of requests says when each came, a history has means of RL steps.
        first = next(rows_of(path), None)
        if first is None:
            return "csv"
        return "metrics" if says_means(first.fields) else "vllm" if is_timed(first) else "csv"
    if path.suffix in (".tsv", ".tab"):
        return "csv"
    try:
        return _record_format(first_row(path))
    except TraceError:
        if path.suffix == ".parquet":
            raise
        # Not records of responses: a log has metrics of RL steps somewhere in it, or there are numbers alone.
        if is_metrics_log(path):
            return "metrics"
        if _numbers_alone(path):
            return "csv"
        if (unknown := unknown_log(path)) is not None:
            raise TraceError(unknown) from None
        raise


def first_row(path: Path) -> Row:
    """Return the first record of a file; TraceError where there is none."""
    row = next(rows_of(path), None)
    if row is None:
        raise TraceError(f"{path}: no rows in it")
    return row


def _record_format(row: Row) -> Format:
    names = set(row.fields)
    if {"input", "output"} <= names:
        return "verl"
    if {"prompt", "completion"} <= names:
        return "trl"
    if says_means(names):
        return "metrics"
    if is_length_record(row.fields):
        return "csv"
    if is_request(row):
        return "vllm"
    raise TraceError(
        f"{row.file}, {row.place}: of no known format; verl has input and output, TRL prompt and completion, vLLM "
        f"output_tokens or usage; there are: {', '.join(map(str, row.fields))}; say which with --format"
    )


def _numbers_alone(path: Path) -> bool:
    """Whether a text file begins with a number, or with a JSON list of numbers."""
    try:
        with open_input(path) as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t[")[:1].isdigit()
    except OSError:
        return False
