"""What users give for a trace: a trace or RUN folder, a dump, a log, a table of response lengths, lengths alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tltlab.config import shown
from tltlab.errors import TraceError
from tltlab.traces.schema import MANIFEST_FILE
from tltlab.traces.trace import Trace, is_trace, locate, report
from tltlab.traces.trace import read as read_folder

from .formats import Format, first_row, guess, import_dump
from .length_table import PROMPT_IDS, PROMPT_TOKENS, RESPONSE_TOKENS, RL_STEPS, LengthTable, trace_of
from .metrics_log import metrics_files
from .text_dumps import trl_files, verl_files
from .token_counts import CharsPerToken

CHARS_PER_TOKEN = 3.6
"""English prose in BPE tokens: for texts without a tokenizer."""

TraceSource = str | Path | Trace | pd.DataFrame | pd.Series | NDArray[Any] | Sequence[int]
"""A trace as users give it: itself, where it is, or response lengths, in a DataFrame as a CSV has them or alone."""


def read(source: TraceSource) -> Trace:
    """Read and check a trace folder, a RUN folder (its `trace/`), a CSV of response lengths or a training log.

    A Trace stays as it is. Folders of traces and recordings are read by `tltlab.traces.trace.read`; other files, and
    folders of TensorBoard, are what `import_dump` makes of them, and standard error says what was read and assumed. A
    DataFrame is read as a CSV is; an array or list holds lengths, of one RL step or as (RL steps, responses). Raises
    TraceError.
    """
    if isinstance(source, Trace):
        return source
    if not isinstance(source, str | Path):
        if isinstance(source, pd.DataFrame | pd.Series | np.ndarray | list | tuple) and len(source):
            return trace_of(LengthTable.read(source))
        raise TraceError(
            f"got {shown(source)} for a trace; it is a Trace, the path of a trace, a RUN or a CSV, or response lengths"
        )
    path = locate(source)
    if not path.is_file() and not is_log_folder(path):
        return read_folder(source)
    is_table = ".csv" in path.suffixes and guess(path) != "metrics"
    trace = import_dump(path, form="csv" if is_table else None)
    report(path, trace.manifest.notes)
    return trace


def is_log_folder(path: Path) -> bool:
    """Whether a folder has no trace, and has files of TensorBoard."""
    if not path.is_dir() or (path / MANIFEST_FILE).exists() or any(map(is_trace, path.iterdir())):
        return False
    return bool(metrics_files(path))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A trace with what was read of its source: the source's column for each column of a trace, and its others."""

    trace: Trace
    used: Mapping[str, str]
    ignored: Sequence[str]
    notes: Sequence[str]


def read_lengths(source: TraceSource, column: str | None = None) -> Lengths:
    """Read a file of lengths of any format, a trace, a DataFrame or an array; texts are counted by their characters.

    `column` names the lengths where a table does not. Raises TraceError for what cannot be read, ConfigError.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    if path is not None and not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    dump = path is not None and (path.is_file() or bool(verl_files(path) or trl_files(path)))
    form = None if path is None or not dump else "csv" if column is not None else guess(path)
    if isinstance(source, Trace) or (path is not None and form is None):
        trace = read(source)
        return Lengths(trace=trace, used={}, ignored=(), notes=_notes(trace))
    if path is None or form in (None, "csv"):
        table = LengthTable.read(source, column)
        trace = trace_of(table)
        notes = tuple(note for note in _notes(trace) if note != table.note())
        return Lengths(trace=trace, used=table.columns, ignored=table.ignored, notes=notes)
    # Exact counts need a tokenizer; for what depends on their shape an approximation will do.
    counter = CharsPerToken(CHARS_PER_TOKEN) if form in ("verl", "trl") else None
    trace = import_dump(path, form=form, tokens=counter)
    columns, ignored = _used_fields(path, form)
    return Lengths(trace=trace, used=columns, ignored=ignored, notes=_notes(trace))


def _notes(trace: Trace) -> tuple[str, ...]:
    return tuple(trace.manifest.notes.split("; ")) if trace.manifest.notes else ()


_FIELDS: dict[str, tuple[Sequence[str], ...]] = {
    "verl": (("input",), (), ("output",), ("score",)),
    "trl": (("prompt",), (), ("completion",), ()),
    "vllm": ((*PROMPT_IDS, "prompt"), ("usage",), ("usage",), ("reward",)),
}
"""By format: the fields of the prompt's name, of the two lengths beside their usual names, and of the reward."""


def _used_fields(path: Path, form: Format) -> tuple[dict[str, str], tuple[str, ...]]:
    """The dump's field for each column of a trace, and its other fields, by its first record."""
    if form == "metrics":
        return {}, ()
    files = [path] if path.is_file() else (verl_files(path) if form == "verl" else trl_files(path))
    names = list(map(str, first_row(files[0]).fields))
    prompt_id, prompt_tokens, response_tokens, reward = _FIELDS[form]
    candidates: dict[str, Sequence[str]] = {
        "rl_step": RL_STEPS, "prompt_tokens": (*PROMPT_TOKENS, *prompt_tokens),
        "response_tokens": (*RESPONSE_TOKENS, *response_tokens), "prompt_id": prompt_id, "reward": reward,
    }  # fmt: skip
    first = {column: next((n for n in fields if n in names), None) for column, fields in candidates.items()}
    columns = {column: field for column, field in first.items() if field is not None}
    return columns, tuple(name for name in names if name not in columns.values())
