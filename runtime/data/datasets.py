"""Rows of a Hugging Face dataset: an id of the Hub, a folder, or a file of a format that `datasets` reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tltlab.errors import ConfigError

# The loader for a file, by its first suffix: what follows it may say how it is compressed.
_LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow", ".parquet": "parquet"}


def dataset_rows(source: str, *, subset: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    """The rows of one split of a dataset: an id, a folder written by `save_to_disk`, a folder of files, or a file.

    A file has no splits, nor has a folder written from a single one; elsewhere `split` may be a slice ("train[:100]").
    ConfigError where there is no such dataset, subset or split, in one line.
    """
    if not source:
        raise ConfigError("data.train or data.heldout is empty: name a file, a folder or a dataset")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source} is a Hugging Face dataset; to read one: pip install datasets") from error
    datasets.disable_progress_bars()
    path = Path(source)
    suffixes = path.suffixes
    loader = next((_LOADERS[suffix] for suffix in suffixes[-2:] if suffix in _LOADERS), None)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(source)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise ConfigError(f"dataset {source} has no split {split!r}; it has {', '.join(found)}")
                found = found[split]
        elif loader is not None and not path.is_dir():
            if not path.is_file():
                raise ConfigError(f"cannot read {source}: there is no such file")
            found = datasets.load_dataset(loader, data_files=source, split="train")
        else:
            found = datasets.load_dataset(source, subset, split=split)
    except ConnectionError as error:
        raise ConfigError(_unreachable(source)) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        subset_said = "" if subset is None else f", subset {subset}"
        what = f"dataset {source}{subset_said}, split {split}"
        raise ConfigError(f"cannot load {what}: {' '.join(str(error).split())[:300]}") from error
    yield from found


def _unreachable(source: str) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return (
            f"dataset {source} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it: unset it, or name a folder"
        )
    return (
        f"dataset {source} is not in the cache, and the Hugging Face Hub cannot be reached: name a folder, or fetch it "
        "where there is a network (HF_HUB_OFFLINE=1 ends the retries)"
    )
