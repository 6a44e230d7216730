"""Compiled loops over hash tables of what followed n-grams, one table for each group of responses.

A gram is known by 64 bits of its tokens: two of a group that share them (a chance of 1e-6 among ten million) are taken
for one, which costs a bad draft and nothing else. A response is a row of arrays: its group, and its last tokens, -1
before the first.
"""

from typing import Any

import llvmlite.binding.ffi
import numba
import numpy as np

from tltlab.arrays import Array, Floats, Ints

# llvmlite's library gives a function for every name, even for this one, which vLLM reads of all that modules hold.
llvmlite.binding.ffi.lib._fntab["__dict__"] = {}

ENTRY = np.dtype([("name", np.uint64), ("token", np.int32), ("count", np.int32), ("total", np.int32)], align=True)
"""Columns of a gram: its most frequent next token, how often that and any followed; 0 is the name of a free slot.

Of a gram with another token that followed it: `count`, since when that last was the most frequent.
"""


def _compiled(function: Any) -> Any:
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # no folder for compiled code may be written
        return numba.njit(function)


@_compiled
def _longer(name: np.uint64, token: int) -> np.uint64:
    """The name of a gram with a token more in front."""
    return name * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token + 1)


@_compiled
def _slot(entries: Array, name: np.uint64) -> np.uint64:
    """The slot of an entry, or the free one where it would go; their number is a power of two."""
    last = np.uint64(len(entries) - 1)
    slot = (name >> np.uint64(32)) & last
    while entries[slot].name != name and entries[slot].name != np.uint64(0):
        slot = (slot + np.uint64(1)) & last
    return slot


@_compiled
def _mixed(name: np.uint64) -> np.uint64:
    """A name as its entry has it, never 0; the finalizer of splitmix64 (Steele et al. 2014)."""
    name = (name ^ (name >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    name = (name ^ (name >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (name ^ (name >> np.uint64(31))) | np.uint64(1)


@_compiled
def _entry(entries: Array, name: np.uint64, sizes: Ints, group: int) -> Any:
    """The slot of an entry, which is made where there is none."""
    slot = _slot(entries, name)
    if entries[slot].name == np.uint64(0):
        entries[slot].name = name
        sizes[group] += 1
    return slot


@_compiled
def _follow(tails: Ints, row: int, token: int) -> None:
    for i in range(1, tails.shape[1]):
        tails[row, i - 1] = tails[row, i]
    tails[row, tails.shape[1] - 1] = token


@_compiled
def new_tables() -> Any:
    """Tables to begin with; `add` makes as many as it is told rows."""
    return numba.typed.List([np.zeros(1, ENTRY)])


@_compiled
def drop(tables: Any, group: int) -> None:
    """Free the memory of a group's table."""
    if group < len(tables):
        tables[group] = np.zeros(1, ENTRY)


@_compiled
def add(
    tokens: Ints, rows: Ints, ends: Ints, at: int, num: int, piece: int, groups: Ints, tails: Ints, sizes: Ints,
    shortest: int, tables: Any,
) -> int:  # fmt: skip
    """Put in so many tokens from `at` on, in pieces that end at `ends`; return the piece of the last.

    A piece of row ~r is of row r, and its group has it already. `sizes` are the numbers of entries by group, -1 for a
    group that is gone.
    """
    while len(tables) < len(groups):
        tables.append(np.zeros(1, ENTRY))
    longest, group, entries = tails.shape[1], 0, tables[0]
    for place in range(at, at + num):
        while ends[piece] <= place:
            piece += 1
        row, token, name = max(rows[piece], ~rows[piece]), tokens[place], np.uint64(0)
        if groups[row] != group:
            group = groups[row]
            entries = tables[group]
        length = longest if row != rows[piece] or sizes[group] < 0 else 0
        # A gram takes up to two new entries.
        while length == 0 and 4 * (sizes[group] + 2 * longest) > 3 * len(entries):
            larger = np.zeros(2 * len(entries), ENTRY)
            for entry in entries:
                if entry.name != np.uint64(0):
                    larger[_slot(larger, entry.name)] = entry
            tables[group] = entries = larger
        while length < longest and tails[row, longest - 1 - length] >= 0:
            length += 1
            name = _longer(name, tails[row, longest - length])
            if length < shortest:
                continue
            gram = _entry(entries, _mixed(name), sizes, group)
            entries[gram].total += 1
            winner, count = entries[gram].token, entries[gram].count
            if count == 0 or winner == token:
                entries[gram].token, entries[gram].count = token, count + 1
                continue
            other = _entry(entries, _mixed(_longer(~name, token)), sizes, group)
            entries[other].count += 1
            if entries[other].count >= count:
                # It becomes the most frequent, and the count of the one before stands by itself.
                entries[gram].token, entries[gram].count = token, entries[other].count
                entries[_entry(entries, _mixed(_longer(~name, winner)), sizes, group)].count = count
        _follow(tails, row, token)
    return piece


@_compiled
def propose(
    rows: Ints, depths: Ints, drafted: Ints, counts: Ints, expected: Floats, groups: Ints, tails: Ints, shortest: int,
    tables: Any,
) -> None:  # fmt: skip
    """Draft up to `depths` tokens for rows: the tokens, how many they are, and how many are expected to be kept."""
    longest = tails.shape[1]
    names, tail = np.zeros(longest + 1, np.uint64), np.zeros((1, longest), np.int64)
    for i in range(len(rows)):
        share, num = 1.0, 0
        tail[0] = tails[rows[i]]
        while num < depths[i]:
            length = 0
            while length < longest and tail[0, longest - 1 - length] >= 0:
                length += 1
                names[length] = _longer(names[length - 1], tail[0, longest - length])
            if length < shortest:
                break
            entries = tables[groups[rows[i]]]
            gram = _slot(entries, _mixed(names[length]))
            while entries[gram].name == np.uint64(0) and length > shortest:
                length -= 1
                gram = _slot(entries, _mixed(names[length]))
            if entries[gram].name == np.uint64(0):
                break
            drafted[i, num] = entries[gram].token
            num += 1
            share *= entries[gram].count / entries[gram].total
            expected[i] += share
            _follow(tail, 0, entries[gram].token)
        counts[i] = num
