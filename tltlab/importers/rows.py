"""Records of files: JSON Lines, JSON, CSV or Parquet, packed or not, each with its place in the file for faults."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tltlab.config import shown
from tltlab.errors import ConfigError, TraceError
from tltlab.files import MOST_JSON_BYTES, PACKED, open_unpacked, parse_json
from tltlab.options import check, option
from tltlab.records import Fields, Json, frozen
from tltlab.strategy import Strategy
from tltlab.traces.storage import MOST_ROWS, check_parquet

from .fields import ENVELOPES, KINDS, NAMES, WRAPPERS, is_list, is_message, is_missing, kind_of, parsed, plain
from .token_counts import NoTokenCounter, TokenCounter, token_counter

Lists = Literal["lengths", "ids"]
_START = 1 << 20
"""Letters of a line by which it may be JSON."""
_MOST_FIELDS, _MOST_DEPTH = 256, 32
"""Most levels of objects within a record that are taken apart."""
_STEP_OF_NAME = re.compile(r"\A(?:.*?[_.-])?(?:step)?(\d+)")
BY_OPTION = "`tltlab trace import` and `tltlab what-if` take {}"
csv.field_size_limit(MOST_JSON_BYTES)  # A cell may be a long text.
MOST_COLUMNS = 1 << 12
"""Most columns of a table, or names in the records that are read at once."""
TABLES = (".csv", ".tsv", ".tab")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", *TABLES)


Row = tuple[str, Fields]
"""One record: where it stands ("line 3", "row 0"), and its fields."""


def ending(path: Path) -> str:
    """Return the ending of a file's name that is not one of PACKED: ".jsonl" for `1.jsonl.gz`.

    >>> ending(Path("v1.2/lengths.CSV.zst")), ending(Path("run"))
    ('.csv', '')
    """
    return next((suffix for suffix in map(str.lower, path.suffixes[::-1]) if suffix not in PACKED), "")


def stem(path: Path) -> str:
    """Return a file's name without `ending` and those of PACKED."""
    name = path.name
    while (suffix := Path(name).suffix) and (suffix.lower() in PACKED or suffix.lower() in RECORDS):
        name = name[: -len(suffix)]
    return name


def rows_of(path: Path) -> Iterator[Row]:
    """The records of a file, in order, one in memory at a time where the format allows.

    A Parquet file; a CSV with a header, whose cells are texts; JSON Lines; a JSON list of
    objects; one JSON object; or a JSON table, `{"columns": [...], "data": [[...], ...]}`, whose rows are the records.
    Blank lines are skipped. Raises TraceError.
    """
    if ending(path) == ".parquet":
        yield from _parquet_rows(path)
        return
    if ending(path) in TABLES:
        yield from rows_of_table(table_of(path))
        return
    try:
        with io.TextIOWrapper(open_unpacked(path), encoding="utf-8-sig") as file:
            lines = ((n, line) for n, line in _lines(file, path) if line.strip())
            is_first = True
            for number, line in lines:
                try:
                    value = parse_json(line)
                except ValueError as error:
                    value = whole_json(path) if is_first else None
                    if value is None:
                        raise TraceError(f"{path}, line {number}: not JSON (cut off?): {error}") from error
                    yield from _json_rows(path, f"line {number}", value)
                    return
                is_first = False
                yield from _json_rows(path, f"line {number}", value)
            if is_first:
                raise TraceError(f"{path}: empty; wanted one JSON object per line")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def rows_of_table(frame: pd.DataFrame) -> Iterator[Row]:
    """The records of a table, of `table_of`."""
    for line, *cells in frame.itertuples():
        yield f"line {line}", dict(zip(frame.columns, cells, strict=True))


def whole_json(path: Path) -> Any:
    """The JSON value that a file is as a whole; None where it is none. Raises OSError."""
    with suppress(ValueError), open_unpacked(path) as file:
        return parse_json(file.read(MOST_JSON_BYTES))


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file and their numbers from 1 on. TraceError for one that is too long to be a record."""
    for at in count(1):
        line = file.readline(_START)
        if line[-1:] != "\n" and line.lstrip()[:1] in ("{", "["):
            line += file.readline(MOST_JSON_BYTES + 1 - len(line))
        elif len(line) == _START and line.strip():
            raise TraceError(f"{path}, line {at}: not JSON, and longer than {_START >> 20} MiB")
        if len(line) > MOST_JSON_BYTES:
            raise TraceError(f"{path}, line {at}: longer than {MOST_JSON_BYTES >> 20} MiB, the most that is read")
        if at > MOST_ROWS:
            raise TraceError(f"{path}: more than {MOST_ROWS:,} lines, the most that are read")
        if not line:
            return
        yield at, line


def separator_of(path: Path, data: bytes) -> str:
    """Return what is between the cells of a table, by its first line. Raises OSError for too many cells."""
    first = data.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")[: 1 << 20].partition(b"\n")[0]
    # A comma may also be within a number.
    marks = "\t" if ending(path) in (".tsv", ".tab") else ";\t|,"
    separator = max(marks, key=lambda mark: first.count(mark.encode()))
    if (num := first.count(separator.encode())) >= MOST_COLUMNS:
        raise OSError(f"it has {num + 1:,} columns, and at most {MOST_COLUMNS:,} are read")
    return separator


def table_of(path: Path, most_rows: int | None = None, *, may_be_cut: bool = False) -> pd.DataFrame:
    """Return a CSV's cells as text, indexed by line; c0, c1, ... are columns without a header. Raises TraceError.

    With `most_rows` only so many of its first rows are read. All have as many cells; where the last `may_be_cut` it is
    left out if it has fewer, and its line is the frame's attribute "cut". Between cells is a comma, or a semicolon, tab
    or bar where the first line has as many of these.
    """
    try:
        with open_unpacked(path) as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise OSError(f"it has more than {MOST_JSON_BYTES >> 20} MiB, the most that is read")
        if (num := data.count(b"\n")) > MOST_ROWS:
            raise OSError(f"it has {num:,} lines, and at most {MOST_ROWS:,} are read")
        separator = separator_of(path, data)
        frame = pd.read_csv(
            io.BytesIO(data), header=None, dtype=str, keep_default_na=False, skip_blank_lines=False,
            encoding="utf-8-sig", sep=separator, nrows=most_rows,
        )  # fmt: skip
    except pd.errors.EmptyDataError as error:
        raise TraceError(f"{path}: empty; wanted one response length per line") from error
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else error
        raise TraceError(f"{path}: not a CSV of response lengths: {reason}") from error
    frame = pd.DataFrame({name: cells.str.strip() for name, cells in frame.items()})
    frame.index = frame.index + 1
    frame = frame[(frame != "").any(axis=1)]
    # Pandas fills short rows up.
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""), delimiter=separator)
    lines = {line for line, cells in enumerate(islice(reader, most_rows), 1) if 0 < len(cells) < frame.shape[1]}
    cut = [line for line in frame.index if line in lines]
    if cut and not (may_be_cut and cut == [frame.index[-1]]):
        raise TraceError(
            f"{path}, line {cut[0]}: not as many cells as the first line's {frame.shape[1]}: cut off or wrapped?"
        )
    frame = frame.drop(index=cut)
    if len(frame) and pd.to_numeric(frame.iloc[0], errors="coerce").isna().all():
        frame.columns = pd.Index(frame.iloc[0].astype(object))
        frame = frame.iloc[1:]
        check_unique(path, frame.columns)
    else:
        frame.columns = pd.Index([f"c{i}" for i in range(frame.shape[1])])
    frame.attrs["cut"] = [f"line {line}" for line in cut]
    return frame


def check_unique(source: object, names: Iterable[Any]) -> None:
    """Raise TraceError for a column that is there twice."""
    columns = pd.Index(names)
    if not columns.is_unique:
        raise TraceError(f"{source}: column {columns[columns.duplicated()][0]!r} is there twice")


def _json_rows(path: Path, place: str, value: Any) -> Iterator[Row]:
    if isinstance(value, dict) and isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        names = value["columns"]
        for number, cells in enumerate(value["data"]):
            if not isinstance(cells, list) or len(cells) != len(names):
                raise TraceError(f"{path}, {place}, data {number}: got {shown(cells)}, wanted {len(names)} cells")
            yield f"row {number}", dict(zip(names, cells, strict=True))
    elif isinstance(value, dict):
        yield place, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _json_rows(path, f"{place}, item {number}", item)
    else:
        raise TraceError(f"{path}, {place}: got {shown(value)}, wanted a JSON object")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        check_parquet(path)
        with pq.ParquetFile(path) as file:
            check_unique(path, file.schema_arrow.names)
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            yield from ((f"row {number}", fields) for number, fields in enumerate(rows))
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a readable Parquet file (packed again? unpack it): {error}") from error


def unwrapped(rows: Iterator[Row]) -> Iterator[Row]:
    """Records, those within an object that has a list of them, such as `{"simulations": [...]}`, one by one."""
    for place, fields in rows:
        names = [name for name, value in fields.items() if isinstance(value, list) and plain(name) in WRAPPERS]
        items = fields[names[0]] if len(names) == 1 else []
        is_wrapper = items and all(isinstance(item, Mapping) and not is_message(item) for item in items)
        if is_wrapper and not any(kind_of(str(name)) & KINDS["of_record"] for name in fields):
            yield from ((f"{place}, {names[0]} {at}", item) for at, item in enumerate(items))
        else:
            yield place, fields


def dump_files(folder: Path) -> list[tuple[Path, int]]:
    """Files of records whose names end in a number, in its order, and the number; TRL's may be in `completions`.

    Raises TraceError for two with the same number.
    """
    for pattern in ("completions_*", "completions/completions_*", "*"):
        files = [path for path in folder.glob(pattern) if path.is_file() and ending(path) in RECORDS]
        numbered = [(path, int(match[1])) for path in files if (match := _STEP_OF_NAME.fullmatch(stem(path)))]
        numbered.sort(key=lambda item: (item[1], item[0].name))
        for (one, number_of), (other, again) in pairwise(numbered):
            if number_of == again:
                raise TraceError(f"{folder}: {one.name} and {other.name} are of the same RL step: keep one of them")
        if numbered:
            return numbered
    return []


def step_of(path: Path, is_dump: bool) -> int | None:
    """Return the RL step in a file's name: the number behind "step", or that of a dump, `12.jsonl`."""
    match = _STEP_OF_NAME.fullmatch(stem(path))
    is_step = "step" in stem(path) or (is_dump and (stem(path).isdecimal() or stem(path).startswith("completions_")))
    return int(match[1]) if match and is_step else None


def _drafted(text: str) -> str:
    """Return a strategy as it is written. Raises ConfigError for one that does not draft."""
    strategy = Strategy.parse(text)
    if not strategy.speculates:
        raise ConfigError(f"drafted is {text}: name what drafts and how deep, such as learned:7")
    return str(strategy)


@frozen
class Reading:
    """Facts about a file that its user knows; None is for the file to show.

    `column` has the lengths (in a table of metrics their means), `step_column` the RL steps, `group_column` what is the
    same for all samples of a prompt, `conversation_column` for all turns of a response, which `turn_column` numbers:
    each a field's name, with points where it is within objects. `lists` is the
    meaning of numbers in a list. `max_response_tokens` is the run's cap, unknown the longest response. For metrics
    alone, `run` is one of several in a log, from 1, `responses` their number in each RL step and `drafted` the
    strategy; `reward_columns` are for trl alone. `tokens` counts texts, by default with the `tokenizer` or by
    `chars_per_token`. `needs` are columns of a trace that no record may lack.

    Raises ConfigError for a value that is none of a field, and for both a tokenizer and `chars_per_token`.
    """

    tokenizer: Path | None = option("The model's folder (tokenizer.json), to count the tokens of text.", parse=Path)
    chars_per_token: float | None = option("Approximate tokens of text by so many characters each, such as 3.6.")
    reward_columns: tuple[str, ...] = option(
        "trl: a column of rewards; given more than once they are added.", (), names=("--reward",)
    )
    column: str | None = option(
        "Field of the lengths (metrics: of their means), where its name is unusual; a.b is b within a."
    )
    step_column: str | None = option("Field of the RL step, likewise.")
    group_column: str | None = option("Field that is the same for all samples of a prompt, likewise.")
    conversation_column: str | None = option("Field that is the same for all turns of a response, likewise.")
    turn_column: str | None = option("Field that numbers the turns of a response, likewise.")
    lists: Lists | None = option("What lists of numbers are: lengths, of a response each, or token ids.")
    group_size: int | None = option("Samples per prompt, so many in a row, where nothing names the prompt.", min=1)
    responses: int | None = option("metrics: responses of an RL step, where the log has no number.", min=1)
    run: int | None = option("metrics: which run of a log that has several.", min=1)
    drafted: str | None = option(
        "metrics: what the log's run drafted with, where it has an accept length: learned:7.", parse=_drafted
    )
    max_response_tokens: int | None = option(
        "The run's cap: responses of this length count as cut.", names=("--cap", "--max-response-tokens"), min=1
    )
    tokens: TokenCounter = field(default=NoTokenCounter(), compare=False)
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.tokens, NoTokenCounter):
            object.__setattr__(self, "tokens", token_counter(self.tokenizer, self.chars_per_token))


def placed(file: str, label: Any) -> str:
    """Where a record is, by its label in a frame."""
    return f"{file}, {label if isinstance(label, str) else f'line {label}'}"


@frozen
class Records:
    """Some records of a file: cells by column, their places ("line 3"), and the RL step in the file's name."""

    file: str
    frame: pd.DataFrame
    rl_step: int | None = None
    is_table: bool = False

    def place(self, at: int) -> str:
        return placed(self.file, self.frame.index[at])

    def fault(self, at: int, column: str, message: str) -> NoReturn:
        raise TraceError(f"{self.place(at)}, column {column}: {message}")

    def require(self, ok: Any, column: str, wanted: str) -> None:
        """Raise TraceError for the first cell of a column that is not ok."""
        if not ok.all():
            at = int(np.argmin(ok))
            cell = self.frame[column].iloc[at]
            got = "nothing" if is_missing(cell) and not isinstance(cell, str) else shown(cell)
            self.fault(at, column, f"got {got}, wanted {wanted}")

    def refuse(self, lacking: Any, what: str) -> None:
        """Raise TraceError for the first record that is lacking what it needs, with the fields that it has."""
        if lacking.any():
            at = int(np.argmax(lacking))
            fields = [
                name for name in map(str, self.frame) if name[:1] != "#" and not is_missing(self.frame[name].iloc[at])
            ]
            raise TraceError(f"{self.place(at)}: {what}; there are: {', '.join(fields)}")


def text_id(value: Any) -> str:
    """A name for a prompt that is the same in every RL step and does not hold its text: 16 hexadecimal digits."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def flat(fields: Mapping[Any, Any], before: str = "") -> Json:
    """Return a record with the fields of its objects beside its own, by paths such as `usage.completion_tokens`.

    A list with one choice stands for the choice. Messages stay whole, and `{"type": "length"}` as a finish reason is
    its type.
    """
    result: Json = {}
    is_deep = before.count(".") > _MOST_DEPTH
    for key, value in fields.items():
        name = f"{before}{key}"
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif isinstance(value, str) and (
            (value[:1] == "[" and kind_of(name) & KINDS["lists"]) or (value[:1] == "{" and plain(key) in ENVELOPES)
        ):
            value = parsed(value)
        if is_list(value) and len(value) == 1 and isinstance(value[0], Mapping) and not is_message(value[0]):
            value = value[0] if plain(key) in NAMES["response_text"] else value
        if not isinstance(value, dict) or is_deep or len(value) > _MOST_FIELDS:
            result[name] = value
        elif value.keys() == {"value", "unit"}:
            result[name] = value["value"]
        elif plain(key) in NAMES["finish_reason"]:
            result[name] = value.get("type")
        elif is_message(value) and value.keys() & {"content", "text", "value"} and "usage" not in value:
            result[name] = value
        else:
            result |= flat(value, f"{name}.")
    return result
