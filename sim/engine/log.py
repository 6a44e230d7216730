"""Log of a worker's macro-steps in a rollout, as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import chain

import numpy as np

from tltlab.arrays import Array, Flags, Floats, Ints
from tltlab.records import Json, frozen

from .batch import MacroStep
from .regime import Regime


@dataclass(slots=True)
class LogEntry:
    """One macro-step with what came before it and during it; the fields are as in `Columns`."""

    start_s: float
    switch_s: float
    prefill_s: float
    prefill_tokens: float
    chunk_tokens: float
    waiting: int
    is_decision: bool
    bucket: int | None
    propensity: float
    reward: float | None
    noise: Floats | None
    macro: MacroStep


@frozen
class Columns:
    """Macro-steps as arrays of one length: switch and prefill from `start_s`, then `num_iterations` iterations.

    `batch` requests run in each, `seconds` is the decoding part, `context_tokens` the sum before its first iteration,
    `tokens` all that came out, surplus of finishing requests included. `prefill_s` and `prefill_tokens` hold all
    prefill; `chunk_tokens` of them were prefilled beside the iterations, spread evenly. `is_decision` where the policy
    was asked. `gains[i, j]` of a macro-step is what request i got in iteration j where that differs between requests,
    else None. `noise[j]` is what iteration j's time was multiplied by, None without noise.
    """

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
    is_decision: Flags
    bucket: list[int | None]
    propensity: Floats
    reward: list[float | None]
    regime: list[Regime]
    gains: list[Array | None]
    noise: list[Floats | None]

    def __len__(self) -> int:
        return len(self.regime)

    @property
    def decode_start_s(self) -> Floats:
        return self.start_s + self.switch_s + self.prefill_s

    @property
    def speculates(self) -> Flags:
        return np.array([regime.strategy.speculates for regime in self.regime], dtype=bool)

    @classmethod
    def of(cls, entries: list[LogEntry]) -> Columns:
        """Make columns from single macro-steps."""
        columns: Json = {}
        for name in _NAMES:
            values = [getattr(entry if name in LogEntry.__slots__ else entry.macro, name) for entry in entries]
            columns[name] = values if name in _LISTS else np.array(values, dtype=_TYPES.get(name, np.float64))
        return cls(**columns)

    def take(self, rows: Ints) -> Columns:
        """These rows, in their order."""
        columns: Json = {}
        for name in _NAMES:
            values = getattr(self, name)
            columns[name] = [values[row] for row in rows.tolist()] if name in _LISTS else values[rows]
        return Columns(**columns)

    @classmethod
    def joined(cls, parts: list[Columns]) -> Columns:
        """One after another."""
        columns: Json = {}
        for name in _NAMES:
            values = [getattr(part, name) for part in parts]
            columns[name] = list(chain(*values)) if name in _LISTS else np.concatenate(values)
        return cls(**columns)


_NAMES = tuple(field.name for field in fields(Columns))
_LISTS = {"bucket", "reward", "regime", "gains", "noise"}
_TYPES = {"waiting": np.int64, "num_iterations": np.int64, "batch": np.int64, "is_decision": np.bool_}


class WorkerLog:
    """Entries one by one, or many at once as columns, which are made when they are first read."""

    def __init__(self) -> None:
        self._entries: list[LogEntry] = []
        self._parts: list[Callable[[], Columns]] = []

    def append(self, entry: LogEntry) -> None:
        self._entries.append(entry)

    def reward_of_last(self) -> Callable[[float | None], None]:
        """Return what writes the reward of the last entry, which may come after further ones."""
        return partial(setattr, self._entries[-1], "reward")

    def extend(self, columns: Callable[[], Columns]) -> None:
        self._parts += [partial(Columns.of, self._entries), columns]
        self._entries = []

    @cached_property
    def columns(self) -> Columns:
        """All of it, to which nothing can be added from now on."""
        parts = [*(part() for part in self._parts), Columns.of(self._entries)]
        self._parts, self._entries = [], []
        return Columns.joined(parts)
