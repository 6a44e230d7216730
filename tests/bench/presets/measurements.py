"""Measured times as one table, whatever was measured: servers under load, speculation, or single iterations.

A measurement is a row of one table, `COLUMNS`; what is measured depends on its `kind`:

    tpot       mean seconds between tokens of a server that always holds `batch` requests (`from_tpot`)
    served     the same, with a measured time to first token, during which a request does not decode
    wave       the same where `batch` requests come at once, after a measured time to first token (`from_waves`)
    speedup    plain decoding's time per token over that with speculation (`from_speedups`)
    iteration  seconds of one iteration
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError

COLUMNS = (
    "kind", "source", "gpu", "model", "tp", "batch", "tokens_to_verify", "draft_depth", "draft_levels", "top_k",
    "context_tokens", "input_tokens", "output_tokens", "prefill_tokens", "accept_length", "ttft_s", "measured",
)  # fmt: skip


def from_tpot(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Measurements of a server under a closed loop: gpu, model, tp, concurrency, isl, osl and tpot_s."""
    _need(table, ("gpu", "model", "tp", "concurrency", "isl", "osl", "tpot_s"), source)
    renamed = {"concurrency": "batch", "isl": "input_tokens", "osl": "output_tokens", "tpot_s": "measured"}
    return _rows(table.rename(columns=renamed), "tpot", source)


def from_waves(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Measurements of a server that gets all its requests at once: the columns of `from_tpot`, and ttft_s."""
    _need(table, ("ttft_s",), source)
    return from_tpot(table, source).assign(kind="wave", ttft_s=table["ttft_s"].to_numpy(np.float64))


def from_speedups(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Measurements of speculation: gpu, model, tp, batch_size, draft_depth, topk, tokens_to_verify, accept_length,
    speedup, and where known context_tokens per request.
    """
    needed = ("gpu", "model", "tp", "batch_size", "draft_depth", "topk", "tokens_to_verify", "accept_length", "speedup")
    _need(table, needed, source)
    return _rows(
        table.rename(columns={"batch_size": "batch", "topk": "top_k", "speedup": "measured"}), "speedup", source
    )


def _rows(table: pd.DataFrame, kind: str, source: str) -> pd.DataFrame:
    rows = table.assign(kind=kind, source=source).reindex(columns=list(COLUMNS)).reset_index(drop=True)
    wrong = ~(rows["measured"] > 0) | ~(rows["batch"] > 0) | ~(rows["tp"] > 0)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ConfigError(f"{source}: row {at} has no positive batch, tp and measured value: {rows.loc[at].to_dict()}")
    return rows


def _need(table: pd.DataFrame, columns: Sequence[str], source: str) -> None:
    missing = [name for name in columns if name not in table]
    if missing:
        raise ConfigError(f"{source}: no column {', '.join(missing)} among {', '.join(map(str, table.columns))}")
