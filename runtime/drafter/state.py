"""A run's drafter in a checkpoint: the weights in service, what training goes on from, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tltlab.coordination.canary import Verdict
from tltlab.errors import ConfigError

WEIGHTS = "drafter.safetensors"
TRAINING = "drafter_training.safetensors"

Tensors = Mapping[str, Tensor]


def write_drafter(folder: Path, weights: Tensors, training: Tensors) -> None:
    """Write the weights that vLLM loads, and the trained state with its optimizer's (`DrafterTraining.state_dict`)."""
    for name, tensors in ((WEIGHTS, weights), (TRAINING, training)):
        save_file({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}, folder / name)


def read_drafter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `write_drafter` wrote. Raises ConfigError where it is not there or damaged."""
    try:
        return load_file(folder / WEIGHTS), load_file(folder / TRAINING)
    except Exception as error:  # safetensors has an error of its own beside OSError
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder} does not hold the checkpoint's drafter: {said}") from error


def verdicts_state(verdicts: Mapping[int, tuple[Verdict, ...]]) -> dict[str, Any]:
    """The canaries' verdicts by worker as JSON types."""
    return {str(worker): [asdict(verdict) for verdict in found] for worker, found in verdicts.items()}


def verdicts_of(state: Mapping[str, Any]) -> dict[int, tuple[Verdict, ...]]:
    """What `verdicts_state` gave, after JSON."""
    return {int(worker): tuple(_verdict(row) for row in rows) for worker, rows in state.items()}


def _verdict(row: Mapping[str, Any]) -> Verdict:
    return Verdict(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
