"""The texts that a suffix drafter searches together: which run, which are finished, which prompts they share."""

from __future__ import annotations

import importlib
from itertools import islice
from typing import Any

from tltlab.arrays import Tokens
from tltlab.errors import ConfigError

from .base import Key


class TextTree:
    """The texts of one scope, and each prompt once while a response to it is there.

    `index` is the library's tree; it knows texts by number. `finished` is in the order of finishing.
    """

    def __init__(self, index: Any) -> None:
        self.index = index
        self.running: set[Key] = set()
        self.finished: dict[Key, None] = {}
        self._number: dict[Key | bytes, int] = {}
        self._prompt: dict[Key, bytes] = {}
        self._users: dict[bytes, int] = {}
        self._next = 0

    def open(self, key: Key, prompt: Tokens, *, whole: bool, num_before: int) -> None:
        """Begin a text with its prompt: all of it, or its last `num_before` tokens and the whole beside it, once."""
        self.running.add(key)
        self._number[key] = self._new_number()
        if whole:
            self.extend(key, prompt)
        elif num_before:
            packed = prompt.tobytes()
            if packed not in self._users:
                self._users[packed] = 0
                self._number[packed] = self._new_number()
                self.extend(packed, prompt)
            self._users[packed] += 1
            self._prompt[key] = packed
            self.extend(key, prompt[-num_before:])

    def extend(self, key: Key | bytes, tokens: Tokens) -> None:
        self.index.extend_ndarray(self._number[key], tokens)

    def finish(self, key: Key, window: int | None) -> list[Key]:
        """The text is complete; which older ones had to leave."""
        self.finished[key] = None
        surplus = 0 if window is None else len(self.finished) - window
        oldest = list(islice(self.finished, max(surplus, 0)))
        for left in oldest:
            self.remove(left)
        return oldest

    def remove(self, key: Key) -> None:
        """Take out a finished text, and its prompt if it was the last of it."""
        del self.finished[key]
        self.index.remove(self._number.pop(key))
        packed = self._prompt.pop(key, None)
        if packed is not None:
            self._users[packed] -= 1
            if not self._users[packed]:
                del self._users[packed]
                self.index.remove(self._number.pop(packed))

    def _new_number(self) -> int:
        self._next += 1
        return self._next


def load_index() -> Any:
    """The class of the library's trees (package arctic-inference); ConfigError without it."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding._C").SuffixTree
    except ImportError as error:
        raise ConfigError("the suffix drafter needs: pip install 'tltlab[suffix]'") from error
