"""Sources of a trace: a trace or RUN folder, a dump, a log, a table of response lengths, lengths alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tltlab.config import shown
from tltlab.errors import ConfigError, TraceError
from tltlab.files import open_unpacked
from tltlab.records import Fields, frozen
from tltlab.traces.schema import MANIFEST_FILE, Manifest
from tltlab.traces.trace import Trace, check_source, is_trace, locate, report
from tltlab.traces.trace import read as read_folder

from .fields import ENVELOPES, FORMATS, KINDS, is_list, is_missing, kind_of, matches, parsed, plain
from .metrics_log import from_fields, is_metrics_log, metrics_files, records_of, refuse_wandb, unknown_log
from .responses import Reader, group_size_of, tables_of_responses
from .rows import (
    BY_OPTION,
    TABLES,
    Reading,
    Records,
    Row,
    check_unique,
    dump_files,
    ending,
    flat,
    rows_of,
    rows_of_table,
    stem,
    step_of,
    table_of,
    unwrapped,
    whole_json,
)
from .step_metrics import MEAN, Record, is_mean, plain_key, steps_of, tables_of_steps
from .token_counts import CharsPerToken, NoTokenCounter

Format = Literal["verl", "trl", "vllm", "csv", "metrics"]

_NO_REWARD = {"advantage", "advantages"}
_SNIFFED = 64
"""Records by which a format is known."""
_NAMED = 'give one list of all lengths, or objects that name them, such as {"rl_step": 1, "response_lengths": [5, 9]}'
_SIZES = ("response_sizes", "response_tokens", "sizes", "tokens")
CHARS_PER_TOKEN = 3.6
"""English prose in BPE tokens: for texts without a tokenizer."""

_AS_IT_IS = Reading()
TraceSource = str | Path | Trace | pd.DataFrame | pd.Series | NDArray[Any] | Sequence[int]
"""A trace as users give it: itself, where it is, or response lengths, in a DataFrame as a CSV has them or alone."""


@frozen
class Imported:
    """A trace with what was read of its source: the source's column for each column of a trace, and its others."""

    trace: Trace
    used: Mapping[str, str]
    ignored: Sequence[str]
    notes: Sequence[str]

    @classmethod
    def whole(cls, trace: Trace) -> Imported:
        """A trace that is not made of columns; its notes are those of its manifest, unless it is a recording."""
        noted = trace.manifest.notes if trace.manifest.kind != "recorded" else None
        notes = noted.split("; ") if noted else ()
        return cls(trace=trace, used={}, ignored=(), notes=notes)

    @property
    def read(self) -> list[str]:
        """The columns or metrics that were read, in words, with what they are taken for where that has another name."""
        used = ", ".join(column if column == name else f"{column} ({name})" for name, column in self.used.items())
        num = f"{self.trace.num_rows('outcomes')} responses of {len(self.trace.rl_steps)} RL steps"
        return [used or f"trace {self.trace.manifest.name or ''}".rstrip(), num]


def imported(
    source: str | Path | pd.DataFrame, reading: Reading, *, form: Format | None = None, workers: int | None = None
) -> Imported:
    """Read a file, a folder of files or a DataFrame as a trace of kind "imported".

    Its manifest has the source and every assumption (`notes`). `form` is guessed from the content by default (`guess`).
    The dump's numbers, not its texts, are held in memory. Raises TraceError naming file, line and field, ConfigError.
    """
    if isinstance(source, str):
        source = Path(source)
    path = None if isinstance(source, pd.DataFrame) else source
    if path is not None:
        check_source(path)
    is_given = form is not None
    form = form or ("csv" if path is None else guess(path, reading))
    _check(reading, form, workers)
    if form == "metrics":
        assert path is not None
        steps, notes = steps_of(_metrics(path, reading.column), reading.run)
        tables, assumed = tables_of_steps(steps, str(path), reading, notes)
        trace = _trace(path.resolve().name, form, tables, [*notes, *assumed], workers)
        used = {name: key for step in steps[::-1] for name, key in step.used.items()}
        return replace(Imported.whole(_with_drafting(trace, reading)), used=used)
    needs = FORMATS["needs"].get(form, ()) if is_given or form in ("verl", "trl") else ()
    reader = Reader(replace(reading, needs=tuple(needs)))
    frames = []
    try:
        for records in _records(source, form, reader):
            if form == "trl":
                columns = reader.reading.reward_columns or _rewards(records)
                reader.reading = replace(reader.reading, reward_columns=columns)
            frames.append(reader.read(records))
    except RecursionError as error:
        raise TraceError(f"{path}: a record in it is nested too deeply") from error
    if not frames:
        raise TraceError(f"{path or 'lengths'}: no rows in it; wanted one response, or one length, per row")
    frame = pd.concat(frames, ignore_index=True)
    notes = reader.assumed()
    if form == "trl":
        frame, num_repeats = _without_repeats(frame)
        if reader.reading.reward_columns:
            notes.append(f"reward: {' + '.join(reader.reading.reward_columns)}")
        if num_repeats:
            notes.append(f"{num_repeats} logged steps repeat the completions of the step before and are left out")
    tables, assumed, named_by = tables_of_responses(frame, reading, names_prompts=form != "csv")
    if named_by is not None:
        reader.use("prompt_id", named_by)
    elif len(tables["workload"]["prompt_id"].unique()) == len(frame) > 1 and reading.group_size is None:
        assumed.append("no column names the prompts: each response has one of its own (--group-column, --group-size)")
    if not reader.used.keys() & {"rl_step", "epoch"} and not frame["rl_step"].any():
        assumed.append("no column names the RL steps: all responses are of one (--step-column)")
    name = "lengths" if path is None else path.resolve().name
    read = [reader.described()] if len(reader.columns) > 1 else []
    trace = _trace(name, form, tables, [*read, *notes, *assumed], workers, group_size=reading.group_size)
    return Imported(trace=trace, used=reader.used, ignored=reader.ignored, notes=(*notes, *assumed))


def _check(reading: Reading, form: Format, workers: int | None) -> None:
    for name, forms in FORMATS["options"].items():
        if getattr(reading, name) and form not in forms:
            raise ConfigError(f"{name} does not go with format {form}, only with {', '.join(forms)}")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}, it must be at least 1")


def _trace(
    name: str, form: Format, tables: Mapping[str, pd.DataFrame], notes: Sequence[str], workers: int | None,
    group_size: int | None = None,
) -> Trace:  # fmt: skip
    cap = int(tables["workload"]["max_response_tokens"].max())
    size = group_size_of(tables["workload"])
    manifest = Manifest(
        kind="imported", name=name.split(".")[0], source=f"{FORMATS['called'].get(form, '')} {name}".lstrip(),
        max_response_tokens=cap, group_size=size if form != "csv" or size != 1 else group_size,
        notes="; ".join(notes) or None, num_workers=workers,
    )  # fmt: skip
    return Trace.from_tables(manifest, tables)


def _with_drafting(trace: Trace, reading: Reading) -> Trace:
    """Return the trace with the strategy that `reading` names. Raises ConfigError for one without accept lengths."""
    if reading.drafted is None:
        return trace
    steps = trace.steps if trace.manifest.kind == "imported" else None
    if steps is None or steps.get("accept_length", pd.Series(dtype=float)).isna().all():
        raise ConfigError(f"{trace.path or trace.manifest.source} has no log's accept lengths: leave out drafted")
    return trace.with_manifest(trace.manifest.model_copy(update={"drafting": reading.drafted}))


def _records(source: Path | pd.DataFrame, form: Format, reader: Reader) -> Iterator[Records]:
    """The records of a file, of a folder's files in the order of their numbers, or of a DataFrame."""
    if isinstance(source, pd.DataFrame):
        yield from _of_frame(source, "lengths", reader)
        return
    files: Sequence[tuple[Path, int | None]] = [(source, step_of(source, form in ("verl", "trl")))]
    if source.is_dir() and not (files := dump_files(source)):
        wanted = "completions_<step>.parquet" if form == "trl" else "<step>.jsonl"
        raise TraceError(f"{source}: no {wanted} in it, nor other files whose names end in the number of an RL step")
    for file, step in files:
        if (values := [] if ending(file) in TABLES else _numbers(file)) is not None:
            frame = frame_of_numbers(str(file), values) if values else table_of(file)
            for records in _of_frame(frame, str(file), reader):
                yield replace(records, rl_step=step)
        else:
            yield from reader.chunks(unwrapped(rows_of(file)), str(file), step)


def _of_frame(frame: pd.DataFrame, file: str, reader: Reader) -> Iterator[Records]:
    """A table; where cells hold lists or objects, its rows are read as other records are."""
    if frame.empty:
        raise TraceError(f"{file}: no rows; wanted one response length per line")
    check_unique(file, frame.columns)
    frame = frame.rename(columns=str)
    nested = [
        name for name in frame.columns if _is_nested(name, next((c for c in frame[name] if not is_missing(c)), None))
    ]
    if not nested:
        yield Records(file=file, frame=frame, is_table=True)
        return
    rows = ((at, {**row, **{name: parsed(row[name]) for name in nested}}) for at, row in rows_of_table(frame))
    yield from reader.chunks(rows, file, None)


def _is_nested(name: str, cell: Any) -> bool:
    if isinstance(cell, str):
        return cell[:1] in ("[", "{") and cell[-1:] in ("]", "}") and bool(kind_of(name) or plain(name) in ENVELOPES)
    return is_list(cell) or isinstance(cell, Mapping)


def frame_of_numbers(place: str, source: Any) -> pd.DataFrame:
    """A frame of lengths alone: of one RL step, or as (RL steps, responses)."""
    try:
        values = np.asarray(source)
    except ValueError as error:
        raise TraceError(f"{place}: lists of different lengths; {_NAMED}") from error
    if values.ndim == 2:
        if values.dtype.kind in "if" and ((values < 1) | (values > 1 << 17)).any():
            raise TraceError(f"{place}: lists with numbers that are no lengths, as token ids; {_NAMED}")
        steps, responses = values.shape
        return pd.DataFrame({"rl_step": np.repeat(np.arange(steps), responses), "response_tokens": values.ravel()})
    if values.ndim != 1:
        raise TraceError(f"{place}: got shape {values.shape}; wanted (responses,) or (RL steps, responses)")
    return pd.DataFrame({"response_tokens": values})


def _numbers(path: Path) -> list[Any] | None:
    """The numbers of a text file that begins with one, or with a JSON list of numbers; [] for lines as in a CSV."""
    if ending(path) == ".parquet":
        return None
    try:
        with open_unpacked(path) as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")
            if not start.lstrip(b"[ \r\n\t")[:1].isdigit():
                return None
        value = whole_json(path) if start[:1] == b"[" else []
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    return value if isinstance(value, list) else None


def _rewards(records: Records) -> tuple[str, ...]:
    """TRL's columns of rewards: `reward`, else all numbers that are not known as something else."""
    frame = records.frame
    if "reward" in frame:
        return ("reward",)

    def has_numbers(column: str) -> bool:
        return any(isinstance(c, int | float) and not isinstance(c, bool) and not is_missing(c) for c in frame[column])

    return tuple(c for c in map(str, frame) if has_numbers(c) and c not in _NO_REWARD and not kind_of(c) - {"reward"})


def _without_repeats(frame: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Responses without RL steps that have the same texts as the one logged before."""
    logged = (frame["rl_step"] != frame["rl_step"].shift()).cumsum()
    said = frame[["text", "said"]].astype(str).agg(" ".join, axis=1).groupby(logged).agg(" ".join)
    repeats = said == said.shift()
    return frame[~logged.map(repeats)].reset_index(drop=True), int(repeats.sum())


def guess(path: Path, reading: Reading | None = None) -> Format:
    """Return the format of a dump, by its first records. Raises TraceError that names what was found."""
    if path.is_dir():
        files = dump_files(path)
        is_dump = any(stem(file).isdecimal() or stem(file).startswith("completions_") for file, _ in files)
        if not is_dump and is_metrics_log(path):
            return "metrics"
        if files:
            return guess(files[0][0], reading)
        raise TraceError(
            f"{path}: neither <step>.jsonl (verl) nor completions_<step>.parquet (TRL) nor events of TensorBoard in it"
        )
    refuse_wandb(path)
    if ending(path) in FORMATS["binary"]:
        raise TraceError(f"{path}: {ending(path)} is not read: write its records as JSON Lines, CSV or Parquet")
    if ending(path) in TABLES:
        fields = [record for _, record in rows_of_table(table_of(path, _SNIFFED, may_be_cut=True))]
        return "metrics" if fields and _has_means(path, fields, reading) else "csv"
    rows: list[Row] = []
    try:
        rows = _first_rows(path)
        return _format_of_records(path, rows, reading)
    except TraceError:
        if ending(path) == ".parquet":
            raise
        # Not records of responses: a log has metrics of RL steps somewhere in it, or there are numbers alone.
        if is_metrics_log(path) and (not rows or any(any(map(is_mean, record.values)) for record in records_of(path))):
            return "metrics"
        if _numbers(path) is not None:
            return "csv"
        if not rows and (unknown := unknown_log(path)) is not None:
            raise TraceError(unknown) from None
        raise


def _first_rows(path: Path) -> list[Row]:
    """Return the first records of a file; TraceError where there is none."""
    rows: list[Row] = []
    try:
        rows.extend(islice(unwrapped(rows_of(path)), _SNIFFED))
    except TraceError:
        # A fault further on is for who reads them all.
        if not rows:
            raise
    if not rows:
        raise TraceError(f"{path}: no rows in it")
    return rows


def _format_of_records(path: Path, rows: Sequence[Row], reading: Reading | None) -> Format:
    fields = [flat(record) for _, record in rows]
    # A request that failed has other fields than those that did not.
    first = {name: value for record in reversed(fields) for name, value in record.items() if not is_missing(value)}
    if reading is not None and (reading.column or reading.lists):
        return "csv"
    is_dump = bool(first.keys() & {"score", "step", "gts"}) or stem(path).isdecimal()
    if {"input", "output"} <= first.keys() and is_dump:
        return "verl"
    if {"prompt", "completion"} <= first.keys() and ("step" in first or stem(path).startswith("completions_")):
        return "trl"
    if _has_means(path, fields, reading):
        return "metrics"
    sizes = matches(first, *_SIZES)
    kinds = {kind for name in first for kind in kind_of(name)}
    is_summary = "totaloutputtokens" in map(plain, first) and not any(is_list(first[name]) for name in sizes)
    if is_summary or not (sizes or kinds & KINDS["with_length"]):
        place = f"{path}, {rows[0][0]}"
        if (named := _named(first)) is not None:
            raise TraceError(f"{place}: {named}")
        raise TraceError(
            unknown_log(path)
            or f"{place}: no response's length in it (response_tokens, output_len, usage, token ids) nor text (output, "
            f"completion, messages); there are: {', '.join(map(str, first))}; name the field with the lengths or the "
            f"text, or the format ({BY_OPTION.format('--column and --format')})"
        )
    return "csv"


def _named(fields: Fields) -> str | None:
    """Message that names the kind of a record without a response's length; None for an unknown kind."""
    names = {plain(name) for name in fields}
    if "totaloutputtokens" in names or {"completed", "requestthroughput"} <= names:
        return (
            "a benchmark's summary without its requests: run it with --save-detailed (vllm bench serve) or "
            "--output-details (sglang.bench_serving)"
        )
    for name, value in fields.items():
        calls = [flat(item) for item in value if isinstance(item, Mapping)] if is_list(value) else []
        if any(kind_of(n) & {"response_sizes", "response_tokens", "response_ids"} for call in calls for n in call):
            return (
                f"{name} has {len(value)} calls of the model with separate tokens, as in agents' traces: "
                "write a record for each call"
            )
    return None


def _has_means(path: Path, fields: Sequence[Fields], reading: Reading | None) -> bool:
    """Return True if records are RL steps with a mean response length. TraceError where that is not stated."""
    names = list(map(str, fields[0]))
    kinds = {kind for name in names for kind in kind_of(name)}
    sizes = matches(names, *_SIZES)
    # Names of lengths are those of means where metrics such as `timing_s/step` are beside them.
    are_metrics = any("/" in name and plain_key(name) for name in names)
    means = [name for name in names if is_mean(name) and (are_metrics or name not in sizes)]
    if means and "prompt_id" in kinds and not sizes:
        raise TraceError(f"{path}: {means[0]} by prompt: wanted a length of each response, or a mean of each RL step")
    if kinds & KINDS["of_response"]:
        return False
    if means or (reading is not None and reading.column):
        return bool(means)
    steps = [str(record.get(step)) for record in fields for step in matches(names, "rl_step")[:1]]
    for name in sizes if len(set(steps)) == len(steps) > 1 else ():
        if not any(is_list(parsed(record.get(name))) for record in fields):
            raise TraceError(
                f"{path}: column {name} has one number in each RL step, the length of one response or the mean of all: "
                f"name it ({BY_OPTION.format(f'--format csv, or --format metrics --column {name}')})"
            )
    return False


def _metrics(path: Path, mean: str | None) -> Iterator[Record]:
    """The records of a log; of a table of RL steps those whose column `mean` has the mean length of responses."""
    if mean is None:
        yield from records_of(path)
        return
    is_there = False
    for place, record in rows_of(path):
        fields = flat(record)
        if mean in fields:
            is_there = True
            named = matches(fields, "rl_step")
            step = {"step": fields[named[0]]} if named else {}
            yield from from_fields(place, {**fields, **step, MEAN: fields[mean]}, {})
    if not is_there:
        raise TraceError(f"{path}: no column {mean!r}")


def read(source: TraceSource) -> Trace:
    """Read and check a trace folder, a RUN folder (its `trace/`), a CSV of response lengths or a training log.

    A Trace stays unchanged. Folders of traces and recordings are read by `tltlab.traces.trace.read`; other files, and
    folders of TensorBoard, go through `imported`, and its notes and assumptions go to standard error. A
    DataFrame is read as a CSV is; an array or list holds lengths, of one RL step or as (RL steps, responses). Raises
    TraceError.
    """
    found = _found(source, _AS_IT_IS)
    if isinstance(source, str | Path) and found.trace.path is None:
        report(locate(source), found.trace.manifest.notes)
    return found.trace


def _found(source: TraceSource, reading: Reading, form: Format | None = None) -> Imported:
    """A trace, read from its folder or made of a file, a folder of files, or values."""
    if isinstance(source, str | Path):
        check_source(path := locate(source))
        if path.is_file() or (not _holds_a_trace(path) and (metrics_files(path) or dump_files(path))):
            return imported(path, reading, form=form)
        source = read_folder(source)
    if isinstance(source, Trace):
        return Imported.whole(_with_drafting(source, reading))
    if isinstance(source, pd.DataFrame | pd.Series | np.ndarray | list | tuple) and len(source):
        return imported(source if isinstance(source, pd.DataFrame) else frame_of_numbers("lengths", source), reading)
    raise TraceError(
        f"got {shown(source)} for a trace; it is a Trace, the path of a trace, a RUN or a CSV, or response lengths"
    )


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
    if isinstance(reading.tokens, NoTokenCounter):
        reading = replace(reading, tokens=CharsPerToken(CHARS_PER_TOKEN))
    return _found(source, reading, form)
