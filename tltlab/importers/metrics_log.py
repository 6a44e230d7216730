"""Metrics of RL steps as frameworks print and store them: console logs, JSON, TensorBoard, vLLM's counters.

Read are lines of verl's console logger (`step:3 - response_length/mean:311.2 - timing_s/gen:20.1`, which SkyRL has
too), TRL's printed dictionaries, NeMo-RL's blocks of `• name: value`, JSON Lines with a step each, a JSON object of
`{metric: {step: value}}` (NeMo-RL) or with a `log_history` (Trainer), event files of TensorBoard, a history exported
from W&B (CSV, JSON Lines), and scrapes of vLLM's `/metrics`. Lines of other programs in between, Ray's prefixes,
colours and progress bars do not matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tltlab.errors import ConfigError, TraceError
from tltlab.files import MOST_JSON_BYTES, open_unpacked, parse_json

from .rows import rows_of
from .step_metrics import Record, plain_key

EVENT_FILES = "events.out.tfevents*"
"""Files of metrics that TensorBoard leaves in folders of its own."""
STEPS = (
    "step", "global_step", "trainer/global_step", "training/global_step", "train/global_step", "rl_step", "iteration",
    "_step",
)  # fmt: skip
"""Fields of a JSON record that number its RL step; W&B's own `_step` may count calls of its logger."""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_VERL = re.compile(r"(?<![\w/])step:\s*(\d+) - (.*)")
_TRL = re.compile(r"\{\s*'[^']+':.*\}")
_TRL_ITEM = re.compile(r"'([^']+)':\s*'?([^,'}]+)")
_NEMO_STEP = re.compile(r"=+ ?Step (\d+)/\d+ ?=+")
_NEMO_ITEM = re.compile(r"•\s*([\w /]+):\s*(.+)")
_NEMO_NAMES = {
    "Mean Generation Length": "mean_gen_tokens_per_sample",
    "Total step time": "timing/train/total_step_time",
    "Avg Reward": "reward",
    "Draft Loss": "draft_loss",
}
_NUMBER = re.compile(r"(?:[\w.]+\()?([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\)?\s*([A-Za-z%]*)")
_SCALE = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "%": 0.01}
_MOST_LINE_BYTES = 1 << 20
_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? ([-+0-9.eEinfINFnaN]+)(?: \d+)?$")


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
    """Whether a file or folder holds metrics of RL steps; reads up to the first of them."""
    if path.is_dir():
        return bool(metrics_files(path))
    try:
        return any(True for _ in records_of(path))
    except TraceError:
        return False


def records_of(path: Path) -> Iterator[Record]:
    """The records of a log in its order, each with what `step_metrics` knows of its values. Raises TraceError."""
    files = metrics_files(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no {EVENT_FILES} in it; a log is a file, or a folder of those")
    try:
        if all(log.match(EVENT_FILES) for log in files):
            yield from _tensorboard(files)
            return
        if ".csv" in path.suffixes:
            call_times: dict[str, float] = {}
            for row in rows_of(path):
                yield from _from_fields(row.place, row.fields, call_times)
            return
        with open_unpacked(path) as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \r\n\t")
            file.seek(0)
            if b"\0" in start:
                refuse_wandb(path)
                raise TraceError(f"{path}: not text")
            if start[:1] in b"{[" and (whole := _json(file.read(MOST_JSON_BYTES))) is not None:
                yield from _from_json(whole)
                return
            file.seek(0)
            lines = (line.decode("utf-8", "replace") for line in iter(lambda: file.readline(_MOST_LINE_BYTES), b""))
            yield from _from_lines(lines)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def number(text: str) -> float | None:
    """The number a text begins with, times in seconds and shares of one; None for none, NaN and infinity.

    >>> number("12.5ms"), number("np.float64(3.0)"), number("1,024"), number("nan")
    (0.0125, 3.0, 1024.0, None)
    """
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    value = float(match[1].replace(",", "")) * _SCALE.get(match[2], 1.0)
    return value if math.isfinite(value) else None


def _from_lines(lines: Iterable[str]) -> Iterator[Record]:
    nemo_step: int | None = None
    call_times: dict[str, float] = {}
    scrape: dict[tuple[str, str], float] = {}
    before: dict[tuple[str, str], float] = {}
    num_scrapes = 0
    for line_number, line in enumerate(lines, 1):
        place = f"line {line_number}"
        # A progress bar ends in a carriage return, so several texts share a line.
        for text in _COLOURS.sub("", line).replace("\r", "\n").splitlines():
            if text.startswith("vllm:"):
                if (sample := _sample(text)) is not None:
                    if sample[0] in scrape:
                        num_scrapes += 1
                        yield from _from_counters(num_scrapes, place, before, scrape)
                        before, scrape = scrape, {}
                    scrape[sample[0]] = sample[1]
            elif "step:" in text and (verl := _VERL.search(text)):
                pairs = (item.partition(":") for item in verl[2].split(" - "))
                yield from _record(int(verl[1]), place, {key: value for key, _, value in pairs})
            elif "'" in text and "length" in text and (trl := _TRL.search(text)):
                yield from _record(None, place, dict(_TRL_ITEM.findall(trl[0])))
            elif text.startswith("{") and isinstance(fields := _json(text), dict):
                yield from _from_fields(place, fields, call_times)
            elif nemo := _NEMO_STEP.search(text):
                nemo_step = int(nemo[1])
            elif nemo_step is not None and (item := _NEMO_ITEM.search(text)):
                name = item[1].strip()
                yield from _record(nemo_step, place, {_NEMO_NAMES.get(name, f"timing/train/{name}"): item[2]})
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


def _from_fields(place: str, fields: Mapping[str, Any], call_times: dict[str, float]) -> Iterator[Record]:
    """A JSON record; groups of metrics in it, such as the `data` of verl's file logger, are taken apart.

    TRL logs each call's time to W&B in a row of its own: `call_times` adds these up for the next row of metrics.
    """
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        inner = value if isinstance(value, dict) else {None: value}
        for name, item in inner.items():
            flat[str(key) if name is None else str(name) if key == "data" else f"{key}/{name}"] = item
    numbers = (flat[name] for name in STEPS if isinstance(flat.get(name), int | float))
    steps = [step for step in numbers if abs(step) < 2**53]
    for record in _record(int(steps[0]) if steps else None, place, flat):
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


def _sample(text: str) -> tuple[tuple[str, str], float] | None:
    if (match := _SAMPLE.match(text.strip())) is None or (value := number(match[3])) is None:
        return None
    return (match[1], match[2] or ""), value


def _from_counters(
    rl_step: int, place: str, before: Mapping[tuple[str, str], float], scrape: Mapping[tuple[str, str], float]
) -> Iterator[Record]:
    """What vLLM counted between two scrapes of `/metrics`, engines added up; each scrape ends an RL step.

    The longest response is the upper bound of its bucket. Counters that fell were those of an engine that restarted.
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


def _json(text: str | bytes) -> Any:
    """A JSON value, None for what is none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def _is_step(name: Any) -> bool:
    return isinstance(name, str) and name.isdecimal()
