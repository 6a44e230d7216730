"""A trainer's state in a folder: safetensors of every rank's share, readable by any number of ranks.

torch.distributed.checkpoint reads and writes them through its Hugging Face storage, whose index is the header of each
file. (Its own storage would pickle an index.) Ranks exchange their plans over their process group as torch does it.
Beside every file of tensors is its SHA-256, `NAME.sha256` in the format of sha256sum, computed while it is written.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tltlab.errors import RunError, one_line
from tltlab.files import Hashing, fsync_file, read_text, write_sum

TENSORS, STATE = "tensors", "state.json"


class SafetensorsWriter(HuggingFaceStorageWriter):
    """DCP's storage as safetensors, one file for each rank that saves, without an index; each with its SHA-256."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.fs = _HashingFiles()


class _HashingFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with super().create_stream(path, mode) as stream:
            hashing = Hashing(cast(Any, stream))
            yield cast(IOBase, hashing)
        # DCP's own fsync precedes the flush of Python's last write.
        fsync_file(Path(path))
        write_sum(Path(path), hashing.hexdigest())


def save_trainer(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, rank: int) -> None:
    """Write weights, AdamW's moments after `steps` steps and torch's random state into the folder. All ranks call it.

    The folder does not appear atomically: the caller's checkpoint store does that. RunError where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings(action="ignore"):
            save(
                _tensors(module, optimizer, with_moments=steps > 0),
                storage_writer=SafetensorsWriter(folder / TENSORS),
                no_dist=not dist.is_initialized(),
            )
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        save_file(generators, folder / f"random-{rank}.safetensors")
        if rank == 0:
            (folder / STATE).write_text(json.dumps({"steps": steps}))
    except (OSError, SafetensorError, CheckpointException) as error:
        cause = one_line(error)[-200:]
        raise RunError(f"cannot write the trainer's checkpoint to {folder}, is the disk full? ({cause})") from error


def load_trainer(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int) -> int:
    """Restore the result of `save_trainer`, and return its `steps`. RunError where the folder is incomplete.

    The random state is restored on ranks that existed; the same number of ranks continues bitwise the same.
    """
    try:
        steps = int(json.loads(read_text(folder / STATE))["steps"])
        optimizer.state.clear()
        if steps:
            # AdamW creates its moments at a first step; with zero gradients it changes nothing that is not loaded. The
            # gradients are the parameters' own: a sharded module has gathered parameters after a forward without
            # backward.
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                state["step"].fill_(steps)
        with warnings.catch_warnings(action="ignore"):
            load(
                _tensors(module, optimizer, with_moments=steps > 0),
                storage_reader=HuggingFaceStorageReader(str(folder / TENSORS)),
                no_dist=not dist.is_initialized(),
            )
        random = folder / f"random-{rank}.safetensors"
        if random.is_file():
            generators = load_file(random)
            torch.set_rng_state(generators["cpu"])
            if "cuda" in generators and torch.cuda.is_available():
                torch.cuda.set_rng_state(generators["cuda"])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise RunError(f"{folder}: no whole checkpoint of this model's trainer: {str(error)[:300]}") from error
    return steps


def _tensors(module: nn.Module, optimizer: torch.optim.Optimizer, *, with_moments: bool) -> dict[str, Tensor]:
    """Return weights and moments by name, tied ones once."""
    tensors: dict[str, Tensor] = {}
    ids: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in ids:
            continue
        ids.add(id(tensor))
        tensors[name] = tensor.detach()
        if with_moments and isinstance(tensor, nn.Parameter):
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = optimizer.state[tensor][moment]
    return tensors
