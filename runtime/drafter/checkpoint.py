"""Checkpoints of a drafter's training state, written while training continues.

TLT (arXiv 2511.16665, Fig. 17) saves with PyTorch's distributed checkpoint (DCP): only trained tensors, staged and
written in the background, so that a step waits for the copy alone. The storage is safetensors with checksums: DCP's own
index is a pickle, which executes code when read.
"""

from __future__ import annotations

import re
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from tltlab.errors import RunError, one_line
from tltlab.files import fsync_folder, make_folder, sha256_of, written_sum
from tltlab.runtime.trainer.checkpoint import SafetensorsWriter

PARTIAL = ".partial"
_NAME = re.compile(r"checkpoint-\d{8}")
# A trainer saves on its own, in any group, and DCP would warn of that in the thread that writes.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class DrafterCheckpoint:
    """Checkpoints `checkpoint-N` in a folder, the `keep` newest; one is written at a time.

    A save copies the state into buffers on the host, which stay from save to save, and a thread writes it under a
    temporary name and renames it when it is complete. A save that fails stops nothing: its error goes to `failures` and
    the checkpoints before it stay.

    >>> saved = DrafterCheckpoint("run/drafter")                                                    # doctest: +SKIP
    >>> saved.save(training.live_state())                                                           # doctest: +SKIP
    0.0048
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.failures: list[str] = []
        self._writing: tuple[Path, Future[Any]] | None = None
        self._stager: DefaultStager | None = None

    def save(self, state: Mapping[str, Tensor]) -> float:
        """Save tensors by name; return the seconds for which the caller was blocked.

        Waits for a save still under way.
        """
        began = time.perf_counter()
        self.finish()
        newest = self.latest()
        number = 0 if newest is None else int(newest.name.partition("-")[2]) + 1
        final = self.folder / f"checkpoint-{number:08d}"
        try:
            self._writing = (final, self._start(dict(state), final))
        # A failure, from the disk to DCP's own checks, must not end training.
        except Exception as error:
            self._failed(final, error)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the last save is written, or has failed."""
        if self._writing is None:
            return
        final, future = self._writing
        self._writing = None
        error = future.exception()
        if error is not None:
            self._failed(final, error)
            # The buffers may be half written.
            self._drop_stager()

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(iter(_numbered(self.folder)), None)

    def load(self, state: Mapping[str, Tensor]) -> Path | None:
        """Read the newest readable checkpoint into `state`'s tensors, in place; None where there is none.

        The error of an unreadable one goes to `failures`, and `state` stays unchanged.
        """
        self.finish()
        for path in _numbered(self.folder):
            tensors = {name: torch.empty_like(value, device="cpu") for name, value in state.items()}
            try:
                _refuse_damage(path)
                load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
            # DCP's own exceptions are no Exception.
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                self.failures.append(f"{path}: cannot be read: {_sentence(error)}")
                continue
            with torch.no_grad():
                for name, value in state.items():
                    value.copy_(tensors[name])
            return path
        return None

    def close(self) -> None:
        """Wait for the save under way and release the buffers."""
        self.finish()
        self._drop_stager()

    def _start(self, state: dict[str, Tensor], final: Path) -> Future[Any]:
        on_cuda = any(value.is_cuda for value in state.values())
        if self._stager is None:
            # Staging in a thread would return sooner, but the caller may not change the state until it is done.
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_cuda,
                )
            )
        make_folder(self.folder)
        # Not when a folder is opened: a reader would remove a file that another process is writing.
        for partial in self.folder.glob(f"checkpoint-*{PARTIAL}"):
            shutil.rmtree(partial, ignore_errors=True)
        # DCP's process-based writer needs a process group; its thread needs none.
        future = async_save(state, storage_writer=_Writer(final, self.keep), async_stager=self._stager, no_dist=True)
        assert isinstance(future, Future)
        return future

    def _failed(self, final: Path, error: BaseException) -> None:
        shutil.rmtree(final.with_name(final.name + PARTIAL), ignore_errors=True)
        self.failures.append(f"{final}: not saved, the one before it stays: {_sentence(error)}")

    def _drop_stager(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None


class _Writer(SafetensorsWriter):
    """Writes a checkpoint under a temporary name, renames it when complete, and removes older ones."""

    def __init__(self, final: Path, keep: int) -> None:
        self.final, self.keep = final, keep
        super().__init__(final.with_name(final.name + PARTIAL))

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        fsync_folder(Path(self.path))
        Path(self.path).rename(self.final)
        fsync_folder(self.final.parent)
        for old in _numbered(self.final.parent)[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)


def _refuse_damage(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RunError("it holds no tensors")
    for file in files:
        if written_sum(file) != sha256_of(file):
            raise RunError(f"{file.name} is not what was written")


def _numbered(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return sorted((path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)), reverse=True)


def _sentence(error: BaseException) -> str:
    """Return the root cause of an error in one line: DCP wraps it, and torch's error hides the disk's."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    error = root or error
    return f"{type(error).__name__}: {one_line(error)[:400]}"
