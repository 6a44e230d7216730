"""Traces of responses known by their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from tltlab.importers.responses import tables_of_lengths
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format, imported
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace


def of_lengths(
    response_tokens: Sequence[int],
    *,
    workers: int | None = None,
    prompt_tokens: int = 128,
    max_response_tokens: int | None = None,
) -> Trace:
    """One RL step of responses with these lengths, each to its own prompt; the longest is the cap if none is."""
    n = len(response_tokens)
    key = pd.DataFrame({"rl_step": 0, "prompt_id": [f"p{i}" for i in range(n)], "sample": 0, "turn": 0})
    cap = max(response_tokens, default=1) if max_response_tokens is None else max_response_tokens
    lengths = np.asarray(response_tokens, np.int64)
    tables = tables_of_lengths(key, lengths, np.full(n, prompt_tokens), cap, lengths >= cap)
    return Trace.from_tables(Manifest(kind="imported", num_workers=workers, max_response_tokens=cap), tables)


def of_samples(
    lengths: ArrayLike,
    cap: int,
    *,
    prompt_id: ArrayLike,
    sample: ArrayLike,
    rl_step: ArrayLike = 0,
    prompt_tokens: ArrayLike = 0,
) -> Trace:
    """Responses by RL step, prompt and sample; those that reach the cap are cut."""
    key = pd.DataFrame({"rl_step": rl_step, "prompt_id": prompt_id, "sample": sample}).reset_index(drop=True)
    tokens = np.asarray(lengths)
    tables = tables_of_lengths(key, tokens, np.asarray(prompt_tokens), cap, tokens >= cap)
    return Trace.from_tables(Manifest(kind="imported"), tables)


def import_dump(path: Path, *, form: Format | None = None, workers: int | None = None, **facts: Any) -> Trace:
    """The trace of a dump; `facts` are fields of `Reading`."""
    return imported(path, Reading(**facts), form=form, workers=workers).trace
