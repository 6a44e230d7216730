"""A model-free drafter: n-gram retrieval from the request's own tokens and its group's other responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from tltlab.errors import ConfigError

from .base import Draft, IndexedDrafter, Key
from .suffix import LOW

if TYPE_CHECKING:
    from .gram_table import GramTable

Gram = tuple[int, ...]
Scope = Literal["group", "request"]

BYTES_PER_GRAM = 192
"""At most, of an update in `GramTable`: two entries in a table that is a quarter full."""
BYTES_PER_WAITING = 8


class NgramDrafter(IndexedDrafter):
    """Drafts what most often followed the longest known n-gram that ends at the request's last token.

    The simplest form of TLT-Base's drafter (arXiv 2511.16665, section 5: a retrieval store per prompt, filled by all
    samples of the group). Matches are between `min_match` and `max_match` tokens long, longer ones first; among
    the continuations of a match the most frequent wins, then the most recent. With scope "request" a response sees
    only itself. Prompt tokens are context and are indexed too, once per group and prompt. The draft's `expected` sums,
    over its tokens, the product of their shares among all continuations of their matches.

    Time: a token inserted costs max_match - min_match + 1 updates of a table, a token proposed at most as many
    look-ups, all in compiled loops (`gram_table`). Text is inserted when its group is next proposed for: what never is
    costs nothing. Memory: 0.1 to 0.2 kB per token of new text at the default match lengths; the group's is freed by
    `begin` of a later RL step, the request's, with that scope, by `close`. Groups in which nothing runs are freed
    before, the oldest first, where all take more than `history_mib` MiB; None is no bound.

    >>> drafter = NgramDrafter()
    >>> drafter.open((0, "p", 0, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 0, 0), [7, 8, 9, 10])
    >>> drafter.open((0, "p", 1, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 1, 0), [7])
    >>> drafter.propose((0, "p", 1, 0), depth=2)
    Draft(tokens=[8, 9], expected=2.0)
    """

    def __init__(
        self, min_match: int = 2, max_match: int = 5, scope: Scope = "group", history_mib: float | None = 256.0
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"ngram: needs 1 <= min_match <= max_match, got {min_match} and {max_match}")
        if scope not in get_args(Scope):
            raise ConfigError(f"ngram: scope must be 'group' or 'request', got {scope!r}")
        if history_mib is not None and not 0 < history_mib < math.inf:
            raise ConfigError(f"ngram: history_mib must be above 0 MiB, or none for no bound, got {history_mib}")
        self.min_match = min_match
        self.max_match = max_match
        self.scope = scope
        self.history_mib = history_mib
        self._most_bytes = math.inf if history_mib is None else history_mib * 2**20
        self._bytes_per_token = (max_match - min_match + 1) * BYTES_PER_GRAM + BYTES_PER_WAITING
        self.forget()

    @cached_property
    def _table(self) -> GramTable:
        # Imported here: it imports a compiler.
        from .gram_table import GramTable

        return GramTable(self.min_match, self.max_match)

    def forget(self) -> None:
        self.__dict__.pop("_table", None)
        self._groups: dict[tuple[int, str] | Key, _Group] = {}
        self._running: dict[Key, _NgramRequest] = {}
        self._has_backlog = False
        # A lower bound of the free budget: an exact count takes time that grows with the groups.
        self._free_bytes = self._most_bytes

    def begin(self, rl_step: int) -> None:
        """Drop the groups of earlier RL steps, except those in which a request is still open."""
        self._table.warm_up()
        used = {self._name(key) for key in self._running}
        for name in [name for name in self._groups if name[0] < rl_step and name not in used]:
            self._groups.pop(name).drop()

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        assert key not in self._running, f"request {key!r} is open already"
        name = self._name(key)
        if name not in self._groups:
            self._groups[name] = _Group(self._table)
        group = self._groups[name]
        self._running[key] = _NgramRequest(group, self._table.new_row(group.number), is_in=not len(tokens))
        self.extend(key, tokens)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        request, num_tokens = self._running[key], len(tokens)
        if not num_tokens:
            return
        request.group.waiting.append((request, tuple(tokens)))
        request.num_waiting += num_tokens
        self._free_bytes -= num_tokens * self._bytes_per_token

    def propose_all(self, queries: Sequence[tuple[Key, int]]) -> list[Draft]:
        requests = [self._running[key] for key, _ in queries]
        if not self._has_backlog:
            _put_in(self._table, {id(r.group): r.group for r in requests if r.group.waiting}.values())
        # The last tokens of a request are unknown while some of its text waits.
        depths = [0 if r.num_waiting else depth for r, (_, depth) in zip(requests, queries, strict=True)]
        return self._table.propose([request.row for request in requests], depths)

    def _in_use(self) -> Iterable[_Group]:
        return (request.group for request in self._running.values())

    def close(self, key: Key) -> None:
        request = self._running.pop(key)
        request.ended = True
        if not request.num_waiting:
            self._table.free_row(request.row)
        if self.scope == "request":
            self._groups.pop(key).drop()
        elif self._free_bytes < 0:
            self._keep_budget()

    def _keep_budget(self) -> None:
        """Drop groups in which nothing runs, the oldest first, until there is some room in the budget."""
        total = self.memory_bytes
        if total > self._most_bytes:
            used = {self._name(key) for key in self._running}
            for name in [name for name in self._groups if name not in used]:
                total -= self._groups[name].memory_bytes
                self._groups.pop(name).drop()
                if total <= LOW * self._most_bytes:
                    break
        self._free_bytes = self._most_bytes - total

    @property
    def memory_bytes(self) -> int:
        """About; from the number of entries."""
        if not self._groups:
            return 0
        return self._table.nbytes + sum(group.waiting_bytes for group in self._groups.values())

    def _name(self, key: Key) -> tuple[int, str] | Key:
        return key[:2] if self.scope == "group" else key


@dataclass(slots=True, eq=False)
class _NgramRequest:
    """A request with its `row` in the table, whether its prompt `is_in`, and how many of its tokens wait."""

    group: _Group
    row: int
    is_in: bool = False
    ended: bool = False
    num_waiting: int = 0


class _Group:
    """Text that is drafted from together. It is `waiting` until it is looked up, in the order it came."""

    def __init__(self, table: GramTable) -> None:
        self.table = table
        self.number = table.new_group()
        self.prompts: set[Gram] = set()
        self.waiting: list[tuple[_NgramRequest, Gram]] = []

    def catch_up(self, most: float = math.inf) -> float:
        """Put in what waits, at most so many tokens, but prompts whole; how many it were."""
        return _put_in(self.table, [self], most)

    def drop(self) -> None:
        """Forget all of it."""
        self.table.drop_group(self.number)
        for request in {id(request): request for request, _ in self.waiting}.values():
            if request.ended:
                self.table.free_row(request.row)

    @property
    def waiting_bytes(self) -> int:
        return BYTES_PER_WAITING * sum(len(tokens) for _, tokens in self.waiting)

    @property
    def memory_bytes(self) -> int:
        return self.table.bytes_of(self.number) + self.waiting_bytes


def _put_in(table: GramTable, groups: Iterable[_Group], most: float = math.inf) -> float:
    """Put in what waits in groups, at most so many tokens, but prompts whole; return how many it were."""
    texts: list[tuple[int, Gram]] = []
    ended, room = [], most
    for group in groups:
        waiting, group.waiting = group.waiting, []
        for place, (request, tokens) in enumerate(waiting):
            if room <= 0:
                group.waiting += waiting[place:]
                break
            if request.is_in and len(tokens) > room:
                group.waiting.append((request, tokens[int(room) :]))
                tokens = tokens[: int(room)]
            room -= len(tokens)
            request.num_waiting -= len(tokens)
            if request.is_in or tokens not in group.prompts:
                texts.append((request.row, tokens))
            else:
                table.pass_over(request.row, tokens)
            if not request.is_in:
                group.prompts.add(tokens)
                request.is_in = True
            if request.ended and not request.num_waiting:
                ended.append(request.row)
    table.add(texts)
    for row in ended:
        table.free_row(row)
    return most - room
