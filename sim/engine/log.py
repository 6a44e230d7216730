"""A simulated rollout: times of its requests, and the logs of its workers' macro-steps, as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tltlab.arrays import Array, Flags, Floats, Ints
from tltlab.sim.idle_training import SpotResult

from .batch import MacroStep
from .regime import Regime
from .requests import Requests

if TYPE_CHECKING:
    from .memoryless import Drained


class Entry(NamedTuple):
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    def of(cls, entries: list[Entry]) -> Columns:
        """Make columns from single macro-steps."""
        columns: dict[str, Any] = {}
        for name in _NAMES:
            if name in Entry._fields:
                values = [getattr(entry, name) for entry in entries]
            else:
                values = [getattr(entry.macro, name) for entry in entries]
            columns[name] = values if name in _LISTS else np.array(values, dtype=_TYPES.get(name, np.float64))
        return cls(**columns)

    @classmethod
    def joined(cls, parts: list[Columns]) -> Columns:
        """One after another."""
        columns: dict[str, Any] = {}
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
        self._entries: list[Entry] = []
        self._parts: list[Callable[[], Columns]] = []

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)

    def reward_of_last(self) -> Callable[[float | None], None]:
        """Return what writes the reward of the last entry, which may come after further ones."""
        return partial(self._reward, len(self._entries) - 1)

    def _reward(self, at: int, reward: float | None) -> None:
        self._entries[at] = self._entries[at]._replace(reward=reward)

    def extend(self, columns: Callable[[], Columns]) -> None:
        self._parts += [partial(Columns.of, self._entries), columns]
        self._entries = []

    @cached_property
    def columns(self) -> Columns:
        """All of it, to which nothing can be added from now on."""
        parts = [*(part() for part in self._parts), Columns.of(self._entries)]
        self._parts, self._entries = [], []
        return Columns.joined(parts)


@dataclass(slots=True)
class SimulatedRollout:
    """Result of one simulated RL step: times per request (nan: never ran), the workers' logs and the end.

    `old_tokens` of its responses were generated under the weights of earlier steps; `wasted_tokens` were generated for
    nothing. Where RL steps are not apart, `ages` are the updates since each response was begun; until now `num_begun`
    were, which come to `begun_tokens` when they have ended, and `num_dropped` of them were too old to train on. Where
    responses have turns, `submit_s` is when each came to the engine (None: all at 0), and calls waited `tool_wait_s`
    for a tool that was free.
    """

    requests: Requests
    worker_of: Ints
    first_token_s: Floats
    finish_s: Floats
    logs: list[WorkerLog]
    worker_end_s: list[float]
    makespan_s: float = 0.0
    spot: SpotResult | None = None
    old_tokens: float = 0.0
    wasted_tokens: float = 0.0
    ages: Ints | None = None
    num_begun: int = 0
    begun_tokens: int = 0
    num_dropped: int = 0
    submit_s: Floats | None = None
    tool_wait_s: float = 0.0
    drained: Drained | None = None

    def columns(self) -> tuple[Columns, Ints]:
        """All macro-steps, one worker after another, and the worker of each; `drained` is all of a rollout at once."""
        if self.drained is not None:
            num_steps = np.count_nonzero(self.drained.counts, axis=1)
            return self.drained.columns(range(len(self.logs))), np.repeat(np.arange(len(self.logs)), num_steps)
        parts = [log.columns for log in self.logs]
        return Columns.joined(parts), np.repeat(np.arange(len(parts)), list(map(len, parts)))

    def settled(self) -> SimulatedRollout:
        """Itself, with its macro-steps as arrays: a fifth of the memory, where rollouts are kept."""
        if self.drained is None:
            for log in self.logs:
                len(log.columns)
        return self

    @property
    def busy_s(self) -> float:
        """Worker-seconds of switching, prefill and decoding; the rest up to workers * makespan is idle."""
        c, worker = self.columns()
        ends = np.searchsorted(worker, np.arange(1, len(self.logs)))
        return math.fsum(float(part.sum()) for part in np.split(c.switch_s + c.prefill_s + c.seconds, ends))

    def note_first_tokens(self, requests: Sequence[int], now: float) -> None:
        """Record the first tokens of requests; a time from before a preemption stays."""
        for request in requests:
            if math.isnan(self.first_token_s[request]):
                self.first_token_s[request] = now
