"""The tables of a trace from a CSV of response lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError, TraceError

from .schema import Manifest

LENGTH_COLUMNS = ("response_tokens", "length", "lengths", "tokens", "response_length", "output_tokens")
OTHER_COLUMNS = ("prompt_id", "rl_step", "sample", "prompt_tokens")


def tables_from_csv(
    path: str | Path,
    *,
    column: str | None = None,
    workers: int | None = None,
    group_size: int | None = None,
    max_response_tokens: int | None = None,
) -> tuple[Manifest, dict[str, pd.DataFrame]]:
    """Read a CSV with one response length (tokens) per row as the manifest and tables of an "imported" trace.

    The header is optional. `column` names the lengths, by default one of LENGTH_COLUMNS or the only numeric column.
    Columns `rl_step`, `prompt_id`, `sample` and `prompt_tokens` are used where they are there; without `prompt_id`
    every `group_size` (default 1) rows in a row are the samples of one prompt, without `rl_step` all is one RL step.
    With `max_response_tokens` a response of that length was cut ("length"), a longer one is a fault; without, the
    longest length is the cap and all responses count as finished ("stop"). Times and workers stay unknown. The
    manifest's `notes` say what was assumed.
    Raises TraceError naming the file, the column and the line.

    A file with the lines `length`, `310`, `4096`, `95` gives the prompts p0, p1 and p2 with one sample each.
    """
    path = Path(path)
    frame = _read_csv(path)
    lengths = _whole(path, frame, _length_column(path, frame, column), at_least=1)
    if max_response_tokens is not None and (over := lengths > max_response_tokens).any():
        line, got = lengths.index[over][0], lengths[over].iloc[0]
        raise TraceError(
            f"{path}: column {lengths.name}, line {line}: got {got}, the maximum was said to be {max_response_tokens}"
        )
    cap = int(lengths.max()) if max_response_tokens is None else max_response_tokens
    group = 1 if group_size is None else group_size
    if group < 1 or (workers is not None and workers < 1):
        raise ConfigError(f"got group size {group} and {workers} workers; both must be at least 1")
    number = np.arange(len(frame))
    rl_step = _whole(path, frame, "rl_step", at_least=0) if "rl_step" in frame else np.zeros(len(frame), int)
    prompt_id = frame["prompt_id"] if "prompt_id" in frame else pd.Series([f"p{i}" for i in number // group])
    key = pd.DataFrame({"rl_step": np.asarray(rl_step), "prompt_id": prompt_id.to_numpy()})
    if "sample" in frame:
        key["sample"] = _whole(path, frame, "sample", at_least=0).to_numpy()
    else:
        key["sample"] = key.groupby(["rl_step", "prompt_id"], sort=False).cumcount()
    prompt_tokens = _whole(path, frame, "prompt_tokens", at_least=0) if "prompt_tokens" in frame else 0
    cut = lengths.to_numpy() == max_response_tokens if max_response_tokens is not None else np.zeros(len(frame), bool)
    notes = []
    if max_response_tokens is None:
        notes.append(f"the cap is unknown: the longest response ({cap} tokens) is taken for it, all count as finished")
    if "prompt_tokens" not in frame:
        notes.append("prompt tokens are unknown: 0")
    if "prompt_id" not in frame and (left := len(frame) % group):
        notes.append(f"the last group is incomplete: {left} of {group} samples")
    manifest = Manifest(
        kind="imported",
        name=path.name.split(".")[0],
        source=path.name,
        num_workers=workers,
        max_response_tokens=cap,
        group_size=group_size,
        notes="; ".join(notes) or None,
    )
    return manifest, tables_of_lengths(key, lengths.to_numpy(), np.asarray(prompt_tokens), cap, cut)


def tables_of_lengths(
    key: pd.DataFrame, lengths: Any, prompt_tokens: Any, cap: int, cut: Any
) -> dict[str, pd.DataFrame]:
    """Workload and outcomes of responses known by their lengths alone; `cut` says which reached the cap."""
    workload = key.assign(
        turn=0, epoch=0, prompt_tokens=prompt_tokens, max_response_tokens=cap, policy_version=key["rl_step"]
    )
    outcomes = key.assign(turn=0, response_tokens=lengths, finish_reason=np.where(cut, "length", "stop"))
    return {"workload": workload, "outcomes": outcomes}


def _read_csv(path: Path) -> pd.DataFrame:
    """All cells as text, indexed by line number; columns are named c0, c1, ... without a header."""
    try:
        frame = pd.read_csv(
            path, header=None, dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig"
        )
    except pd.errors.EmptyDataError as error:
        raise TraceError(f"{path}: empty; wanted one response length per line") from error
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: not a CSV of response lengths: {error}") from error
    frame = pd.DataFrame({name: cells.str.strip() for name, cells in frame.items()})
    frame.index = frame.index + 1
    frame = frame[(frame != "").any(axis=1)]
    if len(frame) and pd.to_numeric(frame.iloc[0], errors="coerce").isna().all():
        frame.columns = pd.Index(frame.iloc[0])
        frame = frame.iloc[1:]
    else:
        frame.columns = pd.Index([f"c{i}" for i in range(frame.shape[1])])
    if frame.empty:
        raise TraceError(f"{path}: no rows; wanted one response length per line")
    if not frame.columns.is_unique:
        raise TraceError(f"{path}: column {frame.columns[frame.columns.duplicated()][0]!r} is there twice")
    return frame


def _length_column(path: Path, frame: pd.DataFrame, column: str | None) -> str:
    names = ", ".join(frame.columns)
    if column is not None:
        if column not in frame:
            raise TraceError(f"{path}: no column {column!r}; there are: {names}")
        return column
    for name in LENGTH_COLUMNS:
        if name in frame:
            return name
    numeric = [
        str(name)
        for name in frame.columns
        if name not in OTHER_COLUMNS and pd.to_numeric(frame[name], errors="coerce").notna().all()
    ]
    if len(numeric) != 1 and frame.shape[1] > 1:
        raise TraceError(f"{path}: cannot tell which column holds the lengths; name one with --column: {names}")
    return numeric[0] if numeric else str(frame.columns[0])


def _whole(path: Path, frame: pd.DataFrame, column: str, *, at_least: int) -> pd.Series[Any]:
    """A column of text as whole numbers; the first cell that is none is named."""
    number = pd.to_numeric(frame[column], errors="coerce")
    ok = number.notna() & (number >= at_least) & (number <= 2**31 - 1) & (number == np.floor(number))
    if not ok.all():
        line = ok.index[~ok.to_numpy()][0]
        got = frame[column].loc[line]
        raise TraceError(f"{path}: column {column}, line {line}: got {got!r}, wanted a whole number >= {at_least}")
    return number.astype(np.int64)
