"""A model-free drafter: n-gram retrieval from the request's own tokens and its group's other responses."""

import math
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tltlab.errors import ConfigError

from .base import Draft, Drafter, Key
from .suffix import LOW

BYTES_PER_ENTRY = 48
"""About, of the 24 of an entry: tables are three eighths to three quarters full."""


class NgramDrafter(Drafter):
    """Drafts what most often followed the longest known n-gram that ends at the request's last token.

    The simplest form of TLT-Base's drafter (arXiv 2511.16665, section 5: a retrieval store per prompt, filled by all
    samples of the group). Matches are between `min_match` and `max_match` tokens long, longer ones first; among
    the continuations of a match the most frequent wins, then the most recent. Prompt tokens are context and are indexed
    too, once per group and prompt. The draft's `expected` sums, over its tokens, the product of their shares among all
    continuations of their matches.

    Time: a token inserted costs max_match - min_match + 1 updates of a table, a token proposed at most as many
    look-ups, in compiled loops over a whole batch (`grams`); they are compiled once on a machine, within seconds.
    Text is inserted at the next look-up. Memory: about 0.25 kB per token of new text at the default match lengths; the
    group's is freed by `begin` of a later RL step. Groups in which nothing runs are freed before, the oldest first,
    where all take more than `history_mib` MiB; None is no bound.

    >>> drafter = NgramDrafter()
    >>> drafter.open((0, "p", 0, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 0, 0), [7, 8, 9, 10])
    >>> drafter.open((0, "p", 1, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 1, 0), [7])
    >>> drafter.propose((0, "p", 1, 0), depth=2)
    Draft(tokens=[8, 9], expected=2.0)
    """

    def __init__(self, min_match: int = 2, max_match: int = 5, history_mib: float | None = 256.0):
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"ngram: needs 1 <= min_match <= max_match, got {min_match} and {max_match}")
        if history_mib is not None and not 0 < history_mib < math.inf:
            raise ConfigError(f"ngram: history_mib must be above 0 MiB, or none for no bound, got {history_mib}")
        self.min_match = min_match
        self.max_match = max_match
        self.history_mib = history_mib
        self._most_bytes = math.inf if history_mib is None else history_mib * 2**20
        self.forget()

    def forget(self) -> None:
        self._running: dict[Key, int] = {}
        # The row of a group's first request is its number; prompts count once in a group.
        self._groups: dict[tuple[int, str], tuple[int, set[tuple[int, ...]]]] = {}
        # By row.
        self._num_rows, self._group_of, self._sizes = 0, np.zeros(16, np.int64), np.zeros(16, np.int64)
        self._tails = np.full((16, self.max_match), -1)
        self._tables: Any = None
        self._has_backlog = False
        self._clear()

    def _clear(self) -> None:
        # Waiting text and its pieces, as `grams.add` has them.
        self._tokens, self._rows, self._ends, self._at, self._piece = array("q"), array("q"), array("q"), 0, 0

    def begin(self, rl_step: int) -> None:
        """Drop the groups of earlier RL steps, except those in which a request is still open."""
        used = {key[:2] for key in self._running}
        for name in [name for name in self._groups if name[0] < rl_step and name not in used]:
            self._drop(name)
        if not self._groups:
            self.forget()
        # Loads what is compiled.
        self.propose_all([])

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        assert key not in self._running, f"request {key!r} is open already"
        row, prompt = self._num_rows, tuple(tokens)
        if row == len(self._group_of):
            self._group_of, self._sizes = np.resize(self._group_of, 2 * row), np.resize(self._sizes, 2 * row)
            self._tails = np.resize(self._tails, (2 * row, self.max_match))
        self._num_rows += 1
        self._running[key] = row
        group, prompts = self._groups.setdefault(key[:2], (row, set()))
        self._group_of[row], self._sizes[row], self._tails[row] = group, 0, -1
        self._push(~row if prompt in prompts else row, prompt)
        prompts.add(prompt)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self._push(self._running[key], tokens)

    def _push(self, row: int, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        self._rows.append(row)
        self._ends.append(len(self._tokens))

    def catch_up(self, most: int | None = None) -> bool:
        from . import grams  # here, as it imports a compiler

        if self._tables is None:
            self._tables = grams.new_tables()
        waiting = len(self._tokens) - self._at
        num = waiting if most is None else min(waiting, most)
        pieces = map(np.asarray, (self._tokens, self._rows, self._ends))
        self._piece = grams.add(
            *pieces, self._at, num, self._piece, self._group_of, self._tails, self._sizes, self.min_match, self._tables
        )
        self._at += num
        if num == waiting:
            self._clear()
        self._has_backlog = num < waiting
        return num == waiting

    def propose(self, key: Key, depth: int) -> Draft:
        return self.propose_all([(key, depth)])[0]

    def propose_all(self, queries: Sequence[tuple[Key, int]]) -> list[Draft]:
        from . import grams

        # The last tokens of a request are unknown while some of its text waits.
        if not self._has_backlog:
            self.catch_up()
        rows = np.array([self._running[key] for key, _ in queries], np.int64)
        depths = np.array([depth for _, depth in queries], np.int64)
        if self._has_backlog:
            late = np.array(self._rows[np.searchsorted(self._ends, self._at, side="right") :])
            depths[np.isin(rows, np.maximum(late, ~late))] = 0
        drafted = np.zeros((len(rows), depths.max(initial=0)), np.int64)
        counts, expected = np.zeros(len(rows), np.int64), np.zeros(len(rows))
        grams.propose(
            rows, depths, drafted, counts, expected, self._group_of, self._tails, self.min_match, self._tables
        )
        tokens = [tokens[:num] for tokens, num in zip(drafted.tolist(), counts.tolist(), strict=True)]
        return list(map(partial(tuple.__new__, Draft), zip(tokens, expected.tolist(), strict=True)))

    def close(self, key: Key) -> None:
        del self._running[key]
        if self.memory_bytes > self._most_bytes:
            # Groups in which nothing runs go, the oldest first, until there is some room.
            used = {key[:2] for key in self._running}
            for name in [name for name in self._groups if name not in used]:
                self._drop(name)
                if self.memory_bytes <= LOW * self._most_bytes:
                    break

    def _drop(self, name: tuple[int, str]) -> None:
        group, _ = self._groups.pop(name)
        self._sizes[group] = -1
        if self._tables is not None:
            from . import grams

            grams.drop(self._tables, group)

    @property
    def memory_bytes(self) -> int:
        """About; from the number of entries."""
        return BYTES_PER_ENTRY * int(self._sizes[: self._num_rows].clip(0).sum()) + 8 * len(self._tokens)
