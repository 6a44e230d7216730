"""Checkpoints of a drafter's training state, written while training continues.

As in TLT (arXiv 2511.16665, Fig. 17) a checkpoint has only trained tensors, is copied to the host and written in the
background, so that a step waits for the copy alone.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tltlab.errors import RunError, TltlabError, one_line
from tltlab.files import fsync_file, new_folder, sha256_of, write_sum, written_sum

from .heads.head import check_tensors

_NAME = re.compile(r"checkpoint-\d{8}")
_FILE = "state.safetensors"


class DrafterCheckpoint:
    """Checkpoints `checkpoint-N` in a folder, the `keep` newest; one is written at a time.

    A save copies the state into buffers on the host, which stay from save to save, and a thread writes them, with a
    checksum; the folder appears when it is complete. A save that fails stops nothing: its error goes to `failures` and
    the checkpoints before it stay.

    >>> saved = DrafterCheckpoint("run/drafter")                                                    # doctest: +SKIP
    >>> saved.save(training.live_state())                                                           # doctest: +SKIP
    0.0048
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.failures: list[str] = []
        self._staged: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "tltlab-checkpoint")
        self._writing: tuple[Path, Future[None]] | None = None

    def save(self, state: Mapping[str, Tensor]) -> float:
        """Save tensors by name; return the seconds for which the caller was blocked.

        Waits for a save still under way.
        """
        began = time.perf_counter()
        self.finish()
        newest = self.latest()
        final = self.folder / f"checkpoint-{0 if newest is None else int(newest.name[-8:]) + 1:08d}"
        try:
            for name, value in state.items():
                if name not in self._staged:
                    self._staged[name] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                self._staged[name].copy_(value, non_blocking=value.is_cuda)
            if any(value.is_cuda for value in state.values()):
                torch.cuda.synchronize()
        except RuntimeError as error:
            self._failed(final, error)
        else:
            self._writing = final, self._thread.submit(self._write, final)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the last save is written, or has failed."""
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing[1].exception()) is not None:
            self._failed(writing[0], error)

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(iter(_numbered(self.folder)), None)

    def load(self, state: Mapping[str, Tensor]) -> Path | None:
        """Read the newest readable checkpoint into `state`'s tensors, in place; None where there is none.

        The error of an unreadable one goes to `failures`, and `state` stays unchanged.
        """
        self.finish()
        for path in _numbered(self.folder):
            try:
                tensors = _read(path, state)
            except (OSError, SafetensorError, TltlabError) as error:
                self.failures.append(f"{path}: cannot be read: {_in_words(error)}")
                continue
            with torch.no_grad():
                for name, value in state.items():
                    value.copy_(tensors[name])
            return path
        return None

    def close(self) -> None:
        """Wait for the save under way and release the buffers."""
        self.finish()
        self._thread.shutdown()
        self._staged = {}

    def _write(self, final: Path) -> None:
        with new_folder(final, durable=True, replace=False) as folder:
            file = folder / _FILE
            save_file(self._staged, file)
            fsync_file(file)
            write_sum(file, sha256_of(file))
        for old in _numbered(self.folder)[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def _failed(self, final: Path, error: BaseException) -> None:
        self.failures.append(f"{final}: not saved, the one before it stays: {_in_words(error)}")


def _read(folder: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    file = folder / _FILE
    if written_sum(file) != sha256_of(file):
        raise RunError(f"{file.name} is not what was written")
    tensors = load_file(file)
    check_tensors("not a state of this drafter", state, tensors)
    return tensors


def _numbered(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return sorted((path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)), reverse=True)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)[:400]}"
