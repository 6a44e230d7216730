"""A model-free drafter: n-gram retrieval from the request's own tokens and its group's other responses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Literal, get_args

from .errors import ConfigError

Gram = tuple[int, ...]
Scope = Literal["group", "request"]


class NgramDrafter:
    """Drafts what most often followed the longest known n-gram that ends at the request's last token.

    This is TLT-Base's drafter (arXiv 2511.16665, section 5: a retrieval store per prompt, filled by all samples of the
    group) in its simplest form. Matches are between `min_match` and `max_match` tokens long, longer ones first; among
    the continuations of a match the most frequent wins, then the most recent. With scope "request" a response sees
    only itself. Prompt tokens are context and are indexed too, once per group and prompt.

    Time: a token inserted costs max_match - min_match + 1 dictionary updates, a token proposed at most as many
    look-ups. Memory: about 0.5 kB per token of new text at the default match lengths; `drop_group` frees it.

    >>> drafter = NgramDrafter()
    >>> drafter.open("a", group="g", tokens=[1, 2, 3])
    >>> drafter.extend("a", [7, 8, 9, 10])
    >>> drafter.open("b", group="g", tokens=[1, 2, 3])
    >>> drafter.extend("b", [7])
    >>> drafter.propose("b", depth=2)
    [8, 9]
    """

    def __init__(self, min_match: int = 2, max_match: int = 5, scope: Scope = "group") -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"ngram: needs 1 <= min_match <= max_match, got {min_match} and {max_match}")
        if scope not in get_args(Scope):
            raise ConfigError(f"ngram: scope must be 'group' or 'request', got {scope!r}")
        self.min_match = min_match
        self.max_match = max_match
        self.scope = scope
        self._stores: dict[Hashable, _Store] = {}
        self._tails: dict[Hashable, tuple[_Store, Gram]] = {}
        self._keys: dict[Hashable, list[Hashable]] = {}

    def open(self, key: Hashable, group: Hashable, tokens: Iterable[int]) -> None:
        """Begin request `key` of `group` with its prompt."""
        assert key not in self._tails, f"request {key!r} is open already"
        self._keys.setdefault(group, []).append(key)
        name = ("group", group) if self.scope == "group" else ("request", key)
        store = self._stores.setdefault(name, _Store(self.min_match, self.max_match))
        self._tails[key] = store, store.add_prompt(tuple(tokens))

    def extend(self, key: Hashable, tokens: Iterable[int]) -> None:
        """Take the tokens that request `key` has just generated."""
        store, tail = self._tails[key]
        self._tails[key] = store, store.add(tail, tokens)

    def propose(self, key: Hashable, depth: int) -> list[int]:
        """Up to `depth` tokens to follow request `key`; fewer, or none, where nothing matches."""
        store, tail = self._tails[key]
        return store.propose(tail, depth)

    def drop_group(self, group: Hashable) -> None:
        """Forget a group: its requests and all that they taught. An unknown group is no error."""
        self._stores.pop(("group", group), None)
        for key in self._keys.pop(group, ()):
            del self._tails[key]
            self._stores.pop(("request", key), None)


class _Store:
    """What followed which n-gram. `best` has the winner for each; `counts` only where something occurred twice."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.best: dict[Gram, int] = {}
        self.counts: dict[Gram, dict[int, int]] = {}
        self.prompts: dict[Gram, Gram] = {}

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
                    seen = count[token] = count.get(token, 0) + 1
                    if token != winner and seen >= count[winner]:
                        best[gram] = token
                gram = gram[1:]
            tail = (*tail, token) if len(tail) < max_match else (*tail[1:], token)
        return tail

    def propose(self, tail: Gram, depth: int) -> list[int]:
        best, min_match, max_match = self.best, self.min_match, self.max_match
        draft: list[int] = []
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
            tail = (*tail, token) if len(tail) < max_match else (*tail[1:], token)
        return draft
