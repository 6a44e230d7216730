"""Traces from response lengths alone: a list, or a CSV of lengths from anyone's run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.traces.csv import tables_from_csv, tables_of_lengths
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace


def from_csv(
    path: str | Path,
    *,
    column: str | None = None,
    workers: int | None = None,
    group_size: int | None = None,
    max_response_tokens: int | None = None,
) -> Trace:
    """Read a CSV with one response length (tokens) per row as a trace; see `lengths_csv.tables_from_csv`."""
    return Trace.from_tables(
        *tables_from_csv(
            path, column=column, workers=workers, group_size=group_size, max_response_tokens=max_response_tokens
        )
    )


def of_lengths(
    response_tokens: Sequence[int],
    *,
    workers: int | None = None,
    prompt_tokens: int = 128,
    max_response_tokens: int | None = None,
) -> Trace:
    """One RL step of responses with these lengths, each to a prompt of its own.

    `max_response_tokens` is the longest length where it is not given. Raises TraceError for a length below 1.

    >>> of_lengths([310, 4096, 95], workers=2).rl_steps
    [0]
    """
    n = len(response_tokens)
    key = pd.DataFrame({"rl_step": 0, "prompt_id": [f"p{i}" for i in range(n)], "sample": 0, "turn": 0})
    cap = max(response_tokens, default=1) if max_response_tokens is None else max_response_tokens
    lengths = np.asarray(response_tokens, np.int64)
    tables = tables_of_lengths(key, lengths, np.full(n, prompt_tokens), cap, lengths >= cap)
    return Trace.from_tables(Manifest(kind="imported", num_workers=workers, max_response_tokens=cap), tables)
