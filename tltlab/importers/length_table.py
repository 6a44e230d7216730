"""A trace from a table of response lengths: a CSV, JSON, a Parquet file, a DataFrame, an array."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tltlab.errors import TraceError
from tltlab.files import parse_json, read_text
from tltlab.traces.schema import Manifest
from tltlab.traces.storage import check_parquet
from tltlab.traces.trace import Trace

from .rows import unpack

PROMPT_TOKENS = (
    "prompt_tokens", "input_len", "input_tokens", "prompt_len", "prompt_length", "input_length", "num_prompt_tokens",
    "input_toks", "prompt_toks", "contexttokens",
)  # fmt: skip
RESPONSE_TOKENS = (
    "response_tokens", "output_len", "output_tokens", "completion_tokens", "response_length", "response_len",
    "output_length", "completion_length", "generated_tokens", "num_output_tokens", "num_generated_tokens",
    "output_toks", "completion_toks", "generatedtokens", "completion_len", "gen_len", "generation_length",
    "num_response_tokens", "response_lengths", "completion_lengths", "output_lengths",
)  # fmt: skip
RL_STEPS = (
    "rl_step", "step", "global_step", "training_step", "train_step", "iteration", "global_steps", "train/global_step",
    "training/global_step", "trainer/global_step",
)  # fmt: skip
"""Names under which other programs keep the two lengths and the RL step."""

_LENGTHS = (*RESPONSE_TOKENS, "length", "lengths", "tokens", "num_tokens", "n_tokens")
PROMPT_IDS = ("prompt_id", "group", "group_id", "uid", "problem_id", "question_id", "task_id", "prompt_index")
_SAMPLES = ("sample", "sample_id", "sample_index", "rollout_index", "completion_index")
_SYNONYMS = {"rl_step": RL_STEPS, "prompt_id": PROMPT_IDS, "sample": _SAMPLES, "prompt_tokens": PROMPT_TOKENS}
_TABLES = (".csv", ".tsv", ".tab", ".json", ".jsonl", ".ndjson", ".parquet", ".txt")


@dataclass(frozen=True, kw_only=True)
class LengthTable:
    """One response per row: cells as text, and the table's column for each column of a trace that it has.

    `place` begins what is said of faults; `name` is the table's own.
    """

    frame: pd.DataFrame
    columns: Mapping[str, str]
    place: str
    name: str

    @classmethod
    def read(cls, source: str | Path | pd.DataFrame | Any, column: str | None = None) -> LengthTable:
        """A table from a file, a DataFrame, or the lengths alone: an array, list or Series.

        A file is a CSV (commas, semicolons or tabs; the header is optional), JSON Lines or a JSON list of numbers or
        flat objects, or Parquet; a list of lengths in a cell is as many rows. `column` names the lengths, by default
        one that is called so or the only numeric column. Raises TraceError naming what cannot be understood, or two
        columns that could be meant and differ.
        """
        if isinstance(source, str | Path):
            place, name, frame = str(source), Path(source).name, _read_file(Path(source))
        else:
            place, name = "lengths", "lengths"
            frame = _as_text(place, source if isinstance(source, pd.DataFrame) else _frame_of_numbers(place, source))
        return cls(frame=frame, columns=_columns(place, frame, column), place=place, name=name)

    @property
    def ignored(self) -> list[str]:
        """The table's columns that no column of a trace is read from."""
        return [str(name) for name in self.frame.columns if name not in self.columns.values()]

    def whole(self, column: str, *, at_least: int) -> pd.Series[Any]:
        """A column of text as whole numbers; the first cell that is none is named."""
        number = pd.to_numeric(self.frame[column], errors="coerce")
        ok = number.notna() & (number >= at_least) & (number <= 2**31 - 1) & (number == np.floor(number))
        if not ok.all():
            line = ok.index[~ok.to_numpy()][0]
            got = self.frame[column].loc[line]
            raise TraceError(
                f"{self.place}: column {column}, line {line}: got {got!r}, wanted a whole number >= {at_least}"
            )
        return number.astype(np.int64)

    def note(self) -> str:
        """Which columns were read, and which were not."""
        names = ", ".join(name if name == column else f"{name} from {column}" for name, column in self.columns.items())
        return f"columns read: {names}" + (f" (not read: {', '.join(self.ignored)})" if self.ignored else "")


def trace_of(
    table: LengthTable,
    *,
    workers: int | None = None,
    group_size: int | None = None,
    max_response_tokens: int | None = None,
) -> Trace:
    """Make an "imported" trace of one response per row.

    Columns `rl_step` (or `step`, `global_step`, `training_step`, `iteration`; `epoch` where none of these is),
    `prompt_id` (`group`, `uid`), `sample` and `prompt_tokens` are used where they are there, in capitals too; without
    `prompt_id` every `group_size` (default 1) rows in a row of an RL step are the samples of one prompt, without
    `rl_step` all is one RL step.
    With `max_response_tokens` a response of that length was cut ("length"), a longer one is a fault; without, the
    longest length is the cap and all responses count as finished ("stop"). Times and workers stay unknown. The
    manifest's `notes` say which columns were used, which were not, and what was assumed.
    Raises TraceError naming the file, the column and the line.

    A file with the lines `length`, `310`, `4096`, `95` gives the prompts p0, p1 and p2 with one sample each.
    """
    frame, columns = table.frame, table.columns
    lengths = table.whole(columns["response_tokens"], at_least=1)
    if max_response_tokens is not None and (over := lengths > max_response_tokens).any():
        line, got = lengths.index[over][0], lengths[over].iloc[0]
        raise TraceError(
            f"{table.place}: column {lengths.name}, line {line}: got {got}, the maximum was said to be "
            f"{max_response_tokens}"
        )
    cap = int(lengths.max()) if max_response_tokens is None else max_response_tokens
    group = group_size or 1
    whole = [name for name in columns if name not in ("response_tokens", "prompt_id")]
    numbers = {name: table.whole(columns[name], at_least=0).to_numpy() for name in whole}
    key = pd.DataFrame({"rl_step": numbers.get("rl_step", np.zeros(len(frame), int))})
    groups = key.assign(group=key.groupby("rl_step").cumcount() // group).groupby(["rl_step", "group"], sort=False)
    ids = frame[columns["prompt_id"]].array if "prompt_id" in columns else [f"p{i}" for i in groups.ngroup()]
    key["prompt_id"] = ids
    key["sample"] = numbers.get("sample", key.groupby(["rl_step", "prompt_id"], sort=False).cumcount())
    prompt_tokens = numbers.get("prompt_tokens", 0)
    cut = (lengths == max_response_tokens).to_numpy()
    notes = [table.note()] if frame.shape[1] > 1 else []
    if max_response_tokens is None:
        notes.append(f"the cap is unknown: the longest response ({cap} tokens) is taken for it, all count as finished")
    if "prompt_tokens" not in columns:
        notes.append("prompt tokens are unknown: 0")
    incomplete = groups.size().loc[lambda size: size < group]
    if "prompt_id" not in columns and len(incomplete):
        subject = "the last group" if len(incomplete) == 1 else f"the last group of {len(incomplete)} RL steps"
        notes.append(f"{subject} is incomplete: {incomplete.iloc[0]} of {group} samples")
    manifest = Manifest(
        kind="imported", name=table.name.split(".")[0], source=table.name, num_workers=workers,
        max_response_tokens=cap, group_size=group_size, notes="; ".join(notes) or None,
    )  # fmt: skip
    tables = tables_of_lengths(key, lengths.to_numpy(), np.asarray(prompt_tokens), cap, cut)
    return Trace.from_tables(manifest, tables)


def is_length_record(fields: Mapping[str, Any]) -> bool:
    """Whether a record is a row of a table of lengths: it has one, or a list of them, and no prompt's length."""
    plain = {_plain(name): value for name, value in fields.items()}
    if any(name in plain for name in PROMPT_TOKENS if not isinstance(plain.get(name), list)):
        return False
    return any(_counts(plain.get(name)) for name in _LENGTHS)


def tables_of_lengths(
    key: pd.DataFrame, lengths: Any, prompt_tokens: Any, cap: Any, cut: Any
) -> dict[str, pd.DataFrame]:
    """Workload and outcomes of responses known by their lengths alone; `cut` says which reached the cap.

    One cap counts for all, an array has one for each. `epoch` counts the earlier RL steps with the same prompt.
    """
    visits = key[["rl_step", "prompt_id"]].drop_duplicates().sort_values("rl_step", kind="stable")
    visits["epoch"] = visits.groupby("prompt_id", sort=False).cumcount()
    epoch = key.merge(visits, on=["rl_step", "prompt_id"], how="left")["epoch"].to_numpy()
    workload = key.assign(
        turn=0, epoch=epoch, prompt_tokens=prompt_tokens, max_response_tokens=cap, policy_version=key["rl_step"]
    )
    outcomes = key.assign(turn=0, response_tokens=lengths, finish_reason=np.where(cut, "length", "stop"))
    return {"workload": workload, "outcomes": outcomes}


def _read_file(path: Path) -> pd.DataFrame:
    """The table in a file, cells as text, indexed by line number; c0, c1, ... are columns without a header."""
    suffix = next((ending for ending in path.suffixes[::-1] if ending in _TABLES), ".csv")
    try:
        if suffix == ".parquet":
            check_parquet(path)
            return _as_text(str(path), pd.read_parquet(path))
        if suffix in (".json", ".jsonl", ".ndjson"):
            values = _json_values(read_text(path, encoding="utf-8-sig"))
            return _as_text(str(path), _frame_of_numbers(str(path), values))
        return _read_csv(path)
    except pd.errors.EmptyDataError as error:
        raise TraceError(f"{path}: empty; wanted one response length per line") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a CSV of response lengths: {error}") from error


def _read_csv(path: Path) -> pd.DataFrame:
    """Between cells is a comma; where the first line has none, a semicolon or a tab if it has that."""
    text = io.BytesIO(unpack(path))

    def cells_between(separator: str) -> pd.DataFrame:
        text.seek(0)
        return pd.read_csv(
            text, header=None, dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig",
            sep=separator,
        )  # fmt: skip

    frame = cells_between(",")
    first = str(frame.iloc[0, 0]) if frame.shape[1] == 1 else ""
    if separator := next((mark for mark in ";\t" if mark in first), None):
        frame = cells_between(separator)
    frame = pd.DataFrame({name: cells.str.strip() for name, cells in frame.items()})
    frame.index = frame.index + 1
    frame = frame[(frame != "").any(axis=1)]
    if len(frame) and pd.to_numeric(frame.iloc[0], errors="coerce").isna().all():
        frame.columns = pd.Index(frame.iloc[0])
        frame = frame.iloc[1:]
    else:
        frame.columns = pd.Index([f"c{i}" for i in range(frame.shape[1])])
    return _as_text(str(path), frame)


def _json_values(text: str) -> list[Any]:
    """The records of JSON: a list, one object, or one value on each line."""
    try:
        values = parse_json(text)
    except ValueError:
        values = [parse_json(line) for line in text.splitlines() if line.strip()]
    return values if isinstance(values, list) else [values]


def _frame_of_numbers(place: str, source: Any) -> pd.DataFrame:
    """A frame of lengths alone, or of flat objects."""
    if isinstance(source, list) and source and isinstance(source[0], Mapping):
        if strays := [record for record in source if not isinstance(record, Mapping)]:
            raise TraceError(f"{place}: {str(strays[0])[:80]} stands between records; each has to be an object")
        return pd.DataFrame(source)
    try:
        values = np.asarray(source)
    except ValueError as error:
        raise TraceError(f"{place}: lists of different lengths; give one list of all, or a DataFrame") from error
    if values.ndim == 2:
        # RL steps by responses, as many in each.
        steps, responses = values.shape
        return pd.DataFrame({"rl_step": np.repeat(np.arange(steps), responses), "response_tokens": values.ravel()})
    if values.ndim != 1:
        raise TraceError(f"{place}: got shape {values.shape}; wanted (responses,) or (RL steps, responses)")
    return pd.DataFrame({"response_tokens": values})


def _as_text(place: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with cells as text, a list of lengths in a cell as many rows."""
    lists = [name for name in frame.columns if len(frame) and _size(frame[name].iloc[0]) >= 0]
    if any(_plain(name) in _LENGTHS for name in lists):
        first = next(name for name in lists if _plain(name) in _LENGTHS)
        sizes = frame[first].map(_size)
        aligned = [name for name in lists if bool((frame[name].map(_size) == sizes).all())]
        frame = frame.explode(aligned, ignore_index=True)
    if frame.empty:
        raise TraceError(f"{place}: no rows; wanted one response length per line")
    if not frame.columns.is_unique:
        raise TraceError(f"{place}: column {frame.columns[frame.columns.duplicated()][0]!r} is there twice")
    # Text needs no look at each cell.
    texts = (values.fillna("") if values.dtype == "str" else values.map(_cell) for _, values in frame.items())
    return pd.DataFrame(dict(zip(map(str, frame.columns), texts, strict=True)), index=frame.index)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None or value != value else str(value)


def _size(value: Any) -> int:
    """Entries of a list, -1 for what is none."""
    return len(value) if isinstance(value, list | np.ndarray) else -1


def _counts(value: Any) -> bool:
    """Whether it is a number of tokens, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(map(_counts, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1


def _columns(place: str, frame: pd.DataFrame, column: str | None) -> dict[str, str]:
    """The table's column for each column of a trace that it has; `column` is the one of lengths that the user named."""
    names = ", ".join(frame.columns)
    if column is not None and column not in frame:
        raise TraceError(f"{place}: no column {column!r}; there are: {names}")
    lengths = column or _column_named(place, frame, _LENGTHS, "the lengths")
    candidates = frame.drop(columns=[] if lengths is None else [lengths])
    matches = {name: _column_named(place, candidates, synonyms, name) for name, synonyms in _SYNONYMS.items()}
    matches["rl_step"] = matches["rl_step"] or _column_named(place, candidates, ("epoch",), "rl_step")
    columns = {name: match for name, match in matches.items() if match is not None}
    if lengths is None:
        unmatched = [str(name) for name in frame.columns if name not in columns.values()]
        numeric = [name for name in unmatched if pd.to_numeric(frame[name], errors="coerce").notna().all()]
        # What a column holds that is no number is said with its line.
        if (lengths := next((group[0] for group in (numeric, unmatched) if len(group) == 1), None)) is None:
            raise TraceError(f"{place}: cannot tell which column holds the lengths; name one with --column: {names}")
    return {"response_tokens": lengths} | columns


def _column_named(place: str, frame: pd.DataFrame, names: tuple[str, ...], role: str) -> str | None:
    """The column with one of these names, the trace's own first; of others with one each only if they say the same.

    Which of several columns tells prompts or samples apart is not asked: the first of the names does.
    """
    plain = {str(name): _plain(name) for name in frame.columns}
    matches = [column for name in names for column, plain_name in plain.items() if plain_name == name]
    if matches and matches[0] != names[0] and names not in (PROMPT_IDS, _SAMPLES):
        for other in matches[1:]:
            if not frame[other].equals(frame[matches[0]]):
                raise TraceError(
                    f"{place}: columns {matches[0]} and {other} differ and either could be {role}: keep one, or call "
                    f"it {names[0]}"
                )
    return matches[0] if matches else None


def _plain(name: object) -> str:
    return str(name).lower().replace(" ", "_").replace("-", "_")
