"""Metrics of RL steps as frameworks print and store them: logs, JSON, CSV, TensorBoard, MLflow, vLLM's counters.

Lines of consoles are read by `log_lines` with the keys of `frameworks.toml`. Other readable sources: JSON Lines with a
step each, a JSON object of `{metric: {step: value}}` (NeMo-RL) or with a `log_history` (Trainer), event files of
TensorBoard, MLflow's folders of metrics, and histories exported from W&B, MLflow or TensorBoard (CSV, JSON Lines).
Lines of other programs in between, Ray's prefixes, colours and progress bars do not matter.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from tltlab.errors import ConfigError, TraceError
from tltlab.files import MOST_JSON_BYTES, open_unpacked, parse_json, read_text
from tltlab.strategy import Strategy

from .log_lines import Line, LoggedFields, Wrapping, entries_of, lines_of, settings_in, settled
from .rows import ending, rows_of
from .step_metrics import FIRST_OF, FORMS, HINTS, KNOWN, LONG_FIELDS, LONG_NAMES, SETUP, Record, plain_key

EVENT_FILES = "events.out.tfevents*"
"""Files of metrics that TensorBoard leaves in its own folders."""
STEPS = (
    "step", "global_step", "trainer/global_step", "training/global_step", "train/global_step", "rl_step", "iteration",
    "rollout/step", "system/global_step", "system/step", "Step", "_step",
)  # fmt: skip
"""Fields of a JSON record that number its RL step; W&B's own `_step` may count calls of its logger."""

_NUMBER = re.compile(
    r"(?:[A-Za-z][\w.]*\()?([-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d*)?(?:[eE][-+]?(?:\d{2,}|[1-9]))?)\)?"
    r"\s*([A-Za-z%][A-Za-z/%]*)?(?:\s*\([-+.\d]+%\))?"
)
_SCALE = {"": 1.0, "ms": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "%": 0.01}
_SCALE |= dict.fromkeys(("seconds", "tokens", "tokens/s", "tok/s", "tokens/sample", "samples", "reqs"), 1.0)
_ITEM = re.compile(r"([A-Za-z][\w/.@-]*)\s*[=:|│]\s*([-+]?\d[\d,.]*)")
_OF_TRAINING = re.compile(r"loss|reward|step|iter|entropy|(^|[/_.])kl($|[/_.])|len")
_JSON_QUOTES = re.compile(r"[\"']")
_NAME = re.compile(r"(?<![\w/])[A-Za-z][\w/.@-]*[/_][\w/.@-]+(?![\w/])")
_MOST_LINE_BYTES = 1 << 20
_CONSOLES = ("", ".log", ".out", ".err", ".txt")
"""Endings of names under which output of consoles is kept."""
_CONFIG_LINES = 20_000
"""Lines at a log's start in which its configuration is looked for."""
_COUNTS = {"gpus": "0", "gpus_per_node": "0", "nodes": "1", "tp": "0", "engines": "0", "depth": "0"}
"""Numbers of a configuration, with their defaults."""
_MOST_HELD_BYTES = 1 << 26
"""Most bytes of a log held in memory; larger ones are read anew each time."""
_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? ([-+0-9.eEinfINFnaN]+)(?: \d+)?$")


def metrics_files(folder: Path) -> list[Path]:
    """Return TensorBoard's or MLflow's files in a folder, or up to three below it, of one run; resumed, it has several.

    Those nearest count. Raises TraceError where they are of several runs, and for W&B's own files where there are none.
    """
    levels = ("", "*/", "*/*/", "*/*/*/")
    for below in levels:
        files = sorted({path.resolve() for path in folder.glob(below + EVENT_FILES)})
        if len({path.parent for path in files}) > 1:
            raise TraceError(f"{folder} holds the logs of several runs: name one, such as {files[0].parent}")
        if files:
            return files
    if runs := {path for below in levels for path in folder.glob(f"{below}metrics") if path.is_dir()}:
        if len(runs) > 1:
            raise TraceError(f"{folder} holds the metrics of several runs: name one, such as {min(runs).parent}")
        return sorted(path for path in min(runs).rglob("*") if path.is_file())
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
    """Return True if a path holds metrics of RL steps; reads up to the first of them, where lines are whole."""
    if path.is_dir():
        return bool(metrics_files(path))
    try:
        entries = entries_of(_lines(path), FORMS, HINTS) if ending(path) in _CONSOLES else ()
        if any(_is_known(entry, name) for entry in entries for name in entry.fields):
            return True
        return any(record.values for record in records_of(path))
    except (OSError, TraceError):
        return False


def unknown_log(path: Path) -> str | None:
    """Message for a file with metrics of no known framework; None for a file without metrics."""
    try:
        with open_unpacked(path) as file:
            text = _JSON_QUOTES.sub("", file.read(_MOST_LINE_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None
    for number, line in enumerate(text.splitlines(), 1):
        names = [name for name, _ in _ITEM.findall(line)]
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
        if path.is_dir():
            yield from _mlflow(files)
            return
        if ".csv" in path.suffixes:
            yield from _csv(path)
            return
        whole = None
        with open_unpacked(path) as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \r\n\t")
            file.seek(0)
            if b"\0" in start:
                refuse_wandb(path)
                raise TraceError(f"{path}: not text")
            if start[:1] in b"{[":
                with suppress(ValueError):
                    whole = parse_json(file.read(MOST_JSON_BYTES))
            if whole is not None:
                yield from _from_json(whole)
                return
            file.seek(0)
            lines = (line.decode("utf-8", "replace") for line in iter(lambda: file.readline(_MOST_LINE_BYTES), b""))
            yield from _from_scrapes(lines)
        yield from _from_lines(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def settings_of(path: Path) -> dict[str, Any]:
    """Fields of a manifest from the configuration that is printed at the start of a console's log."""
    if not path.is_file() or ending(path) not in _CONSOLES:
        return {}
    said = settings_in(islice(_lines(path), _CONFIG_LINES), SETUP)
    counts = {name: int(said.get(name, other) or 0) for name, other in _COUNTS.items()}
    gpus = counts["gpus"] or counts["gpus_per_node"] * counts["nodes"] or counts["engines"] * counts["tp"]
    found: dict[str, Any] = {"model": said.get("model")}
    if gpus:
        found["hardware"] = f"{gpus}x{said['gpu']}" if said.get("gpu") else f"{gpus} GPUs"
    tp = counts["tp"]
    found["num_workers"] = counts["engines"] or (gpus // tp if tp and gpus % tp == 0 else 0) or None
    found["engine"] = f"vllm {said['engine']}" if said.get("engine") else "sglang" if "sglang" in said else None
    if counts["depth"] and (method := said.get("method")):
        drafter = next((name for name in ("ngram", "suffix") if method.lower().startswith(name)), "learned")
        found["drafting"] = str(Strategy.chain(drafter, counts["depth"]))
    return {name: value for name, value in found.items() if value is not None}


def _csv(path: Path) -> Iterator[Record]:
    """A history as W&B, MLflow or TensorBoard export it: a row for each RL step, or for each metric of one."""
    call_times: dict[str, float] = {}
    cut = _cut_row(path) if ending(path) == ".csv" else None
    for at, (place, fields) in enumerate(rows_of(path)):
        if at == 0:
            keys = [plain_key(name) for name in fields if " - " in name]
            if twice := [key for key in keys if key is not None and keys.count(key) > 1]:
                raise TraceError(f"{path}: several columns for {twice[0]}, of several runs: leave the columns of one")
        if place == cut:
            yield Record(rl_step=None, place=place, values={}, is_cut=True)
        elif fields.keys() >= LONG_FIELDS and (name := next((n for n in LONG_NAMES if fields.get(n)), None)):
            step = number(str(fields["step"]))
            yield from _record(None if step is None else int(step), place, {str(fields[name]): fields["value"]})
        else:
            yield from _from_fields(place, fields, call_times)


def _cut_row(path: Path) -> str | None:
    """The place of the last row, where it has not as many cells as the header. Raises TraceError for others."""
    cut: tuple[int, int] | None = None
    num_cells = 0
    with io.TextIOWrapper(open_unpacked(path), encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        for cells in filter(None, reader):
            num_cells = num_cells or len(cells)
            if cut is not None:
                line, num = cut
                raise TraceError(f"{path}, line {line}: {num} cells, the header has {num_cells}: cut off or wrapped?")
            if len(cells) != num_cells:
                cut = reader.line_num, len(cells)
    return None if cut is None else f"line {cut[0]}"


def _mlflow(files: Iterable[Path]) -> Iterator[Record]:
    """MLflow's files of metrics, one each, with lines of time, value and step."""
    for path in files:
        name = "/".join(path.parts[len(path.parts) - path.parts[::-1].index("metrics") :])
        for line in read_text(path, errors="replace").splitlines():
            parts = line.split()
            if len(parts) > 2 and parts[2].isdigit():
                yield from _record(int(parts[2]), name, {name: parts[1]})


def number(text: str) -> float | None:
    """The number that a text is, times in seconds and shares of one; None for none, NaN and infinity.

    >>> number("12.5ms"), number("np.float64(3.0)"), number("1,024"), number("nan")
    (0.0125, 3.0, 1024.0, None)
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match[2] or "") not in _SCALE or not any(map(str.isdigit, match[1])):
        return None
    value = float(match[1].replace(",", "")) * _SCALE[match[2] or ""]
    return value if math.isfinite(value) else None


def _from_lines(path: Path) -> Iterator[Record]:
    """Records of a console's lines, as they stand or joined where they were wrapped: where more can be read.

    On what the two disagree is unknown.
    """
    held = list(_lines(path)) if path.stat().st_size < _MOST_HELD_BYTES else None
    lines = partial(_lines, path) if held is None else held.copy
    wrapping = Wrapping.of(lines)
    found = plain = _from_entries(wrapping.marked(lines()))
    for blanks in range(3):
        joined = _from_entries(wrapping.joined(lines(), _entry, blanks))
        if not wrapping.num_joined:
            break
        if _num_values(joined) > _num_values(found):
            found = joined
        elif _num_values(joined) == _num_values(plain) and found is plain:
            found = _agreed(plain, joined)
    if _num_values(found) > _num_values(plain):
        note = f"the lines are wrapped at {wrapping.width} columns: {wrapping.num_joined} were joined to those before"
        found = [replace(found[0], note=note), *found[1:]]
    yield from found


def _lines(path: Path) -> Iterator[Line]:
    with open_unpacked(path) as file:
        yield from lines_of(iter(lambda: file.readline(_MOST_LINE_BYTES), b""))


def _is_known(entry: LoggedFields, name: str) -> bool:
    return plain_key(entry.form.key(name)) is not None


def _entry(text: str) -> LoggedFields | None:
    return next(entries_of([Line(0, text)], FORMS, HINTS), None)


def _num_values(records: Sequence[Record]) -> tuple[int, int]:
    """Number of values in records, and number of records with an RL step less that of cut records."""
    num_whole = sum((record.rl_step is not None) - record.is_cut for record in records)
    return sum(len(record.values) for record in records), num_whole


def _agreed(one: Sequence[Record], other: Sequence[Record]) -> list[Record]:
    """Records without what differs in two readings of a log."""
    if len(one) != len(other):
        return [*one]
    found = []
    for record, twin in zip(one, other, strict=True):
        values = {key: value for key, value in record.values.items() if twin.values.get(key) == value}
        found.append(replace(record, values=values, is_cut=record.is_cut or len(values) < len(record.values)))
    return found


def _from_entries(lines: Iterable[Line]) -> list[Record]:
    call_times: dict[str, float] = {}
    records = []
    for entry in settled(list(entries_of(lines, FORMS, HINTS)), _is_known, FIRST_OF["step_s"].__contains__):
        fields = {entry.form.key(str(name)): value for name, value in entry.fields.items()}
        place = f"line {entry.line.number}"
        found = [
            replace(record, is_cut=entry.is_cut) for record in _from_fields(place, fields, call_times, entry.rl_step)
        ]
        if entry.is_cut and not found and any(_is_known(entry, name) for name in _NAME.findall(entry.line.text)):
            found = [Record(rl_step=entry.rl_step, place=place, values={}, is_cut=True)]
        records += found
    return records


def _from_scrapes(lines: Iterable[str]) -> Iterator[Record]:
    scrape: dict[tuple[str, str], float] = {}
    before: dict[tuple[str, str], float] = {}
    num_scrapes = 0
    for line_number, line in enumerate(lines, 1):
        sample = _SAMPLE.match(line.strip()) if line.startswith("vllm:") else None
        if sample is not None and (value := number(sample[3])) is not None:
            series = sample[1], sample[2] or ""
            if series in scrape:
                num_scrapes += 1
                yield from _from_counters(num_scrapes, f"line {line_number}", before, scrape)
                before, scrape = scrape, {}
            scrape[series] = value
    if scrape:
        yield from _from_counters(num_scrapes + 1, "the last scrape", before, scrape)


def _from_json(whole: Any) -> Iterator[Record]:
    """A whole file of JSON: a history, records, or `{metric: {step: value}}`."""
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        whole = whole["log_history"]
    call_times: dict[str, float] = {}
    if isinstance(whole, list):
        for at, fields in enumerate(whole):
            if isinstance(fields, dict):
                yield from _from_fields(f"item {at}", fields, call_times)
    elif isinstance(whole, dict) and any(isinstance(v, dict) and v and all(map(_is_step, v)) for v in whole.values()):
        for key, values in whole.items():
            if isinstance(values, dict) and all(map(_is_step, values)):
                for step, value in values.items():
                    yield from _record(int(step), key, {key: value})
    elif isinstance(whole, dict):
        yield from _from_fields("the file", whole, call_times)


def _from_fields(
    place: str, fields: Mapping[str, Any], call_times: dict[str, float], rl_step: int | None = None
) -> Iterator[Record]:
    """A JSON record; groups of metrics in it, such as the `data` of verl's file logger, are taken apart.

    TRL logs each call's time to W&B in its own row: `call_times` adds these up for the next row of metrics.
    """
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        inner = value if isinstance(value, dict) else {None: value}
        for name, item in inner.items():
            flat[str(key) if name is None else str(name) if key == "data" else f"{key}/{name}"] = item
    numbers = (flat[name] for name in STEPS if isinstance(flat.get(name), int | float))
    steps = [step for step in numbers if abs(step) < 2**53]
    for record in _record(rl_step if rl_step is not None else int(steps[0]) if steps else None, place, flat):
        if "_step" in fields and all(key.startswith("profiling/") for key in record.values):
            call_times |= {key: call_times.get(key, 0.0) + value for key, value in record.values.items()}
        else:
            yield replace(record, values={**record.values, **call_times})
            call_times.clear()


def _record(rl_step: int | None, place: str, fields: Mapping[str, Any]) -> Iterator[Record]:
    """A record of those fields that are known and have a value, where there are any."""
    values = {}
    for key, content in fields.items():
        name = None if isinstance(content, bool) else plain_key(key)
        if name is not None and (value := number(str(content))) is not None:
            values[name] = value
    if values:
        yield Record(rl_step=rl_step, place=place, values=values)


def _from_counters(
    rl_step: int, place: str, before: Mapping[tuple[str, str], float], scrape: Mapping[tuple[str, str], float]
) -> Iterator[Record]:
    """Yield the sums of vLLM's counters between two scrapes of `/metrics`, over engines; each scrape ends an RL step.

    The longest response is the upper bound of its bucket. A counter that fell belongs to a restarted engine.
    """
    counts = {s: value - earlier if value >= (earlier := before.get(s, 0.0)) else value for s, value in scrape.items()}

    def total(name: str, label: str = "") -> float:
        return sum(value for (series, labels), value in counts.items() if series == f"vllm:{name}" and label in labels)

    if not (requests := total("request_generation_tokens_count")):
        return
    mean = total("request_generation_tokens_sum") / requests
    values = {"vllm/num_requests": requests, "vllm/mean_generation_tokens": mean}
    if prompts := total("request_prompt_tokens_count"):
        values["vllm/mean_prompt_tokens"] = total("request_prompt_tokens_sum") / prompts
    if successes := total("request_success_total"):
        values["vllm/cut_share"] = total("request_success_total", 'finished_reason="length"') / successes
    if drafts := total("spec_decode_num_drafts_total"):
        values["vllm/num_drafts"] = drafts
        values["vllm/num_accepted_tokens"] = total("spec_decode_num_accepted_tokens_total")
    below: dict[float, float] = {}
    for (series, labels), value in counts.items():
        if series == "vllm:request_generation_tokens_bucket" and (bound := re.search(r'le="([^"]+)"', labels)):
            below[float(bound[1])] = below.get(float(bound[1]), 0.0) + value
    if holding_all := [bound for bound, count in below.items() if count >= requests and math.isfinite(bound)]:
        values["vllm/max_generation_tokens"] = min(holding_all)
    yield Record(rl_step=rl_step, place=place, values=values)


def _tensorboard(files: list[Path]) -> Iterator[Record]:
    try:
        loader = import_module("tensorboard.backend.event_processing.event_file_loader")
        tensors = import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise ConfigError("reading TensorBoard's event files needs tensorboard: pip install tensorboard") from error
    for path in files:
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                scalar: float | None = None
                if value.HasField("simple_value"):
                    scalar = float(value.simple_value)
                elif value.HasField("tensor"):
                    array = tensors.make_ndarray(value.tensor)
                    scalar = float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiu" else None
                if scalar is not None:
                    yield from _record(int(event.step), path.name, {value.tag: scalar})


def _is_step(name: Any) -> bool:
    return isinstance(name, str) and name.isdecimal()
