"""The tables of a trace from a CSV of response lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError, TraceError

from .schema import Manifest

PROMPT_TOKENS = (
    "prompt_tokens", "input_len", "input_tokens", "prompt_len", "prompt_length", "input_length", "num_prompt_tokens",
    "input_toks", "prompt_toks", "contexttokens",
)  # fmt: skip
RESPONSE_TOKENS = (
    "response_tokens", "output_len", "output_tokens", "completion_tokens", "response_length", "response_len",
    "output_length", "completion_length", "generated_tokens", "num_output_tokens", "num_generated_tokens",
    "output_toks", "completion_toks", "generatedtokens",
)  # fmt: skip
RL_STEPS = ("rl_step", "step", "global_step", "training_step", "train_step", "iteration")
"""Names under which other programs keep the two lengths and the RL step."""

_LENGTHS = (*RESPONSE_TOKENS, "length", "lengths", "tokens")
_OTHERS = {"rl_step": RL_STEPS, "prompt_id": ("prompt_id",), "sample": ("sample",), "prompt_tokens": PROMPT_TOKENS}


def tables_from_csv(
    path: str | Path,
    *,
    column: str | None = None,
    workers: int | None = None,
    group_size: int | None = None,
    max_response_tokens: int | None = None,
) -> tuple[Manifest, dict[str, pd.DataFrame]]:
    """Read a CSV with one response length (tokens) per row as the manifest and tables of an "imported" trace.

    The header is optional. `column` names the lengths, by default one that is called so or the only numeric column.
    Columns `rl_step` (or `step`, `global_step`, `training_step`, `iteration`), `prompt_id`, `sample` and
    `prompt_tokens` are used where they are there, in capitals too; without `prompt_id` every `group_size` (default 1)
    rows in a row of an RL step are the samples of one prompt, without `rl_step` all is one RL step.
    With `max_response_tokens` a response of that length was cut ("length"), a longer one is a fault; without, the
    longest length is the cap and all responses count as finished ("stop"). Times and workers stay unknown. The
    manifest's `notes` say which columns were used, which were not, and what was assumed.
    Raises TraceError naming the file, the column and the line, or two columns that could be meant and differ.

    A file with the lines `length`, `310`, `4096`, `95` gives the prompts p0, p1 and p2 with one sample each.
    """
    path = Path(path)
    frame = _read_csv(path)
    columns = _columns(path, frame, column)
    lengths = _whole(path, frame, columns["response_tokens"], at_least=1)
    if max_response_tokens is not None and (over := lengths > max_response_tokens).any():
        line, got = lengths.index[over][0], lengths[over].iloc[0]
        raise TraceError(
            f"{path}: column {lengths.name}, line {line}: got {got}, the maximum was said to be {max_response_tokens}"
        )
    cap = int(lengths.max()) if max_response_tokens is None else max_response_tokens
    group = 1 if group_size is None else group_size
    if group < 1 or (workers is not None and workers < 1):
        raise ConfigError(f"got group size {group} and {workers} workers; both must be at least 1")
    known = {
        name: _whole(path, frame, own, at_least=0).to_numpy()
        for name, own in columns.items()
        if name not in ("response_tokens", "prompt_id")
    }
    key = pd.DataFrame({"rl_step": known.get("rl_step", np.zeros(len(frame), int))})
    groups = key.assign(group=key.groupby("rl_step").cumcount() // group).groupby(["rl_step", "group"], sort=False)
    own_ids = [f"p{i}" for i in groups.ngroup()]
    key["prompt_id"] = frame[columns["prompt_id"]].to_numpy() if "prompt_id" in columns else own_ids
    key["sample"] = known.get("sample", key.groupby(["rl_step", "prompt_id"], sort=False).cumcount())
    prompt_tokens = known.get("prompt_tokens", 0)
    cut = lengths.to_numpy() == max_response_tokens if max_response_tokens is not None else np.zeros(len(frame), bool)
    notes = [_columns_note(frame, columns)] if frame.shape[1] > 1 else []
    if max_response_tokens is None:
        notes.append(f"the cap is unknown: the longest response ({cap} tokens) is taken for it, all count as finished")
    if "prompt_tokens" not in columns:
        notes.append("prompt tokens are unknown: 0")
    incomplete = groups.size().loc[lambda size: size < group]
    if "prompt_id" not in columns and len(incomplete):
        which = "the last group" if len(incomplete) == 1 else f"the last group of {len(incomplete)} RL steps"
        notes.append(f"{which} is incomplete: {incomplete.iloc[0]} of {group} samples")
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
    """Workload and outcomes of responses known by their lengths alone; `cut` says which reached the cap.

    `epoch` counts the earlier RL steps with the same prompt.
    """
    visits = key[["rl_step", "prompt_id"]].drop_duplicates().sort_values("rl_step", kind="stable")
    visits["epoch"] = visits.groupby("prompt_id", sort=False).cumcount()
    epoch = key.merge(visits, on=["rl_step", "prompt_id"], how="left")["epoch"].to_numpy()
    workload = key.assign(
        turn=0, epoch=epoch, prompt_tokens=prompt_tokens, max_response_tokens=cap, policy_version=key["rl_step"]
    )
    outcomes = key.assign(turn=0, response_tokens=lengths, finish_reason=np.where(cut, "length", "stop"))
    return {"workload": workload, "outcomes": outcomes}


def _read_csv(path: Path) -> pd.DataFrame:
    """All cells as text, indexed by line number; columns are named c0, c1, ... without a header.

    Between cells is a comma; where the first line has none, a semicolon or a tab if it has that.
    """

    def cells_between(separator: str) -> pd.DataFrame:
        return pd.read_csv(
            path, header=None, dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig",
            sep=separator,
        )  # fmt: skip

    try:
        frame = cells_between(",")
        first = str(frame.iloc[0, 0]) if frame.shape[1] == 1 else ""
        if separator := next((each for each in ";\t" if each in first), None):
            frame = cells_between(separator)
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


def _columns(path: Path, frame: pd.DataFrame, lengths: str | None) -> dict[str, str]:
    """The file's column for each column of a trace that it has; `lengths` is the one that the user named."""
    names = ", ".join(frame.columns)
    if lengths is not None and lengths not in frame:
        raise TraceError(f"{path}: no column {lengths!r}; there are: {names}")
    called = lengths or _called(path, frame, _LENGTHS, "the lengths")
    rest = frame.drop(columns=[] if called is None else [called])
    others = {name: _called(path, rest, asked, name) for name, asked in _OTHERS.items()}
    columns = {name: column for name, column in others.items() if column is not None}
    if called is None:
        left = [str(name) for name in frame.columns if name not in columns.values()]
        numeric = [name for name in left if pd.to_numeric(frame[name], errors="coerce").notna().all()]
        # What a column holds that is no number is said with its line.
        called = numeric[0] if len(numeric) == 1 else left[0] if len(left) == 1 else None
        if called is None:
            raise TraceError(f"{path}: cannot tell which column holds the lengths; name one with --column: {names}")
    return {"response_tokens": called} | columns


def _called(path: Path, frame: pd.DataFrame, names: tuple[str, ...], what: str) -> str | None:
    """The column with one of these names, the trace's own first; of others with one each only if they say the same."""
    plain = {str(name): str(name).lower().replace(" ", "_").replace("-", "_") for name in frame.columns}
    meant = [own for name in names for own, said in plain.items() if said == name]
    if meant and meant[0] != names[0]:
        for other in meant[1:]:
            if not frame[other].equals(frame[meant[0]]):
                raise TraceError(
                    f"{path}: columns {meant[0]} and {other} differ and either could be {what}: keep one, or call it "
                    f"{names[0]}"
                )
    return meant[0] if meant else None


def _columns_note(frame: pd.DataFrame, columns: dict[str, str]) -> str:
    used = ", ".join(name if name == own else f"{name} from {own}" for name, own in columns.items())
    left = [str(name) for name in frame.columns if name not in columns.values()]
    return f"columns read: {used}" + (f" (not read: {', '.join(left)})" if left else "")


def _whole(path: Path, frame: pd.DataFrame, column: str, *, at_least: int) -> pd.Series[Any]:
    """A column of text as whole numbers; the first cell that is none is named."""
    number = pd.to_numeric(frame[column], errors="coerce")
    ok = number.notna() & (number >= at_least) & (number <= 2**31 - 1) & (number == np.floor(number))
    if not ok.all():
        line = ok.index[~ok.to_numpy()][0]
        got = frame[column].loc[line]
        raise TraceError(f"{path}: column {column}, line {line}: got {got!r}, wanted a whole number >= {at_least}")
    return number.astype(np.int64)
