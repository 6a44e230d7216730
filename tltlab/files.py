"""Reading and writing JSON files whole."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import ConfigError, InputError


def write_json(path: Path, value: Any) -> None:
    """Write JSON to `path` in one move, parents made: who is killed or meets a full disk leaves the old file or none.

    Raises InputError where the disk refuses, ValueError for what JSON does not know.
    """
    path = Path(path)
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            new = Path(folder) / path.name
            new.write_text(text)
            os.replace(new, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """Read JSON; a missing or broken file is a ConfigError that names it."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
