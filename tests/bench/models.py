"""Models that benchmarks take, given or trained first, and the folders that these stand in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from bench.harness import Progress
from tltlab.errors import ConfigError
from tltlab.runtime.models.make import Size, make_model


def own_model(model: Path | None, folder: Path, *, size: str, progress: Progress) -> Path:
    """Return the folder `model`, or `folder`/models/subset-sum-SIZE, trained first where it is not there yet.

    ConfigError where `model` is no folder that `tltlab make-model` wrote.
    """
    if model is None:
        return made_model(folder / "models" / f"subset-sum-{size}", progress, size=size)
    for file in ("config.json", "train.jsonl"):
        if not (model / file).is_file():
            raise ConfigError(f"{model}: {file} is missing; name a folder that `tltlab make-model` wrote")
    return model


def made_model(out: Path, progress: Progress, *, size: str | Size) -> Path:
    """Return the folder `out` with a model of our own, trained first where it is not there."""
    if not (out / "config.json").is_file():
        progress(f"training a model into {out}")
        make_model(out, size=size, task="subset-sum", seed=0, progress=progress)
    return out


@contextmanager
def folder_or_temporary(out: Path | None, prefix: str) -> Iterator[Path]:
    """The folder `out`, or where it is None one that is removed at the end."""
    with nullcontext(out) if out is not None else tempfile.TemporaryDirectory(prefix=prefix) as place:
        yield Path(place)
