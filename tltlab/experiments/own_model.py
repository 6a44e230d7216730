"""The model that an experiment runs: the one it was given, or one of our own, trained once and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tltlab.errors import ConfigError


def own_model(given: Path | None, folder: Path, *, size: str, progress: Callable[[str], None]) -> Path:
    """The folder `given`, or `folder`/models/subset-sum-SIZE, trained first where it is not there yet.

    ConfigError where `given` is no folder that `tltlab make-model` wrote.
    """
    if given is not None:
        for file in ("config.json", "train.jsonl"):
            if not (given / file).is_file():
                raise ConfigError(f"{given}: {file} is missing; name a folder that `tltlab make-model` wrote")
        return given
    found = folder / "models" / f"subset-sum-{size}"
    if not (found / "config.json").is_file():
        from tltlab.runtime.models.make import make_model

        progress(f"no model was given: training a {size} one into {found}")
        make_model(found, size=size, task="subset-sum", seed=0, progress=progress)
    return found
