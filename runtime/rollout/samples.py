"""What the trainer learns from, and sequences of different lengths in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

_LENGTHS = "lengths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One whole response of N tokens to learn from.

    `logprobs` are the behaviour's as the engine returned them, N natural logarithms. `group` numbers the prompt that it
    answers; `truncated`: it ended at its cap.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    reward: float
    group: int
    truncated: bool = False


def save_ragged(path: Path, **columns: Sequence[np.ndarray]) -> None:
    """Write a safetensors file of columns, each whole, and the lengths to cut them by.

    The columns have equally many arrays; array i of every column has the same length N_i, [N_i] or [N_i, V].
    """
    whole = {
        name: np.concatenate(list(arrays)) if len(arrays) else np.empty(0, np.int32) for name, arrays in columns.items()
    }
    lengths = np.array([len(array) for array in next(iter(columns.values()))], np.int64)
    safetensors.numpy.save_file(whole | {_LENGTHS: lengths}, path)


def load_ragged(path: Path) -> dict[str, list[np.ndarray]]:
    """What `save_ragged` wrote, by column."""
    whole = safetensors.numpy.load_file(path)
    cuts = np.cumsum(whole.pop(_LENGTHS))
    return {name: np.split(array, cuts[:-1]) if len(cuts) else [] for name, array in whole.items()}
