"""The texts of one scope in a suffix tree of the library (package arctic-inference), and which of them are in it."""

from __future__ import annotations

import importlib
import math
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from tltlab.arrays import Tokens
from tltlab.errors import ConfigError

from .base import Key
from .history import FinishedText

Waiting: TypeAlias = "Tokens | array[int] | list[int]"
"""Text that is to be put in."""


def _as_list(tokens: Waiting) -> list[int]:
    numbers: list[int] = tokens if isinstance(tokens, list) else tokens.tolist()
    return numbers


class TextTree:
    """The texts of one scope, and each prompt once while a response to it is there.

    `finished` is in the order of finishing. `index` is the library's tree, which knows texts by number; it is None
    until `build`, and need not have all that is finished. Text is `waiting` outside of it until `catch_up`, which
    whoever searches calls first. `num_tokens` is what both have of finished texts.
    """

    def __init__(self, new_index: Callable[[], Any], *, whole: bool, num_before: int) -> None:
        self.running: set[Key] = set()
        self.finished: dict[Key, None] = {}
        self._new_index = new_index
        self._whole = whole
        self._num_before = num_before
        self._next = 0
        self.empty()

    def empty(self) -> None:
        """Give the index back; nothing may be running."""
        assert not self.running
        self.index: Any = None
        self.waiting: list[tuple[int, Waiting]] = []
        self.num_tokens = 0
        self._number: dict[Key | bytes, int] = {}
        self._prompt: dict[Key, bytes] = {}
        self._users: dict[bytes, int] = {}
        self._size: dict[Key, int] = {}

    def build(self, texts: Mapping[Key, FinishedText], room: float) -> None:
        """Index what is finished, of it the newest responses that `room` tokens have place for."""
        self.index = self._new_index()
        fitting = []
        for key in reversed(self.finished):
            room -= self.size(texts[key])
            if room < 0:
                break
            fitting.append(key)
        for key in reversed(fitting):
            self.add(key, np.frombuffer(texts[key].prompt, np.int32), texts[key].response)
            self._count(key, texts[key])

    def open(self, key: Key, prompt: Tokens) -> None:
        """Begin a running text with its prompt."""
        self.running.add(key)
        self._begin(key, prompt)

    def add(self, key: Key, prompt: Tokens, response: Tokens) -> None:
        """Index a whole text, which is to be finished."""
        self._begin(key, prompt)
        self.extend(key, response)

    def _begin(self, key: Key, prompt: Tokens) -> None:
        """Begin a text with all of its prompt, or with the prompt's last tokens and, once, the whole prompt."""
        self._number[key] = self._new_number()
        if self._whole:
            self.extend(key, prompt)
        elif self._num_before:
            packed = prompt.tobytes()
            if packed not in self._users:
                self._users[packed] = 0
                self._number[packed] = self._new_number()
                self.extend(packed, prompt)
            self._users[packed] += 1
            self._prompt[key] = packed
            self.extend(key, prompt[-self._num_before :])

    def number(self, key: Key) -> int:
        """Return the number of a text in the index."""
        return self._number[key]

    def extend(self, key: Key | bytes, tokens: Waiting) -> None:
        self.waiting.append((self._number[key], tokens))

    def catch_up(self, most: float = math.inf) -> int:
        """Put what waits into the index, in the order it came, at most so many tokens; how many it were."""
        waiting, self.waiting = self.waiting, []
        extend, room = self.index.extend, most
        for place, (number, tokens) in enumerate(waiting):
            if len(tokens) > room:
                cut = int(room)
                extend(number, _as_list(tokens[:cut]))
                self.waiting = [(number, tokens[cut:]), *waiting[place + 1 :]]
                return int(most)
            extend(number, tokens if type(tokens) is list else _as_list(tokens))
            room -= len(tokens)
        return int(most - room) if room < most else 0

    @property
    def memory_bytes(self) -> int:
        """The index by its own estimate, for which it is walked, and what waits."""
        return int(self.index.estimate_memory()) + 8 * sum(len(tokens) for _, tokens in self.waiting)

    def finish(self, key: Key, text: FinishedText, window: int | None) -> list[Key]:
        """A text is complete; which older ones had to leave."""
        self.finished[key] = None
        if self.index is not None:
            self._count(key, text)
        surplus = 0 if window is None else len(self.finished) - window
        oldest = list(islice(self.finished, max(surplus, 0)))
        for evicted in oldest:
            self.remove(evicted)
        return oldest

    def remove(self, key: Key) -> None:
        """Take out a finished text, and its prompt if it was the last of it."""
        del self.finished[key]
        self.unindex(key)

    def unindex(self, key: Key) -> int:
        """Take a finished text out of the index, where it is in it; how many tokens that were."""
        if key not in self._size:
            return 0
        self._take_out(key)
        packed = self._prompt.pop(key, None)
        if packed is not None:
            self._users[packed] -= 1
            if not self._users[packed]:
                del self._users[packed]
                self._take_out(packed)
        num_tokens = self._size.pop(key)
        self.num_tokens -= num_tokens
        return num_tokens

    def _take_out(self, key: Key | bytes) -> None:
        number = self._number.pop(key)
        self.waiting = [text for text in self.waiting if text[0] != number]
        self.index.remove(number)

    def size(self, text: FinishedText) -> int:
        """How many tokens it has of a text: the response's, and those of the prompt that stand before."""
        return len(text.response) + self._num_before

    def _count(self, key: Key, text: FinishedText) -> None:
        self._size[key] = self.size(text)
        self.num_tokens += self._size[key]

    def _new_number(self) -> int:
        self._next += 1
        return self._next


def load_index() -> Any:
    """The class of the library's trees (package arctic-inference); ConfigError without it."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding._C").SuffixTree
    except ImportError as error:
        raise ConfigError("the suffix drafter needs: pip install 'tltlab[suffix]'") from error
