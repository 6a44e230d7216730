"""What a worker did in a rollout, macro-step by macro-step, as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .regime import Regime

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Entry(NamedTuple):
    """One macro-step: switch and prefill from `start_s`, then `num_iterations` iterations of `batch` requests.

    `seconds` is the decoding part, `context_tokens` the sum before its first iteration, `tokens` all that came out,
    surplus of finishing requests included. `prefill_s` and `prefill_tokens` hold all prefill; `chunk_tokens` of them
    were prefilled beside the iterations, spread evenly. `asked` marks a decision of the policy. `gains[i, j]` is what
    request i got in iteration j where that differs between requests, else None. `noise[j]` is what iteration j's time
    was multiplied by, None without noise.
    """

    start_s: float
    switch_s: float
    prefill_s: float
    prefill_tokens: float
    chunk_tokens: float
    waiting: int
    num_iterations: int
    batch: int
    seconds: float
    context_tokens: float
    tokens: float
    asked: bool
    bucket: int | None
    propensity: float
    reward: float | None
    regime: Regime
    gains: npt.NDArray[Any] | None
    noise: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Entries as arrays of one length."""

    start_s: Floats
    switch_s: Floats
    prefill_s: Floats
    prefill_tokens: Floats
    chunk_tokens: Floats
    waiting: Ints
    num_iterations: Ints
    batch: Ints
    seconds: Floats
    context_tokens: Floats
    tokens: Floats
    asked: npt.NDArray[np.bool_]
    bucket: list[int | None]
    propensity: Floats
    reward: list[float | None]
    regime: list[Regime]
    gains: list[npt.NDArray[Any] | None]
    noise: list[Floats | None]

    def __len__(self) -> int:
        return len(self.regime)

    @property
    def decode_start_s(self) -> Floats:
        return self.start_s + self.switch_s + self.prefill_s

    @property
    def speculates(self) -> npt.NDArray[np.bool_]:
        return np.array([regime.strategy.speculates for regime in self.regime], dtype=bool)


class WorkerLog:
    """Entries one by one, or many at once as columns."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._parts: list[Columns] = []

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)

    def extend(self, columns: Columns) -> None:
        self._flush()
        self._parts.append(columns)

    @property
    def columns(self) -> Columns:
        """All of it so far."""
        self._flush()
        if len(self._parts) != 1:
            self._parts = [_joined(self._parts)] if self._parts else [_transposed([])]
        return self._parts[0]

    def _flush(self) -> None:
        if self._entries:
            self._parts.append(_transposed(self._entries))
            self._entries = []


_TYPES: dict[str, Any] = {
    "waiting": np.int64,
    "num_iterations": np.int64,
    "batch": np.int64,
    "asked": np.bool_,
    "bucket": list,
    "reward": list,
    "regime": list,
    "gains": list,
    "noise": list,
}


def _transposed(entries: list[Entry]) -> Columns:
    columns = zip(*entries, strict=True) if entries else [()] * len(Entry._fields)
    made: dict[str, Any] = {}
    for name, values in zip(Entry._fields, columns, strict=True):
        kind = _TYPES.get(name, np.float64)
        made[name] = list(values) if kind is list else np.array(values, dtype=kind)
    return Columns(**made)


def _joined(parts: list[Columns]) -> Columns:
    made: dict[str, Any] = {}
    for field in fields(Columns):
        values = [getattr(part, field.name) for part in parts]
        made[field.name] = list(chain(*values)) if _TYPES.get(field.name) is list else np.concatenate(values)
    return Columns(**made)
