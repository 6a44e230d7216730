"""A model-free drafter: n-gram retrieval from the request's own tokens and its group's other responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tltlab.errors import ConfigError

from .base import Draft, IndexedDrafter, Key
from .suffix import LOW

Gram = tuple[int, ...]
Scope = Literal["group", "request"]

# Measured on text of 16,000 tokens and on shipped traces: a tuple and its place, a dictionary of counts.
BYTES_PER_GRAM, BYTES_PER_COUNTS = 110, 240
BYTES_PER_WAITING = 8


class NgramDrafter(IndexedDrafter):
    """Drafts what most often followed the longest known n-gram that ends at the request's last token.

    The simplest form of TLT-Base's drafter (arXiv 2511.16665, section 5: a retrieval store per prompt, filled by all
    samples of the group). Matches are between `min_match` and `max_match` tokens long, longer ones first; among
    the continuations of a match the most frequent wins, then the most recent. With scope "request" a response sees
    only itself. Prompt tokens are context and are indexed too, once per group and prompt. The draft's `expected` sums,
    over its tokens, the product of their shares among all continuations of their matches.

    Time: a token inserted costs max_match - min_match + 1 dictionary updates, a token proposed at most as many
    look-ups. Text is inserted when its group is next proposed for: what never is costs nothing. Memory: about 0.5 kB
    per token of new text at the default match lengths; the group's is freed by `begin` of a later RL step, the
    request's, with that scope, by `close`. Groups in which nothing runs are freed before, the oldest first, where all
    take more than `history_mib` MiB; None is no bound.

    >>> drafter = NgramDrafter()
    >>> drafter.open((0, "p", 0, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 0, 0), [7, 8, 9, 10])
    >>> drafter.open((0, "p", 1, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 1, 0), [7])
    >>> drafter.propose((0, "p", 1, 0), depth=2)
    Draft(tokens=[8, 9], expected=2.0)
    """

    piece_tokens = 1024

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
        self._bytes_per_token = (max_match - min_match + 1) * (BYTES_PER_GRAM + BYTES_PER_COUNTS) + BYTES_PER_WAITING
        self.forget()

    def forget(self) -> None:
        self._stores: dict[tuple[int, str] | Key, _Store] = {}
        self._running: dict[Key, _NgramRequest] = {}
        self._has_backlog = False
        # A lower bound of the free budget: an exact count takes time that grows with the groups.
        self._free_bytes = self._most_bytes

    def begin(self, rl_step: int) -> None:
        """Drop the groups of earlier RL steps, except those in which a request is still open."""
        used = {self._name(key) for key in self._running}
        self._stores = {name: store for name, store in self._stores.items() if name[0] >= rl_step or name in used}

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        assert key not in self._running, f"request {key!r} is open already"
        store = self._stores.setdefault(self._name(key), _Store(self.min_match, self.max_match))
        self._running[key] = _NgramRequest(store)
        self.extend(key, tokens)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        request, num_tokens = self._running[key], len(tokens)
        store = request.store
        store.waiting.append((request, tuple(tokens)))
        request.num_waiting += num_tokens
        store.num_waiting += num_tokens
        self._free_bytes -= num_tokens * self._bytes_per_token

    def propose_all(self, queries: Sequence[tuple[Key, int]]) -> list[Draft]:
        drafts = []
        for key, depth in queries:
            request = self._running[key]
            store = request.store
            if store.waiting and not self._has_backlog:
                store.catch_up()
            # The request's last tokens are unknown while some of its text waits.
            drafts.append(Draft([], 0.0) if request.num_waiting else store.propose(request.tail or (), depth))
        return drafts

    def _in_use(self) -> Iterable[_Store]:
        return (request.store for request in self._running.values())

    def close(self, key: Key) -> None:
        del self._running[key]
        if self.scope == "request":
            del self._stores[key]
        elif self._free_bytes < 0:
            self._keep_budget()

    def _keep_budget(self) -> None:
        """Drop groups in which nothing runs, the oldest first, until there is some room in the budget."""
        total = self.memory_bytes
        if total > self._most_bytes:
            used = {self._name(key) for key in self._running}
            for name in [name for name in self._stores if name not in used]:
                total -= self._stores.pop(name).memory_bytes
                if total <= LOW * self._most_bytes:
                    break
        self._free_bytes = self._most_bytes - total

    @property
    def memory_bytes(self) -> int:
        """About; from the number of entries."""
        return sum(store.memory_bytes for store in self._stores.values())

    def _name(self, key: Key) -> tuple[int, str] | Key:
        return key[:2] if self.scope == "group" else key


@dataclass(slots=True, eq=False)
class _NgramRequest:
    """An open request: `tail` are its last tokens in the store, None before its prompt is in; the others wait."""

    store: _Store
    tail: Gram | None = None
    num_waiting: int = 0


class _Store:
    """Tokens that followed each n-gram. `best` has the winner for each; `counts` only n-grams that occurred twice.

    Text is `waiting` until it is looked up, in the order it came.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.best: dict[Gram, int] = {}
        self.counts: dict[Gram, dict[int, int]] = {}
        self.prompts: dict[Gram, Gram] = {}
        self.waiting: list[tuple[_NgramRequest, Gram]] = []
        self.num_waiting = 0

    def catch_up(self, most: float = math.inf) -> float:
        """Put in what waits, at most so many tokens, but prompts whole; how many it were."""
        waiting, self.waiting, before, room = self.waiting, [], self.num_waiting, most
        for place, (request, tokens) in enumerate(waiting):
            if request.tail is not None and len(tokens) > room:
                self.waiting.append((request, tokens[int(room) :]))
                tokens = tokens[: int(room)]
            request.tail = self.add_prompt(tokens) if request.tail is None else self.add(request.tail, tokens)
            request.num_waiting -= len(tokens)
            room -= len(tokens)
            if room <= 0:
                self.waiting += waiting[place + 1 :]
                break
        self.num_waiting = sum(len(tokens) for _, tokens in self.waiting)
        return before - self.num_waiting

    @property
    def memory_bytes(self) -> int:
        grams, counts = BYTES_PER_GRAM * len(self.best), BYTES_PER_COUNTS * len(self.counts)
        return grams + counts + BYTES_PER_WAITING * self.num_waiting

    def add_prompt(self, tokens: Gram) -> Gram:
        """Index a prompt unless it is known; its tail."""
        if tokens not in self.prompts:
            self.prompts[tokens] = self.add((), tokens)
        return self.prompts[tokens]

    def add(self, tail: Gram, tokens: Iterable[int]) -> Gram:
        """Index `tokens` as they follow `tail`; the new tail, the last max_match tokens."""
        best, counts, min_match, max_match = self.best, self.counts, self.min_match, self.max_match
        for token in tokens:
            gram = tail
            # From the longest match down: dropping the first token is the next shorter one.
            while len(gram) >= min_match:
                winner = best.get(gram)
                if winner is None:
                    best[gram] = token
                else:
                    count = counts.get(gram)
                    if count is None:
                        count = counts[gram] = {winner: 1}
                    occurrences = count[token] = count.get(token, 0) + 1
                    if token != winner and occurrences >= count[winner]:
                        best[gram] = token
                gram = gram[1:]
            tail = (*tail, token) if len(tail) < max_match else (*tail[1:], token)
        return tail

    def propose(self, tail: Gram, depth: int) -> Draft:
        best, counts, min_match, max_match = self.best, self.counts, self.min_match, self.max_match
        draft: list[int] = []
        expected, share = 0.0, 1.0
        while len(draft) < depth:
            gram = tail
            token = None
            while len(gram) >= min_match:
                token = best.get(gram)
                if token is not None:
                    break
                gram = gram[1:]
            if token is None:
                break
            draft.append(token)
            count = counts.get(gram)
            if count is not None and len(count) > 1:
                share *= count[token] / sum(count.values())
            expected += share
            tail = (*tail, token) if len(tail) < max_match else (*tail[1:], token)
        return Draft(draft, expected)
