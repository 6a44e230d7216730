"""A folder that is written beside its place and moved there in one step when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tltlab.errors import ConfigError, InputError, RunError


@contextmanager
def new_folder(out: Path, marker: str) -> Iterator[Path]:
    """Give a folder to write into; it becomes `out` when the block ends well and vanishes when not.

    ConfigError, before anything is done, where `out` holds something without the file `marker`, which says that it was
    written by this. RunError where the disk refuses.
    """
    if out.exists() and not (out / marker).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and has no {marker} of ours; name another folder with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    try:
        folder = beside / "new"
        folder.mkdir()
        yield folder
        if out.exists():
            os.replace(out, beside / "old")
        os.replace(folder, out)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{out} was not written: {' '.join(str(error).split())[:300]}") from error
    finally:
        if (beside / "old").exists() and not out.exists():
            os.replace(beside / "old", out)
        shutil.rmtree(beside, ignore_errors=True)
