"""Sources of a trace: a trace or RUN folder, a dump, a log, a table of response lengths, lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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

from .formats import Format, Imported, frame_of_numbers, guess, import_dump, imported
from .metrics_log import metrics_files
from .rows import Reading, dump_files, readable
from .token_counts import CharsPerToken, NoTokenCounter

CHARS_PER_TOKEN = 3.6
"""English prose in BPE tokens: for texts without a tokenizer."""

_AS_IT_IS = Reading()
TraceSource = str | Path | Trace | pd.DataFrame | pd.Series | NDArray[Any] | Sequence[int]
"""A trace as users give it: itself, where it is, or response lengths, in a DataFrame as a CSV has them or alone."""


def read(source: TraceSource) -> Trace:
    """Read and check a trace folder, a RUN folder (its `trace/`), a CSV of response lengths or a training log.

    A Trace stays unchanged. Folders of traces and recordings are read by `tltlab.traces.trace.read`; other files, and
    folders of TensorBoard, go through `import_dump`, and its notes and assumptions go to standard error. A
    DataFrame is read as a CSV is; an array or list holds lengths, of one RL step or as (RL steps, responses). Raises
    TraceError.
    """
    if isinstance(source, Trace):
        return source
    if not isinstance(source, str | Path):
        return _of_values(source, _AS_IT_IS).trace
    path = locate(source)
    if path.is_dir() and not is_log_folder(path):
        return read_folder(source)
    trace = import_dump(path)
    report(path, trace.manifest.notes)
    return trace


def is_log_folder(path: Path) -> bool:
    """Return True if a folder has no trace but files of TensorBoard."""
    return path.is_dir() and not _holds_a_trace(path) and bool(metrics_files(path))


def _holds_a_trace(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).exists() or any(map(is_trace, folder.iterdir()))


def read_lengths(source: TraceSource, reading: Reading = _AS_IT_IS, form: Format | None = None) -> Imported:
    """Read a file of lengths of any format, a trace, a DataFrame or an array; texts are counted by their characters.

    `reading` adds what the file does not have. Raises TraceError for what cannot be read, ConfigError.
    """
    # Exact counts need a tokenizer; for what depends on their shape an approximation will do.
    counts = isinstance(reading.tokens, NoTokenCounter)
    counted = replace(reading, tokens=CharsPerToken(CHARS_PER_TOKEN)) if counts else reading
    if isinstance(source, Trace):
        return Imported.whole(source)
    if not isinstance(source, str | Path):
        return _of_values(source, counted)
    with readable(locate(source)) as path:
        if path.is_file() or (not _holds_a_trace(path) and dump_files(path)):
            form = form or guess(path, reading)
            return imported(path, reading if form == "metrics" else counted, form=form)
    return Imported.whole(read(source))


def _of_values(source: Any, reading: Reading) -> Imported:
    """Lengths in a DataFrame, or alone in an array, list or Series."""
    if isinstance(source, pd.DataFrame | pd.Series | np.ndarray | list | tuple) and len(source):
        return imported(source if isinstance(source, pd.DataFrame) else frame_of_numbers("lengths", source), reading)
    raise TraceError(
        f"got {shown(source)} for a trace; it is a Trace, the path of a trace, a RUN or a CSV, or response lengths"
    )
