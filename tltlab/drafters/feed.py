"""A model-free drafter as an engine uses it: what each running request generates reaches it when it is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .base import Draft, Drafter, Key


@dataclass(slots=True, eq=False)
class _RunningText:
    """A request in the engine: a drafter has been shown the first `shown` tokens of `output`, which grows by itself."""

    key: Key
    output: Sequence[int]
    shown: int = 0


@dataclass(slots=True, eq=False)
class DrafterFeed:
    """A model-free drafter in use, the requests in the order they came, and the turn at which it was last fed.

    `behind` is True while text waits to be looked up. A request in `own` has a drafter to itself, which sees no other
    text.
    """

    drafter: Drafter
    texts: dict[Key, _RunningText] = field(default_factory=dict)
    own: dict[Key, Drafter] = field(default_factory=dict)
    turn: float = -math.inf
    behind: bool = False

    def open(self, key: Key, prompt: Sequence[int], output: Sequence[int], own: Drafter | None = None) -> None:
        """Begin request `key` with its prompt; `output` grows by itself, and only `own`, if given, sees its text."""
        if own is not None:
            self.own[key] = own
        self.own.get(key, self.drafter).open(key, prompt)
        self.texts[key] = _RunningText(key, output)

    def feed(self) -> None:
        """Show what requests have generated since."""
        for text in self.texts.values():
            if new := text.output[text.shown :]:
                self.own.get(text.key, self.drafter).extend(text.key, new)
                text.shown += len(new)

    def propose_all(self, queries: Sequence[tuple[Key, int]]) -> list[Draft]:
        """A draft for each (key, depth), in order."""
        if not self.own:
            return self.drafter.propose_all(queries)
        shared = iter(self.drafter.propose_all([query for query in queries if query[0] not in self.own]))
        return [self.own[key].propose(key, depth) if key in self.own else next(shared) for key, depth in queries]

    def observe_all(self, verified: Sequence[tuple[Key, int, int]]) -> None:
        """Drafts were verified, see `Drafter.observe_all`."""
        if self.own:
            for draft in verified:
                if draft[0] in self.own:
                    self.own[draft[0]].observe(*draft)
            verified = [draft for draft in verified if draft[0] not in self.own]
        self.drafter.observe_all(verified)

    def close(self, key: Key) -> None:
        """Request `key` is over; the rest of its text is shown first."""
        text, own = self.texts.pop(key), self.own.pop(key, None)
        if own is None:
            if len(text.output) > text.shown:
                self.drafter.extend(key, text.output[text.shown :])
            self.drafter.close(key)
