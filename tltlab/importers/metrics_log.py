"""Metrics of RL steps as frameworks print and store them: lines of consoles, JSON, CSV and TSV, TensorBoard's events.

A line of a console is a record, as `frameworks.toml` describes it; lines of other programs in between, Ray's prefixes,
colours and progress bars do not matter. A JSON file holds a step in each line, a list of them or a `log_history`
(Trainer). A record that goes on in the next line is refused, and a number counts where its end is there: a separator, a
bracket, a unit or the end of a line that nothing cut.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tltlab.errors import ConfigError, TraceError
from tltlab.files import open_unpacked, parse_json
from tltlab.records import Fields, Json

from .fields import of_many
from .rows import TABLES, ending, rows_of_table, table_of, whole_json
from .step_metrics import ANY, FORMS, KNOWN, LEARNING, Form, Record, plain_key

EVENT_FILES = "events.out.tfevents*"
"""Files of metrics that TensorBoard leaves in its own folders."""
# Texts are anybody's: each pattern has one place where it may begin, and takes no character twice.
_NUMBER = re.compile(
    r"\A(?:[A-Za-z][\w.]*+\()?([-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d*)?(?:[eE][-+]?(?:\d{2,}|[1-9]))?)\)?"
    r"\s*+([A-Za-z%][A-Za-z/%]*+)?(?:\s*+\([-+.\d]++%\))?"
)
_ITEM = re.compile(r"(?<![\w/.@-])([A-Za-z][\w/.@-]*+)\s*+[=:|│]\s*+[-+]?\d")
_OF_TRAINING = re.compile(r"loss|reward|step|iter|entropy|(^|[/_.])kl($|[/_.])|len")
_JSON_QUOTES = re.compile(r"[\"']")
_NAME = re.compile(r"(?<![\w/.@-])[A-Za-z](?=(?:[^\W_]|[.@-])*+[/_][\w/.@-])[\w/.@-]*+")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x07\x1b]*(?:\x07|\x1b\\)")
_RAY = re.compile(r"\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?")
_RAY_REPEATS = re.compile(r"(?<!\s)\s*+\[repeated \d+x across cluster\].*$")
_SCRAPE = re.compile(rb"# (HELP|TYPE) |vllm:\w")
_DICT_ITEM = re.compile(
    r"""(['"])((?:(?!\1).){1,256})\1\s*+:\s*+('[^']*'|"[^"]*"|\[[^\[\]]*\]|[^,{}'"\[\]()]++(?:\([^()]*\))?)\s*+(?=[,}])"""
)
_BAR = re.compile(r"[│┃|]")
_EQUALS = re.compile(r"(?<![\w./@-])([\w./@-]++)=(\S++)")
_REST = re.compile(r"""['"]\s*:|\}|- [\w/@.-]+:|^\s*[\w/@.-]+:\s*[-+\d.]""")
_REST_OF_ROW = re.compile(r"\A\s*+[^\s│┃|][^│┃|]*+[│┃|]")
"""A line after one that ends within a record, if it has the rest."""
_NEXT_ITEM = re.compile(r"\A\s*+(?:(?:[+\d.eE]|-(?! ))*+\s*+- [\w/@.-]++:|[-+\d.eE]++ [\w/@.-]++=)")
_ONE_WORD = re.compile(r"\A\s*+(?=\S*?[\d/_:=%])[^\s\[\]()]++\s*+")
_TRIMMED = 2
"""Blanks at most that a terminal takes from the end of a wrapped line: those of a separator."""
_MOST_LINE_BYTES, _MOST_LINES = 1 << 20, 1 << 23


def metrics_files(folder: Path) -> list[Path]:
    """Return TensorBoard's files in a folder, or up to three below it, of one run; resumed, it has several.

    Those nearest count. Raises TraceError where they are of several runs, and for W&B's own files where there are none.
    """
    levels = ("", "*/", "*/*/", "*/*/*/")
    for below in levels:
        files = sorted({path.resolve() for path in folder.glob(below + EVENT_FILES)})
        if len({path.parent for path in files}) > 1:
            raise TraceError(f"{folder} holds the logs of several runs: name one, such as {files[0].parent}")
        if files:
            return files
    for path in (path for below in levels for path in folder.glob(below + "run-*.wandb")):
        refuse_wandb(path)
    return []


def refuse_wandb(path: Path) -> None:
    """Raise TraceError for a file in W&B's own format."""
    if path.suffix == ".wandb":
        raise TraceError(
            f"{path}: W&B's own format is not read; export the run's history: pandas.DataFrame(wandb.Api().run("
            "'ENTITY/PROJECT/RUN').scan_history()).to_csv('history.csv')"
        )


def is_metrics_log(path: Path) -> bool:
    """Return True if a path holds metrics of RL steps; reads up to the first of them. Raises TraceError."""
    return bool(metrics_files(path)) if path.is_dir() else any(record.values for record in records_of(path))


def unknown_log(path: Path) -> str | None:
    """Message for a file with metrics of no known framework; None for a file without metrics."""
    try:
        with open_unpacked(path) as file:
            text = _JSON_QUOTES.sub("", file.read(_MOST_LINE_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None
    for number, line in enumerate(text.splitlines(), 1):
        names = _ITEM.findall(line)
        if len(names) > 2 and any(map(_OF_TRAINING.search, names)):
            return (
                f"{path}, line {number}: metrics of an unknown framework ({', '.join(names[:3])}, ...); known are "
                f"{KNOWN}; of others give the lengths of responses, in a CSV"
            )
    return None


def records_of(path: Path) -> Iterator[Record]:
    """The records of a log in its order, each with what `step_metrics` knows of its values. Raises TraceError."""
    files = metrics_files(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no {EVENT_FILES} in it; a log is a file, or a folder of those")
    try:
        if all(log.match(EVENT_FILES) for log in files):
            yield from _tensorboard(files)
            return
        if ending(path) in TABLES:
            yield from _from_table(path)
            return
        with open_unpacked(path) as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \r\n\t")
        if b"\0" in start:
            refuse_wandb(path)
            raise TraceError(f"{path}: not text")
        if _SCRAPE.match(start):
            raise TraceError(
                f"{path}: a scrape of vLLM's /metrics is not read: give the lengths of responses, the server's "
                "console log, or a trace recorded with TLTLAB_RECORD"
            )
        whole = whole_json(path) if start[:1] in b"{[" else None
        yield from _from_lines(path) if whole is None else _from_json(whole)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def _from_table(path: Path) -> Iterator[Record]:
    """A history as W&B exports it: a row for each RL step."""
    call_times: dict[str, float] = {}
    frame = table_of(path, may_be_cut=True)
    for place, fields in rows_of_table(frame):
        yield from from_fields(place, fields, call_times)
    yield from (Record(rl_step=None, place=place, values={}, is_cut=True) for place in frame.attrs["cut"])


def number(text: str) -> float | None:
    """The number that a text is, times in seconds and shares of one; None for none, NaN and infinity.

    >>> number("12.5ms"), number("np.float64(3.0)"), number("1,024"), number("nan")
    (0.0125, 3.0, 1024.0, None)
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match[2] or "") not in ANY["units"] or not any(map(str.isdigit, match[1])):
        return None
    value = float(match[1].replace(",", "")) * ANY["units"][match[2] or ""]
    return value if math.isfinite(value) else None


class _Line(NamedTuple):
    """A line that is not blank, without colours; `is_ended` where a new line follows."""

    number: int
    text: str
    is_ended: bool = True


def _lines(path: Path) -> Iterator[_Line]:
    """A progress bar ends in a carriage return, so several texts share a line."""
    with open_unpacked(path) as file:
        for at, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), 1):
            if len(line) == _MOST_LINE_BYTES or at > _MOST_LINES:
                most = f"{_MOST_LINE_BYTES >> 20} MiB in a line, {_MOST_LINES:,} lines"
                raise TraceError(f"{path}, line {at}: more than is read of a log, {most}")
            *whole, rest = _COLOURS.sub("", line.decode("utf-8", "replace")).replace("\r", "\n").split("\n")
            for text in (*whole, rest):
                if text.strip():
                    yield _Line(at, text, is_ended=text is not rest)


def _from_lines(path: Path) -> Iterator[Record]:
    """Records of a console's lines. Raises TraceError for one that goes on in the next line."""
    width, lengths = 0, defaultdict[re.Pattern[str], Counter[int]](Counter)
    for line in _lines(path):
        width = max(width, len(line.text))
        for form, *_ in _records_in(line.text):
            lengths[form.begins][len(line.text)] += 1
    block, in_block = None, Json()
    call_times: dict[str, float] = {}
    for line, after in pairwise(chain(_lines(path), [_Line(0, "")])):
        place = f"line {line.number}"
        for form, rl_step, text, is_last in _records_in(line.text):
            if form.items == "open":
                block, in_block = rl_step, {}
                continue
            fields, last, is_cut = _items(form, text)
            is_wide = len(line.text) >= width - _TRIMMED
            if is_last and _goes_on(form, after, is_cut, is_wide) and _has_metrics(form, text + after.text):
                raise TraceError(
                    f"{path}, {place}: the record goes on in the next line, so the log is wrapped or has a metric a "
                    "line: print it again with COLUMNS=10000, or have the framework write JSON Lines or TensorBoard"
                )
            if form.in_block:
                if any(in_block.get(name, value) != value for name, value in fields.items()):
                    block = None  # The line that begins the next block is lost.
                if block is None:
                    continue
                rl_step, in_block = block, in_block | fields
            # Where all end in one column, the log may be cut there.
            are_alike = len(lengths[form.begins]) == 1 < lengths[form.begins].total()
            is_doubtful = (are_alike and form.items != "\n") or not (is_last and line.is_ended)
            if last is not None and is_doubtful and not _has_end(fields, last):
                del fields[last]
                is_cut = is_cut or plain_key(form.key(last)) is not None
            known = {form.key(name): value for name, value in fields.items()}
            found = [*from_fields(place, known, call_times, rl_step)]
            if is_cut and not found and any(map(plain_key, _NAME.findall(text))):
                found = [Record(rl_step=rl_step, place=place, values={})]
            yield from (replace(record, is_cut=is_cut) for record in found)


def _has_metrics(form: Form, text: str) -> bool:
    names = [*map(form.key, _items(form, text)[0]), *_NAME.findall(text)]
    return any(map(plain_key, names)) or (form.items == " - " and bool(names))


def _has_end(fields: Fields, last: str) -> bool:
    """Return True if the last number has a unit, or as many decimals as all others have."""
    decimals = [len(value.partition(".")[2]) for value in map(str, fields.values()) if "." in value]
    whole = str(fields[last])
    has_unit = not whole[-1:].isdigit() and whole[-1:] not in "-+.,"
    return has_unit or ("." in whole and len(decimals) > 2 and len(set(decimals)) == 1)


def _records_in(text: str) -> Iterator[tuple[Form, int | None, str, bool]]:
    """Records of a line: form, RL step, text of the items, and True for the last; two processes may write into one."""
    if not any(hint in text for hint in ANY["hints"]):
        return
    form = next((form for form in FORMS if form.begins.search(text)), None)
    if form is None:
        return
    found = list(form.begins.finditer(text))
    if form.items not in (" - ", " | ", "open"):
        found = [next((match for match in found if any(match.groups())), found[0])]
    ends = [*(match.start() for match in found[1:]), len(text)]
    for match, end in zip(found, ends, strict=True):
        rl_step = next((int(digits) for digits in match.groups() if digits), None)
        yield form, rl_step, _RAY_REPEATS.sub("", text[match.end() : end]), end == len(text)


def _items(form: Form, text: str) -> tuple[Json, str | None, bool]:
    """Fields of a record, the one that ends with the text (None: each has its own end), and True if the text is cut."""
    if form.items == "dict":
        return _dict(text)
    if form.items == "table":
        cells = [cell.strip() for cell in _BAR.split(text)]
        return _once(zip(cells[1:-1:2], cells[2:-1:2], strict=False)), None, bool(cells[-1])
    if form.items == "equals":
        fields = _once((name, value.rstrip(",;|")) for name, value in _EQUALS.findall(text))
        return fields, next(reversed(fields), None), False
    items = [item.partition(":") for item in text.split(form.items)]
    fields = _once((name.strip(), value.strip()) for name, colon, value in items if colon)
    return fields, next(reversed(fields), None), form.items == " - " and not items[-1][1]


def _once(items: Iterable[tuple[str, str]]) -> Json:
    """Return items by name, without names that have two values."""
    fields, twice = Json(), set[str]()
    for name, value in items:
        if fields.setdefault(name, value) != value:
            twice.add(name)
    return {name: value for name, value in fields.items() if name not in twice}


def _dict(text: str) -> tuple[Json, None, bool]:
    """A dictionary as JSON or Python prints it; each item has its own end."""
    with suppress(ValueError):
        fields = parse_json(text[: text.rfind("}") + 1])
        return fields if isinstance(fields, dict) else {}, None, False
    whole, is_closed, _ = text.partition("}")
    return (
        _once((name, value.strip().strip("'\"")) for _, name, value in _DICT_ITEM.findall(whole + is_closed)),
        None,
        not is_closed,
    )


def _goes_on(form: Form, after: _Line, is_cut: bool, is_wide: bool) -> bool:
    """Return True if the next line has the rest of a record; items of others follow lines of full width alone."""
    text = _RAY.sub("", after.text)
    if form.items == "table":
        return is_cut and _REST_OF_ROW.match(text) is not None
    if form.items in (" - ", "equals") and _NEXT_ITEM.match(text):
        return True
    if any(_records_in(text)):
        return False
    if is_cut or form.items == "dict" or not (is_wide and after.is_ended):
        return is_cut and _REST.search(text) is not None
    values = _items(form, text)[0].values()
    return sum(number(value) is not None for value in values) > 1 or _ONE_WORD.fullmatch(text) is not None


def _from_json(whole: Any) -> Iterator[Record]:
    """A whole file of JSON: a list of records, one, or those of a Trainer's state."""
    if isinstance(whole, dict):
        whole = whole.get("log_history", [whole])
    call_times: dict[str, float] = {}
    for at, fields in enumerate(whole if isinstance(whole, list) else ()):
        if isinstance(fields, dict):
            yield from from_fields(f"item {at}", fields, call_times)


def from_fields(
    place: str, fields: Fields, call_times: dict[str, float], rl_step: int | None = None
) -> Iterator[Record]:
    """A JSON record; groups of metrics in it, such as the `data` of verl's file logger, are taken apart.

    TRL logs each call's time to W&B in its own row: `call_times` adds these up for the next row of metrics.
    """
    flat: Json = {}
    for key, value in fields.items():
        inner = value if isinstance(value, dict) else {None: value}
        for name, item in inner.items():
            flat[str(key) if name is None else str(name) if key == "data" else f"{key}/{name}"] = item
    numbers = (number(of_many(str(flat.get(name)))) for name in ANY["steps"])
    steps = [step for step in numbers if step is not None and abs(step) < 2**53]
    for record in _record(rl_step if rl_step is not None else int(steps[0]) if steps else None, place, flat):
        if "_step" in fields and all(key.startswith("profiling/") for key in record.values):
            call_times |= {key: call_times.get(key, 0.0) + value for key, value in record.values.items()}
        else:
            yield replace(record, values={**record.values, **call_times})
            call_times.clear()


def _record(rl_step: int | None, place: str, fields: Fields) -> Iterator[Record]:
    """A record of those fields that are known and have a value, where there are any."""
    values: dict[str, float] = {}
    learning: dict[str, float] = {}
    for key, content in fields.items():
        name = plain_key(key)
        more = key.removeprefix("train/")
        is_learning = name is None and any(pattern.search(more) for pattern in LEARNING.values())
        if (name is not None or is_learning) and (value := number(str(content))) is not None:
            (learning if name is None else values)[name or more] = value
    if values:
        values |= learning
        yield Record(rl_step=rl_step, place=place, values=values)


def _tensorboard(files: list[Path]) -> Iterator[Record]:
    try:
        loader = import_module("tensorboard.backend.event_processing.event_file_loader")
        tensors = import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise ConfigError("reading TensorBoard's event files needs tensorboard: pip install tensorboard") from error
    for path in files:
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                # Values of every kind come as tensors.
                array = tensors.make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu":
                    yield from _record(int(event.step), path.name, {value.tag: array.item()})
