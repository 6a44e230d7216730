"""Prompts with a checkable answer, from JSONL, Parquet and Hugging Face datasets."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.lib
import pyarrow.parquet as pq

from tltlab.config import leaves
from tltlab.errors import ConfigError, TraceError, one_line
from tltlab.importers.rows import rows_of
from tltlab.records import Fields, frozen
from tltlab.runtime.recipe.sections import DataConfig

# The loader for a file, by its first suffix; a second one may name the compression.
_LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow", ".parquet": "parquet"}


@frozen
class Prompt:
    """One problem. `token_ids` is the model's input, `text` the reward function's.

    The text of a prompt with several messages is the user's last one.
    """

    prompt_id: str
    text: str
    answer: str
    token_ids: list[int]


def read_prompts(
    source: str, config: DataConfig, tokenizer: Any, *, split: str | None = None, room: int | None = None
) -> tuple[list[Prompt], int]:
    """Read `source`: a .jsonl or .parquet file, or else the `split` of a dataset (None: config.split).

    Return the prompts in the order of their source, and the number of those left out as too long.

    A row without `prompt_id` gets its number. An answer that is not text becomes text: a number as Python writes it, a
    list or a struct as JSON. ConfigError for unreadable data names the place and, for a missing column, the existing
    ones; also for prompts that fill an engine's context of `room` tokens (None: unknown).
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    lengths: list[int] = []
    overlong: list[tuple[str, int]] = []
    for place, prompt in _prompts(source, config, tokenizer, split or config.split):
        if prompt.prompt_id in places:
            first = places[prompt.prompt_id]
            raise ConfigError(f"{source}: prompt_id {prompt.prompt_id!r} is not unique: {first} and {place}")
        places[prompt.prompt_id] = place
        lengths.append(len(prompt.token_ids))
        if config.max_prompt_tokens is None or lengths[-1] <= config.max_prompt_tokens:
            prompts.append(prompt)
            if room is not None and lengths[-1] >= room:
                overlong.append((place, lengths[-1]))
    if not lengths:
        raise ConfigError(f"{source} has no rows")
    if not prompts:
        most = config.max_prompt_tokens
        raise ConfigError(
            f"{source}: the shortest prompt has {min(lengths)} tokens; raise data.max_prompt_tokens = {most}"
        )
    if overlong:
        (place, tokens), more = overlong[0], f", nor do {len(overlong) - 1} others" if overlong[1:] else ""
        raise ConfigError(
            f"{source}: {place}: a prompt of {tokens} tokens fills the engine's context of {room}{more}: "
            f"shorten them, or set data.max_prompt_tokens below {room}"
        )
    return prompts, len(lengths) - len(prompts)


def _prompts(source: str, config: DataConfig, tokenizer: Any, split: str) -> Iterator[tuple[str, Prompt]]:
    """Yield each prompt with its place in the source."""
    if config.system is not None and not config.chat:
        raise ConfigError("data.system is part of a chat: set data.chat = true, or leave it out")
    if config.chat and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("the model's tokenizer has no chat template: set data.chat = false, or use a chat model")
    for number, (place, row) in enumerate(_rows(source, config, split)):
        origin = f"{source}: {place}"
        text, messages = _messages(_column(row, config.prompt_column, origin), config, origin)
        _check_unicode(json.dumps(messages, ensure_ascii=False, default=str), config.prompt_column, origin)
        if config.chat:
            try:
                encoded = tokenizer.apply_chat_template(
                    messages, **config.chat_template_kwargs, add_generation_prompt=True, return_dict=True
                )
            except Exception as error:  # a template, or its output in the tokenizer, may raise anything
                why = f"the model's chat template refuses the prompt: {one_line(error)}"
                raise ConfigError(f"{origin}: {why}") from error
        else:
            encoded = tokenizer(text)
        token_ids = list(encoded["input_ids"])
        if not token_ids or not text.strip():
            raise ConfigError(f"{origin}: the prompt in column {config.prompt_column!r} is empty")
        answer = _answer(_column(row, config.answer_column, origin), config.answer_column, origin)
        prompt_id = str(row["prompt_id"]) if row.get("prompt_id") is not None else str(number)
        _check_unicode(prompt_id, "prompt_id", origin)
        yield place, Prompt(prompt_id=prompt_id, text=text, answer=answer, token_ids=token_ids)


def first_row(source: str, config: DataConfig) -> tuple[str, str] | None:
    """Return the first prompt and answer of a .jsonl or .parquet file, as for the reward; None for other sources.

    ConfigError where a column is missing or empty; no tokenizer is used.
    """
    if not _is_file(source):
        return None
    place, row = next(_rows(source, config, config.split), ("", None))
    if row is None:
        return None
    origin = f"{source}: {place}"
    text, _ = _messages(_column(row, config.prompt_column, origin), config, origin)
    return text, _answer(_column(row, config.answer_column, origin), config.answer_column, origin)


def num_rows(source: str) -> int | None:
    """Return the number of rows of a .jsonl or .parquet file; None for other or unreadable sources. O(bytes)."""
    if not _is_file(source):
        return None
    try:
        if source.endswith(".parquet"):
            return int(pq.read_metadata(source).num_rows)
        with Path(source).open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    except (OSError, pyarrow.lib.ArrowException):
        return None


def _is_file(source: str) -> bool:
    return Path(source).is_file() and Path(source).suffix in (".jsonl", ".parquet")


def _rows(source: str, config: DataConfig, split: str) -> Iterator[tuple[str, Fields]]:
    """Yield each row with its place in the source."""
    path = Path(source)
    if path.suffix in (".jsonl", ".parquet") and not path.is_dir():
        yield from rows_of_file(path)
        return
    rows = _dataset_rows(source, subset=config.subset, split=split)
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def rows_of_file(path: Path) -> Iterator[tuple[str, Fields]]:
    """Yield each row of a .jsonl or .parquet file with its place. ConfigError names the line that is no row."""
    if path.is_file() and not path.stat().st_size:
        return
    try:
        yield from rows_of(path)
    except TraceError as error:
        raise ConfigError(str(error)) from error


def _dataset_rows(source: str, *, subset: str | None, split: str) -> Iterator[Fields]:
    """Yield the rows of one split of a dataset: an id, a folder of `save_to_disk`, a folder of files, or a file.

    A file has no splits, nor has a folder written from a single one; elsewhere `split` may be a slice ("train[:100]").
    ConfigError, in one line, where there is no such dataset, subset or split.
    """
    if not source:
        raise ConfigError("data.train or data.heldout is empty: name a file, a folder or a dataset")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source} is a Hugging Face dataset; to read one: pip install datasets") from error
    datasets.disable_progress_bars()
    path = Path(source)
    loader = next((_LOADERS[suffix] for suffix in path.suffixes[-2:] if suffix in _LOADERS), None)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(source)
            if isinstance(rows, datasets.DatasetDict):
                if split not in rows:
                    raise ConfigError(f"dataset {source} has no split {split!r}; it has {', '.join(rows)}")
                rows = rows[split]
        elif loader is not None and not path.is_dir():
            if not path.is_file():
                raise ConfigError(f"cannot read {source}: there is no such file")
            rows = datasets.load_dataset(loader, data_files=source, split="train")
        else:
            rows = datasets.load_dataset(source, subset, split=split)
    except ConnectionError as error:
        missing = f"dataset {source} is not in the cache, and "
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise ConfigError(f"{missing}HF_HUB_OFFLINE forbids to fetch it: unset it, or name a folder") from error
        raise ConfigError(
            f"{missing}the Hugging Face Hub cannot be reached: name a folder (HF_HUB_OFFLINE=1 ends the retries)"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        name = ", ".join([f"dataset {source}", *([f"subset {subset}"] if subset is not None else []), f"split {split}"])
        raise ConfigError(f"cannot load {name}: {' '.join(str(error).split())[:300]}") from error
    yield from rows


def _column(row: Fields, name: str, origin: str) -> Any:
    """Return the value of a column, or of a struct's field where the name is a dotted path; never None."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"{origin} has no column {name!r}; it has {', '.join(dict(leaves(row))) or 'none'}")
        value = value[part]
    # A column with missing values comes out of pandas as numbers, with NaN for them.
    if value is None or (isinstance(value, float) and value != value):
        raise ConfigError(f"{origin} has nothing in column {name!r}; fill it in, or leave the row out")
    return value


def _check_unicode(text: str, column: str, origin: str) -> None:
    """Raise ConfigError for half a surrogate pair: a Python string, but accepted by neither tokenizer nor trace."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{origin}: column {column!r} has half a surrogate pair, which is no Unicode text") from error


def _answer(value: Any, column: str, origin: str) -> str:
    if isinstance(value, bytes):
        raise ConfigError(f"{origin}: column {column!r} has bytes where text belongs; decode them")
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else str(value)
    _check_unicode(text, column, origin)
    return text


def _messages(prompt: Any, config: DataConfig, origin: str) -> tuple[str, list[Fields]]:
    if isinstance(prompt, str):
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        return prompt, [*system, {"role": "user", "content": prompt}]
    column = f"{origin}: column {config.prompt_column!r}"
    if not isinstance(prompt, list):
        raise ConfigError(f"{column} has a {type(prompt).__name__} where a text or a list of messages belongs")
    if not config.chat:
        raise ConfigError(f"{column} has a list of messages: set data.chat = true, to apply the model's chat template")
    for message in prompt:
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{column} has a message that is not {{role, content}}, both of them text")
    questions = [message["content"] for message in prompt if message["role"] == "user"]
    if not questions:
        raise ConfigError(f"{column} has no message of the user")
    return questions[-1], [{name: value for name, value in m.items() if value is not None} for m in prompt]
