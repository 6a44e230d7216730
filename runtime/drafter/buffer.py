"""A worker's training data for its drafter: tokens and hidden states on the host, across RL steps, bounded in bytes.

Also the same data as a safetensors file in a checkpoint.
"""

from __future__ import annotations

import heapq
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tltlab.errors import ConfigError, RunError, one_line
from tltlab.files import new_file
from tltlab.runtime.recipe.drafter import BufferConfig

from .sequences import TrainingSequence

LONGEST = 0.5
"""Share of the sequences of earlier RL steps that count as their longest."""
SHORTEST_STRETCH = 32
"""Rows below which a sequence is not cut to fill an update: text without context is unlike real drafting."""

TENSORS = ("token_ids", "hidden", "aux")


class DataBuffer:
    """Sequences of the last RL steps, for one-step-off sampling (TLT, arXiv 2511.16665, section 4.2).

    During a rollout only its short responses are there; the long ones come from earlier RL steps. Over `max_bytes` the
    oldest RL step is dropped first, within a step the shortest sequences, since long ones are rare. One thread may add
    while another samples. A sequence larger than the whole buffer keeps its end. A sequence is not kept if nothing can
    be learned from it (no token of the response follows two states) or its RL step is too old.
    """

    def __init__(self, config: BufferConfig) -> None:
        self.config = config
        self._sequences: dict[int, TrainingSequence] = {}
        self._first_out: list[tuple[int, int, int]] = []
        self._used: set[int] = set()
        self._nbytes = 0
        self._num_added = 0
        self._rl_step = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes held, at most `max_bytes`."""
        return self._nbytes

    def sequences(self) -> list[TrainingSequence]:
        """Sequences in order of arrival: added to an empty buffer, they restore this one."""
        with self._lock:
            return list(self._sequences.values())

    def begin(self, rl_step: int) -> None:
        """Begin RL step `rl_step`: sequences of earlier ones are carried over, those that are too old dropped."""
        with self._lock:
            self._rl_step = rl_step
            self._used.clear()
            while self._first_out and self._too_old(self._first_out[0][0]):
                self._drop_first()

    def add(self, sequence: TrainingSequence) -> None:
        """Add a sequence, copied to the host if it is elsewhere or a view of something larger."""
        with self._lock:
            most = _rows_within(sequence, self.config.max_bytes)
            if most < sequence.num_rows:
                sequence = sequence.stretch(sequence.num_rows - max(most, 0), max(most, 0))
            if not sequence.teaches or self._too_old(sequence.rl_step):
                return
            number = self._num_added
            self._num_added += 1
            self._sequences[number] = sequence = sequence.on_host()
            self._nbytes += sequence.nbytes
            heapq.heappush(self._first_out, (sequence.rl_step, sequence.num_rows, number))
            while self._nbytes > self.config.max_bytes:
                self._drop_first()

    def sample(self, tokens: int, rng: np.random.Generator) -> list[TrainingSequence]:
        """Return sequences of at most `tokens` rows in all, none twice; fewer rows only where no more are held.

        `carried_share` of the rows come from the longest half of the sequences of earlier RL steps, the rest from this
        RL step. A shortage on one side is filled from the other, and only a shortage on both from the shorter half.
        Each side is drawn from without replacement until it is used up, then anew. A sequence that does not fit in the
        remaining rows is cut to a random stretch, or skipped where they are few.
        """
        with self._lock:
            current = [n for n, s in self._sequences.items() if s.rl_step >= self._rl_step]
            earlier = [n for n, s in self._sequences.items() if s.rl_step < self._rl_step]
            earlier.sort(key=lambda n: -self._sequences[n].num_rows)
            longest = earlier[: int(np.ceil(LONGEST * len(earlier)))]
            carried = round(tokens * self.config.carried_share)
            drawn: dict[int, TrainingSequence] = {}
            lacking = self._draw(longest, carried, drawn, rng)
            lacking = self._draw(current, tokens - carried + lacking, drawn, rng)
            lacking = self._draw(longest, lacking, drawn, rng)
            self._draw(earlier, lacking, drawn, rng)
            return list(drawn.values())

    def _draw(
        self, side: Collection[int], room: int, drawn: dict[int, TrainingSequence], rng: np.random.Generator
    ) -> int:
        """Add sequences of one side to `drawn`; return the rows left unfilled."""
        shortest = max(2, min(SHORTEST_STRETCH, room))
        for _ in range(2):
            fresh = [n for n in side if n not in self._used]
            for n in rng.permutation(np.array(fresh, np.int64)).tolist():
                sequence = self._sequences[n]
                if sequence.num_rows > room:
                    if room < shortest:
                        continue
                    sequence = sequence.stretch(_random_start(sequence, room, rng), room)
                self._used.add(n)
                drawn[n] = sequence
                room -= sequence.num_rows
            if room < 2 or any(n not in self._used for n in side):
                break
            self._used.difference_update(n for n in side if n not in drawn)
        return room

    def _too_old(self, rl_step: int) -> bool:
        return rl_step <= self._rl_step - self.config.rl_steps

    def _drop_first(self) -> None:
        number = heapq.heappop(self._first_out)[2]
        self._nbytes -= self._sequences.pop(number).nbytes
        self._used.discard(number)


def _random_start(sequence: TrainingSequence, rows: int, rng: np.random.Generator) -> int:
    """Return the start of a stretch of `rows`: random, at most half prompt where the response is long enough."""
    last = sequence.num_rows - rows
    return int(rng.integers(min(max(0, sequence.prompt_tokens - rows // 2), last), last + 1))


def _rows_within(sequence: TrainingSequence, max_bytes: int) -> int:
    """Return the number of rows that take at most `max_bytes`; below 0 if not even a token fits."""
    token = sequence.token_ids.element_size()
    row = token + sum(t[:1].numel() * t.element_size() for t in (sequence.hidden, sequence.aux) if t is not None)
    return (max_bytes - token) // row


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerData:
    """A trainer's buffer, its held-out sequences, both oldest first, and its generator's state."""

    held: Sequence[TrainingSequence]
    heldout: Sequence[TrainingSequence]
    random_state: Mapping[str, Any]


def data_path(folder: Path, worker: int) -> Path:
    """Path in a checkpoint's folder for the data of the trainer beside worker `worker`."""
    return folder / f"data-{worker}.safetensors"


def write_data(path: Path, data: TrainerData) -> None:
    """Write the data atomically, without copying tensors. RunError where the disk fails."""
    sequences = [*data.held, *data.heldout]
    tensors: dict[str, Tensor] = {}
    for number, sequence in enumerate(sequences):
        parts = {name: getattr(sequence, name) for name in TENSORS}
        tensors |= {f"{number}.{name}": value.contiguous() for name, value in parts.items() if value is not None}
    header = {
        "num_held": len(data.held),
        "random_state": data.random_state,
        "sequences": [[list(s.key), s.first_position, s.prompt_tokens] for s in sequences],
    }
    try:
        with new_file(path) as new:
            save_file(tensors, new, metadata={"trainer_data": json.dumps(header)})
    except (OSError, SafetensorError) as error:
        cause = one_line(error)[:200]
        raise RunError(f"cannot write training data to {path}, is the disk full? ({cause})") from error


def read_data(path: Path) -> TrainerData:
    """Read the result of `write_data`. ConfigError where the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["trainer_data"])
            names = set(file.keys())
            sequences = [
                TrainingSequence(
                    key=(key[0], key[1], key[2], key[3]),
                    first_position=first_position,
                    prompt_tokens=prompt_tokens,
                    # Copies, since each view would hold the file's whole memory.
                    **{name: file.get_tensor(f"{n}.{name}").clone() for name in TENSORS if f"{n}.{name}" in names},
                )
                for n, (key, first_position, prompt_tokens) in enumerate(header["sequences"])
            ]
        cut = header["num_held"]
        return TrainerData(held=sequences[:cut], heldout=sequences[cut:], random_state=header["random_state"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        cause = one_line(error)[:200]
        raise ConfigError(f"{path} does not hold training data of a drafter: {cause}") from error
