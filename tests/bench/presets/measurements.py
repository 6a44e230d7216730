"""Published measurements as one table: servers under load, speculation, or single iterations.

A measurement is a row of one table, `COLUMNS`; what is measured depends on its `kind`:

    tpot       mean seconds between tokens of a server that always holds `batch` requests (`from_tpot`)
    served     the same, with a measured time to first token, during which a request does not decode
    wave       the same where `batch` requests come at once, after a measured time to first token (`from_waves`)
    speedup    plain decoding's time per token over that with speculation (`from_speedups`)
    iteration  seconds of one iteration
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from tltlab.arrays import Flags, Floats
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, kv_capacity_tokens, model

COLUMNS = (
    "kind", "source", "gpu", "model", "tp", "batch", "tokens_to_verify", "draft_depth", "draft_levels", "top_k",
    "context_tokens", "input_tokens", "output_tokens", "prefill_tokens", "accept_length", "ttft_s", "measured",
)  # fmt: skip


ERRORS = ("source", "what", "n_points", "used_for_fit", "mean_abs_error", "max_abs_error", "note")
"""Columns of a table of relative errors, of which `error_row` makes a row."""
REPEATED = "vLLM study"
"""The source that ran every cell several times."""


def error_row(source: str, what: str, used: bool, error: Floats | pd.Series[float], note: str) -> tuple[object, ...]:
    size = np.abs(np.asarray(error, np.float64))
    return source, what, len(size), used, float(size.mean()), float(size.max()), note


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


def measured_table(path: Path, numbers: Sequence[str], texts: Sequence[str] = ()) -> pd.DataFrame:
    """A CSV or parquet file that has these columns, `numbers` of them numeric; else a ConfigError that names it."""
    if not path.is_file():
        raise ConfigError(f"no {path.name} in {path.parent}: give the folder of published measurements")
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except pd.errors.EmptyDataError as error:
        raise ConfigError(f"{path} is empty; wanted the columns {', '.join((*texts, *numbers))}") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if missing := [name for name in (*texts, *numbers) if name not in table]:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; there are {', '.join(map(str, table.columns))}")
    if table.empty:
        raise ConfigError(f"{path} has no rows")
    for name in numbers:
        if not is_numeric_dtype(table[name]) or is_bool_dtype(table[name]):
            raise ConfigError(f"{path}: column {name} holds no numbers: it begins with {table[name].iloc[0]!r}")
    return table


def tlt_cells(data: Path) -> pd.DataFrame:
    """TLT's speed-ups by setting (Fig. 13, Tables 1 and 4), each with its `table`, `gpu` and `model`.

    Accept lengths that a table does not repeat are those of Fig. 13 at the same setting.
    """
    setting = ["draft_depth", "tokens_to_verify"]
    numbers = (*setting, "tp", "batch_size", "topk", "accept_length", "speedup")
    cells = measured_table(data / "tlt_sd_tables.csv", numbers, ("table", "gpu", "model"))
    lengths = cells[cells["table"] == "fig13"].set_index(setting)["accept_length"]
    listed = lengths.reindex(pd.MultiIndex.from_frame(cells[setting])).to_numpy()
    return cells.assign(accept_length=cells["accept_length"].fillna(pd.Series(listed, cells.index)))


def eagle3_cells(data: Path, accept_length: float) -> pd.DataFrame:
    """EAGLE-3's speed-ups by batch, a chain of 3 (arXiv 2503.01840, Table 3), which gives no accept length."""
    table = measured_table(data / "eagle3_speedup_by_batch.csv", ("batch_size", "throughput_speedup"), ("method",))
    return table[table["method"] == "EAGLE-3"].assign(
        gpu="H100", model="Llama-3.1-8B", tp=1, draft_depth=3, topk=1, tokens_to_verify=4, context_tokens=512.0,
        accept_length=accept_length, speedup=table["throughput_speedup"],
    )  # fmt: skip


def fits_kv_cache(rows: pd.DataFrame) -> Flags:
    """True where a row's requests fit in the KV cache with complete responses, by `tltlab.hardware`.

    Where they do not fit, a measured time per token holds queueing and preemption.
    """
    weights = rows.get("weights", pd.Series("bf16", rows.index))
    servers = zip(rows["gpu"], rows["model"], rows["tp"], weights, strict=True)
    capacity = [kv_capacity_tokens(gpu(g), model(m), int(tp), weights=w) for g, m, tp, w in servers]
    return (rows["concurrency"] * (rows["isl"] + rows["osl"]) <= capacity).to_numpy(bool)
