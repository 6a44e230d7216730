"""How long responses get, learned from finished ones: length classes, as in DAS (arXiv 2511.13841)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tltlab.arrays import Floats, Ints
from tltlab.errors import ConfigError

_LEAST_RECORDS = 8
_REFITS_PER_WINDOW = 64


class LengthClasses:
    """Classes of response length, and the expected length of requests that still run.

    Class 0 is the shortest; the borders are the given `quantiles` of the last `window` finished lengths. A prompt's
    start class is the majority class of its own finished responses; a prompt without any has none. A running request
    is of the class that most of the responses with its start class ended in, among those longer than it is already;
    without a start class, or where none of that class got so far, all responses count. Ties go to the longer class.
    Each response counts under the start class that the other ones of its prompt give it.

    Responses that finish first are short, so early in a first RL step the history holds short responses only. New
    responses count once they are a 64th of the history: what is learned is worked out that often and no more.

    >>> classes = LengthClasses()
    >>> for prompt, length in [("short", 10), ("middle", 100), ("long", 1000)] * 4:
    ...     classes.finished(prompt, length)
    >>> [values.tolist() for values in classes.expect(["short", "long"], np.array([0.0, 400.0]))]
    [[0, 2], [10.0, 600.0]]
    """

    def __init__(self, quantiles: Sequence[float] = (1 / 3, 2 / 3), window: int = 4096) -> None:
        self.quantiles = tuple(quantiles)
        rising = all(a < b for a, b in pairwise(self.quantiles))
        if not self.quantiles or not rising or not all(0.0 < q < 1.0 for q in self.quantiles):
            raise ConfigError(f"length classes: quantiles must rise strictly between 0 and 1, got {self.quantiles}")
        if window < _LEAST_RECORDS:
            raise ConfigError(f"length classes: window must be at least {_LEAST_RECORDS} responses, got {window}")
        self.window = window
        self.records_: list[tuple[str, int]] = []
        self.pending_: list[tuple[str, int]] = []
        self._fitted: _Tables | None = None
        self._is_fit = True

    def finished(self, prompt_id: str, response_tokens: int) -> None:
        """Take the length of a finished response."""
        self.pending_.append((prompt_id, response_tokens))
        if len(self.pending_) * _REFITS_PER_WINDOW >= len(self.records_):
            self.records_ = (self.records_ + self.pending_)[-self.window :]
            self.pending_ = []
            self._is_fit = False

    def expect(self, prompt_ids: Sequence[str], generated_tokens: Floats) -> tuple[Ints, Floats] | None:
        """Class and expected remaining tokens of running requests, shape (requests,); None while nothing is known.

        Remaining tokens are the mean over the class. A request longer than all responses seen is expected to grow as
        much again.
        """
        tables = self._tables
        return None if tables is None else tables.expect(prompt_ids, generated_tokens)

    def state_dict(self) -> dict[str, Any]:
        return {"records": [list(r) for r in self.records_], "pending": [list(r) for r in self.pending_]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records_ = [(str(prompt), int(length)) for prompt, length in state["records"]][-self.window :]
        self.pending_ = [(str(prompt), int(length)) for prompt, length in state["pending"]]
        self._is_fit = False

    @property
    def _tables(self) -> _Tables | None:
        # Not before somebody asks: requests end in every other iteration of a large batch.
        if not self._is_fit:
            enough = len(self.records_) >= _LEAST_RECORDS
            self._fitted = _Tables(self.records_, self.quantiles) if enough else None
            self._is_fit = True
        return self._fitted


class _Tables:
    """Counts and sums of lengths in ascending order, for each start class and, in the last row, for all responses."""

    def __init__(self, records: Sequence[tuple[str, int]], quantiles: Sequence[float]) -> None:
        number: dict[str, int] = {}
        prompts = np.array([number.setdefault(prompt, len(number)) for prompt, _ in records], np.int64)
        lengths = np.array([length for _, length in records], np.float64)
        borders = np.quantile(lengths, quantiles, method="higher")
        classes = np.searchsorted(borders, lengths, side="right")
        self.num_classes = num = len(quantiles) + 1
        votes = np.bincount(prompts * num + classes, minlength=len(number) * num).reshape(-1, num)
        self.start = dict(zip(number, _majority(votes).tolist(), strict=True))
        sibling_votes = votes[prompts]
        sibling_votes[np.arange(len(records)), classes] -= 1
        start = np.where(sibling_votes.any(axis=1), _majority(sibling_votes), num)
        order = np.argsort(lengths, kind="stable")
        self.lengths = lengths[order]
        self.edges = np.concatenate([[0], np.searchsorted(self.lengths, borders, side="left"), [len(records)]])
        member = np.arange(num + 1)[:, None] == start[order][None, :]
        member[num] = True
        self.counts = np.zeros((num + 1, len(records) + 1), np.int64)
        self.sums = np.zeros((num + 1, len(records) + 1))
        np.cumsum(member, axis=1, out=self.counts[:, 1:])
        np.cumsum(member * self.lengths, axis=1, out=self.sums[:, 1:])

    def expect(self, prompt_ids: Sequence[str], generated_tokens: Floats) -> tuple[Ints, Floats]:
        num, everyone = self.num_classes, self.num_classes
        start = np.array([self.start.get(prompt, everyone) for prompt in prompt_ids], np.int64)
        passed = np.searchsorted(self.lengths, generated_tokens, side="right")
        start = np.where(self.counts[start, -1] > self.counts[start, passed], start, everyone)
        low = np.clip(passed[:, None], self.edges[:-1], self.edges[1:])
        rows, high = start[:, None], self.edges[1:]
        count = self.counts[rows, high] - self.counts[rows, low]
        likely = _majority(count)
        at = np.arange(len(start)), likely
        members = count[at]
        total = (self.sums[rows, high] - self.sums[rows, low])[at]
        doubled = np.maximum(generated_tokens, 1.0)
        remaining = np.where(members > 0, total / np.maximum(members, 1) - generated_tokens, doubled)
        return np.where(members > 0, likely, num - 1), remaining


def _majority(votes: Ints) -> Ints:
    """The column with most votes in each row, the last one of equals."""
    last: Ints = votes.shape[1] - 1 - np.argmax(votes[:, ::-1], axis=1)
    return last
