"""Traces of responses known by their lengths alone, and tables of iterations."""

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
    prompt_id: ArrayLike = "p",
    sample: ArrayLike | None = None,
    rl_step: ArrayLike = 0,
    prompt_tokens: ArrayLike = 0,
    **outcomes: Any,
) -> Trace:
    """Responses by RL step, prompt and sample; those that reach the cap are cut. `outcomes`: further columns."""
    tokens = np.asarray(lengths)
    numbers = range(len(tokens)) if sample is None else sample
    key = pd.DataFrame({"rl_step": rl_step, "prompt_id": prompt_id, "sample": numbers}).reset_index(drop=True)
    tables = tables_of_lengths(key, tokens, np.asarray(prompt_tokens), cap, tokens >= cap)
    tables["outcomes"] = tables["outcomes"].assign(**outcomes)
    return Trace.from_tables(Manifest(kind="imported"), tables)


def iterations(**columns: Any) -> pd.DataFrame:
    """Iterations with these columns, of one worker in RL step 0 one after the other; columns left out follow from them.

    Drafts are chains of n-grams for each request of the batch, `draft_depth` tokens long, 0 if not given.
    """
    accepted = columns.get("accepted_per_request")
    fixed = {
        "rl_step": 0,
        "worker": 0,
        "duration": 1.0,
        "context_tokens": 10,
        "prefill_tokens": 0,
        "draft_depth": 0,
        "num_accepted": 0 if accepted is None else [0 if kept is None else sum(kept) for kept in accepted],
    }
    table = pd.DataFrame(fixed | columns)
    depth = table["draft_depth"]
    follows = {
        "iteration": range(len(table)),
        "t_start": table["duration"].cumsum() - table["duration"],
        "drafter": np.where(depth > 0, "ngram", "none"),
        "top_k": np.sign(depth),
        "tokens_to_verify": depth + 1,
        "num_drafted": table["batch"] * depth,
        "num_generated": table["batch"] + table["num_accepted"],
    }
    return table.assign(**(follows | columns))


def import_dump(path: Path, *, form: Format | None = None, workers: int | None = None, **facts: Any) -> Trace:
    """The trace of a dump; `facts` are fields of `Reading`."""
    return imported(path, Reading(**facts), form=form, workers=workers).trace
