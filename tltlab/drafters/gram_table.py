"""What followed n-grams, in one array of hash tables, filled and looked up by compiled loops.

All groups of a drafter have their tables in one array, so an iteration of an engine is one call, however many groups
run. A gram is known by 64 bits of its tokens: two of a group that share them (a chance of 1e-6 among ten million) are
taken for one, which costs a bad draft and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numba
import numpy as np

from tltlab.arrays import Array, Floats, Ints

from .base import Draft

ENTRY = np.dtype([("name", np.uint64), ("token", np.int32), ("count", np.int32), ("total", np.int32)], align=True)
"""Of a gram: the token that followed it most often, how often, and how often any did; 0 is the name of a free slot.

Of a gram with another token that followed it: `count`, since when that last was the most frequent.
"""
LEAST_SLOTS = 1 << 8
"""Slots of a new group's table. One doubles where three quarters of it are taken."""
STRETCH = 1 << 17
"""Slots by which the array of all tables grows, 3 MiB."""


def _compiled(function: Any) -> Any:
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder for compiled code may be written
        return numba.njit(nogil=True)(function)


class GramTable:
    """What followed grams of `shortest` to `longest` tokens, by group; a row for each request with its last tokens.

    Adding a token takes `longest - shortest + 1` updates, drafting one at most as many look-ups. A group that doubles
    moves its entries.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        # By row: its group, its last tokens, and how many of them there are.
        self._groups, self._tails, self._lengths = _zeros(16), _zeros(16, longest), _zeros(16)
        self._free_rows = list(range(16))
        # By group: where its slots begin, how many they are, and how many are taken; 0 slots where there is none.
        self._tables = _zeros(16, 3)
        self._free_groups = list(range(16))
        self._entries = np.zeros(0, ENTRY)
        # Where free slots begin, by how many there are together.
        self._free: dict[int, set[int]] = {}

    def warm_up(self) -> None:
        """Compile the loops, or load them, which takes seconds at most once on a machine."""
        self.add([])
        self.propose([], [])

    def new_group(self) -> int:
        """Return the number of a new group."""
        if not self._free_groups:
            self._free_groups = list(range(len(self._tables), 2 * len(self._tables)))
            self._tables = _doubled(self._tables)
        group = self._free_groups.pop()
        self._tables[group] = self._place(LEAST_SLOTS), LEAST_SLOTS, 0
        return group

    def drop_group(self, group: int) -> None:
        """Forget what a group has."""
        begin, slots, _ = self._tables[group].tolist()
        self._release(begin, slots)
        self._tables[group] = 0
        self._free_groups.append(group)

    def bytes_of(self, group: int) -> int:
        """Return the memory of a group's table."""
        return int(self._tables[group, 1]) * ENTRY.itemsize

    @property
    def nbytes(self) -> int:
        """The memory of all tables."""
        return int(self._tables[:, 1].sum()) * ENTRY.itemsize

    def new_row(self, group: int) -> int:
        """Return a row for a request of a group, which has no text yet."""
        if not self._free_rows:
            self._free_rows = list(range(len(self._groups), 2 * len(self._groups)))
            self._groups, self._tails, self._lengths = map(_doubled, (self._groups, self._tails, self._lengths))
        row = self._free_rows.pop()
        self._groups[row], self._lengths[row] = group, 0
        return row

    def free_row(self, row: int) -> None:
        """A request has ended."""
        self._free_rows.append(row)

    def pass_over(self, row: int, tokens: Sequence[int]) -> None:
        """Let a row's text be these tokens, which its group has already."""
        last = tokens[-self.longest :]
        self._tails[row, : len(last)], self._lengths[row] = last, len(last)

    def add(self, texts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Add tokens to the texts of rows, in order."""
        rows = np.array([row for row, _ in texts], np.int64)
        ends = np.array([len(tokens) for _, tokens in texts], np.int64).cumsum()
        tokens = np.fromiter(chain.from_iterable(tokens for _, tokens in texts), np.int64)
        at = 0
        while (
            at := _add(
                tokens, at, rows, ends, self._groups, self._tails, self._lengths, self.shortest, self._tables,
                self._entries,
            )
        ) < len(tokens):  # fmt: skip
            self._grow(self._groups[rows[np.searchsorted(ends, at, side="right")]])

    def propose(self, rows: Sequence[int], depths: Sequence[int]) -> list[Draft]:
        """Return a draft of up to so many tokens for each of these rows."""
        depth = np.array(depths, np.int64)
        drafted = _zeros(len(rows), int(depth.max(initial=0)))
        counts, expected = _zeros(len(rows)), np.zeros(len(rows))
        _propose(
            np.array(rows, np.int64), depth, drafted, counts, expected, self._groups, self._tails, self._lengths,
            self.shortest, self._tables, self._entries,
        )  # fmt: skip
        each = zip(drafted.tolist(), counts.tolist(), expected.tolist(), strict=True)
        return [Draft(tokens[:num], kept) for tokens, num, kept in each]

    def _grow(self, group: int) -> None:
        begin, slots, _ = self._tables[group].tolist()
        place = self._place(2 * slots)
        _move(self._entries, begin, slots, place)
        self._release(begin, slots)
        self._tables[group, :2] = place, 2 * slots

    def _place(self, slots: int) -> int:
        """Return the first of so many free slots: a buddy system, as all sizes are powers of two."""
        size = min((size for size, free in self._free.items() if size >= slots and free), default=0)
        if not size:
            size = max(slots, STRETCH)
            begin = -(-len(self._entries) // size) * size
            for gap in range(len(self._entries), begin, STRETCH):
                self._release(gap, STRETCH)
            # In place: the system maps further pages behind those that are there.
            self._entries.resize(begin + size, refcheck=False)
        else:
            begin = self._free[size].pop()
        while size > slots:
            size //= 2
            self._free.setdefault(size, set()).add(begin + size)
        self._entries[begin : begin + slots] = 0
        return begin

    def _release(self, begin: int, slots: int) -> None:
        while begin ^ slots in self._free.get(slots, ()):
            self._free[slots].remove(begin ^ slots)
            begin, slots = min(begin, begin ^ slots), 2 * slots
        self._free.setdefault(slots, set()).add(begin)


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, np.int64)


def _doubled(values: Ints) -> Ints:
    return np.concatenate([values, np.zeros_like(values)])


@_compiled
def _mixed(x: np.uint64) -> np.uint64:  # splitmix64, Steele et al. 2014
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_compiled
def _with(name: np.uint64, token: int) -> np.uint64:
    """The name of a gram with a token more in front, never 0."""
    mixed = _mixed(name * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) + np.uint64(1))
    return mixed if mixed != np.uint64(0) else np.uint64(1)


@_compiled
def _slot(entries: Array, begin: int, slots: int, name: np.uint64) -> int:
    """The slot of an entry, or the free one where it would go; `slots` is a power of two."""
    at = name
    while True:
        slot = begin + int(at & np.uint64(slots - 1))
        if entries[slot].name == name or entries[slot].name == np.uint64(0):
            return slot
        at += np.uint64(1)


@_compiled
def _entry(entries: Array, table: Ints, name: np.uint64) -> Any:
    """The slot of an entry, which is made where there is none."""
    slot = _slot(entries, table[0], table[1], name)
    if entries[slot].name == np.uint64(0):
        entries[slot].name = name
        table[2] += 1
    return slot


@_compiled
def _move(entries: Array, begin: int, slots: int, to: int) -> None:
    """Move the entries of so many slots to twice as many."""
    for before in range(begin, begin + slots):
        if entries[before].name != np.uint64(0):
            entries[_slot(entries, to, 2 * slots, entries[before].name)] = entries[before]


@_compiled
def _pushed(tail: Ints, num: int, token: int) -> int:
    """Add a token to a row's last ones; how many there are."""
    if num < len(tail):
        tail[num] = token
        return num + 1
    for i in range(num - 1):
        tail[i] = tail[i + 1]
    tail[num - 1] = token
    return num


@_compiled
def _add(
    tokens: Ints, at: int, rows: Ints, ends: Ints, groups: Ints, tails: Ints, lengths: Ints, shortest: int,
    tables: Ints, entries: Array,
) -> int:  # fmt: skip
    """Add tokens from `at` on; return how far it came before a table would be too full."""
    item = np.searchsorted(ends, at, side="right")
    while at < len(tokens):
        while ends[item] <= at:
            item += 1
        row, token = rows[item], tokens[at]
        table, tail, num = tables[groups[row]], tails[row], lengths[row]
        # A gram takes up to two new entries.
        if 4 * (table[2] + 2 * len(tail)) > 3 * table[1]:
            return at
        name = np.uint64(0)
        for length in range(1, num + 1):
            name = _with(name, tail[num - length])
            if length < shortest:
                continue
            gram = _entry(entries, table, name)
            entries[gram].total += 1
            winner, count = entries[gram].token, entries[gram].count
            if count == 0 or winner == token:
                entries[gram].token, entries[gram].count = token, count + 1
                continue
            other = _entry(entries, table, _with(~name, token))
            entries[other].count += 1
            if entries[other].count >= count:
                # It becomes the most frequent, and the count of the one before stands by itself.
                entries[gram].token, entries[gram].count = token, entries[other].count
                entries[_entry(entries, table, _with(~name, winner))].count = count
        lengths[row] = _pushed(tail, num, token)
        at += 1
    return at


@_compiled
def _propose(
    rows: Ints, depths: Ints, drafted: Ints, counts: Ints, expected: Floats, groups: Ints, tails: Ints, lengths: Ints,
    shortest: int, tables: Ints, entries: Array,
) -> None:  # fmt: skip
    names, tail = np.zeros(tails.shape[1] + 1, np.uint64), np.zeros(tails.shape[1], np.int64)
    for i in range(len(rows)):
        table, num, share = tables[groups[rows[i]]], lengths[rows[i]], 1.0
        tail[:] = tails[rows[i]]
        while counts[i] < depths[i]:
            for length in range(1, num + 1):
                names[length] = _with(names[length - 1], tail[num - length])
            length, found = num, False
            while length >= shortest and not found:
                gram = _slot(entries, table[0], table[1], names[length])
                found = entries[gram].name != np.uint64(0)
                length -= 1
            if not found:
                break
            drafted[i, counts[i]] = entries[gram].token
            counts[i] += 1
            share *= entries[gram].count / entries[gram].total
            expected[i] += share
            num = _pushed(tail, num, entries[gram].token)
