"""Prompts with a checkable answer, and the reward function that checks them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.lib
import pyarrow.parquet as pq

from tltlab.errors import ConfigError

from .recipe import DataConfig

Reward = Callable[[str, str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem. `token_ids` is what the model reads, `text` what the reward function reads."""

    prompt_id: str
    text: str
    answer: str
    token_ids: list[int]


def load_prompts(source: str, config: DataConfig, tokenizer: Any) -> list[Prompt]:
    """Read `source`: a .jsonl or .parquet file, a saved Hugging Face dataset folder, or a dataset id.

    A row without `prompt_id` gets its number. ConfigError where the file or a column is missing.
    """
    rows = list(_rows(source))
    if not rows:
        raise ConfigError(f"{source} has no rows")
    for column in (config.prompt_column, config.answer_column):
        missing = next((i for i, row in enumerate(rows) if row.get(column) is None), None)
        if missing is not None:
            raise ConfigError(f"{source}: row {missing} has no column {column!r}; it has {', '.join(rows[missing])}")
    prompts = []
    for number, row in enumerate(rows):
        text = str(row[config.prompt_column])
        if config.chat:
            messages = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(text)["input_ids"]
        prompts.append(
            Prompt(
                prompt_id=str(row.get("prompt_id", number)),
                text=text,
                answer=str(row[config.answer_column]),
                token_ids=list(ids),
            )
        )
    if len({p.prompt_id for p in prompts}) < len(prompts):
        raise ConfigError(f"{source}: prompt_id is not unique")
    return prompts


def _rows(source: str) -> Iterator[dict[str, Any]]:
    path = Path(source)
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{source}: line {number} is not JSON") from error
    elif path.suffix == ".parquet":
        try:
            yield from pq.read_table(path).to_pylist()
        except (OSError, pyarrow.lib.ArrowInvalid) as error:
            raise ConfigError(f"cannot read {source}: {error}") from error
    else:
        yield from _hub_rows(source)


def _hub_rows(source: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source} is a Hugging Face dataset; to read one: pip install datasets") from error
    try:
        data = datasets.load_from_disk(source) if Path(source).is_dir() else datasets.load_dataset(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load dataset {source}: {' '.join(str(error).split())[:300]}") from error
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise ConfigError(f"dataset {source} has no split 'train'; it has {', '.join(data)}")
        data = data["train"]
    yield from (dict(row) for row in data)


def load_reward(path: str) -> Reward:
    """Import `package.module:function`; ConfigError says what did not import."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"reward {path!r} is not package.module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"reward {path!r} does not import: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"reward {path!r}: {module} has no {name!r}") from error
    if not callable(function):
        raise ConfigError(f"reward {path!r} is not a function")
    return function  # type: ignore[no-any-return]


def prompt_batch(num_prompts: int, rl_step: int, size: int, seed: int) -> list[tuple[int, int]]:
    """Return (epoch, prompt number) of each prompt of an RL step: a function of its arguments alone.

    An epoch is a seeded permutation cut into batches of `size`; what does not fill a batch waits for another epoch.
    With fewer prompts than `size` each epoch is one smaller batch.
    """
    epoch, slot = divmod(rl_step, max(num_prompts // size, 1))
    order = np.random.default_rng([seed, epoch]).permutation(num_prompts)
    return [(epoch, int(i)) for i in order[slot * size : (slot + 1) * size]]
