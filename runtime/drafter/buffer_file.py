"""What a drafter's trainer learns from, as a safetensors file in a checkpoint: its sequences, and its random state."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tltlab.errors import ConfigError, RunError

from .sequences import TrainingSequence

PARTIAL = ".partial"
"""How the name ends of a file that is being written; where its writer dies it stays."""

TENSORS = ("token_ids", "hidden", "aux")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerData:
    """The sequences in a trainer's buffer, those it is judged by, both oldest first, and its generator's state."""

    held: Sequence[TrainingSequence]
    heldout: Sequence[TrainingSequence]
    random_state: Mapping[str, Any]


def data_path(folder: Path, worker: int) -> Path:
    """Where a checkpoint's folder has the data of the trainer beside worker `worker`."""
    return folder / f"data-{worker}.safetensors"


def write_data(path: Path, data: TrainerData) -> None:
    """Write it as a whole or not at all; tensors are not copied for it. RunError where the disk refuses."""
    sequences = [*data.held, *data.heldout]
    tensors: dict[str, Tensor] = {}
    for number, sequence in enumerate(sequences):
        found = {name: getattr(sequence, name) for name in TENSORS}
        tensors |= {f"{number}.{name}": value.contiguous() for name, value in found.items() if value is not None}
    told = {
        "num_held": len(data.held),
        "random_state": data.random_state,
        "sequences": [[list(s.key), s.first_position, s.prompt_tokens] for s in sequences],
    }
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"trainer_data": json.dumps(told)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        said = " ".join(str(error).split())[:200]
        raise RunError(f"cannot write what it trains on to {path}, is the disk full? ({said})") from error


def read_data(path: Path) -> TrainerData:
    """What `write_data` wrote. Raises ConfigError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["trainer_data"])
            names = set(file.keys())
            sequences = [
                TrainingSequence(
                    key=(key[0], key[1], key[2], key[3]),
                    first_position=first_position,
                    prompt_tokens=prompt_tokens,
                    # Of their own: the file's memory would be held as long as any of them.
                    **{name: file.get_tensor(f"{n}.{name}").clone() for name in TENSORS if f"{n}.{name}" in names},
                )
                for n, (key, first_position, prompt_tokens) in enumerate(told["sequences"])
            ]
        cut = told["num_held"]
        return TrainerData(held=sequences[:cut], heldout=sequences[cut:], random_state=told["random_state"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} does not hold what the drafter's trainer learns from: {said}") from error
