"""The checkpoints of a run: folders that are complete or absent; the newest ones stay.

    step-000010/ step-000020/    one each, named by the RL step that comes next
    step-000020/checkpoint.json  {"rl_step": 20, "files": {NAME: {"bytes": 123, "sha256": ...}}}, written last

Large files are hashed while they are written, into `NAME.sha256` next to them, so that a save reads no gigabytes back.
Files are read and checked when a run returns to a checkpoint; otherwise only their size is checked.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tltlab.errors import ConfigError, RunError, disk_full, one_line
from tltlab.files import fsync_file, fsync_folder, new_folder, read_text, sha256_of, write_durably, written_sum
from tltlab.records import Json

MANIFEST = "checkpoint.json"
MOST_HASHED_BYTES = 1 << 20
"""Size up to which files are hashed at every check of a checkpoint."""
_STEP = re.compile(r"step-(\d{6,})")


class RunCheckpoints:
    """The checkpoints in `folder`; `save` keeps the newest `keep`.

    A killed writer leaves earlier checkpoints intact. One process saves at a time.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = Path(folder)
        self.keep = keep

    def save(self, rl_step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a folder, make it the checkpoint of `rl_step`, and remove all but the newest.

        Newer ones are removed too: they belong to a course that this run has left. RunError where the disk fails;
        exceptions of `write` are passed on. The earlier checkpoints stay then.
        """
        final = self.folder / f"step-{rl_step:06d}"
        try:
            self._tidy()
            with new_folder(final, durable=True) as new:
                write(new)
                self._seal(new, rl_step)
        except OSError as error:
            why = disk_full(error, final) or f"cannot write the checkpoint {final}: {error.strerror or error}"
            raise RunError(f"{why}; earlier checkpoints are unchanged") from error
        self._prune(rl_step)
        return final

    def latest(self, note: Callable[[str], object] = lambda sentence: None) -> Path | None:
        """Return the newest complete checkpoint, checked in full, None for none; `note` those passed over."""
        self._tidy()
        for path in reversed(checkpoints_in(self.folder)):
            if (fault := fault_of(path, to_the_bit=True)) is None:
                return path
            note(f"checkpoint {path} is passed over: {fault}")
        return None

    def _seal(self, folder: Path, rl_step: int) -> None:
        """Make all files durable, then the list of them."""
        files: Json = {}
        folders = [folder]
        for path in sorted(folder.rglob("*")):
            if path.is_dir():
                folders.append(path)
                continue
            fsync_file(path)
            stored_sum = written_sum(path)
            sha256 = sha256_of(path) if stored_sum is None else stored_sum
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": sha256}
        write_durably(folder / MANIFEST, json.dumps({"rl_step": rl_step, "files": files}, indent=1).encode())
        for path in reversed(folders):
            fsync_folder(path)

    def _prune(self, rl_step: int) -> None:
        paths = checkpoints_in(self.folder)
        whole = [path for path in paths if step_of(path) <= rl_step and fault_of(path) is None]
        for path in set(paths) - set(whole[-self.keep :]):
            try:
                self._remove(path)
            except OSError as error:
                # An old one is removed with a later save; a run would go back to a newer one.
                if step_of(path) > rl_step:
                    raise RunError(f"cannot remove the checkpoint {path}: {error.strerror or error}") from error

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint atomically under its name."""
        trash = path.with_name(f".{path.name}.gone")
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(path, trash)
        fsync_folder(self.folder)
        shutil.rmtree(trash, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove leftovers of killed writers; a checkpoint comes back that was to be replaced, and was not."""
        for leftover in self.folder.glob(".step-*"):
            path = self.folder / leftover.name.split(".")[1]
            if (leftover / "old").exists() and not path.exists():
                os.rename(leftover / "old", path)
            shutil.rmtree(leftover, ignore_errors=True)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that need not exist, complete or not, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _STEP.fullmatch(path.name)), key=step_of)


def newest_whole(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder that need not exist; large files are checked by size."""
    return next((path for path in reversed(checkpoints_in(folder)) if fault_of(path) is None), None)


def step_of(path: Path) -> int:
    """Return the RL step after the checkpoint `path`; ConfigError where its name has none."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise ConfigError(f"{path} is no checkpoint: its name must be step-NNNNNN")
    return int(match[1])


def fault_of(path: Path, *, to_the_bit: bool = False) -> str | None:
    """Return the fault of an unusable checkpoint, None where it is complete. Large files are read only `to_the_bit`."""
    try:
        files: dict[str, Json] = json.loads(read_text(path / MANIFEST))["files"]
        for name, expected in files.items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if (to_the_bit or size <= MOST_HASHED_BYTES) and sha256_of(path / name) != expected["sha256"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fault = f"{Path(error.filename).name} is missing" if isinstance(error, FileNotFoundError) else str(error)
        return one_line(fault)
    return None
