"""Rows of running requests, by request and position, in pages of one block of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tltlab.arrays import Array, Floats

PAGE = 32
"""Rows per page."""

_UNKNOWN, _WAITS, _DROPPED = -1, -2, -3
# A slot has rows from `first` to before `end`, and pages from position `low` to before `high`.
_FIRST, _END, _LOW, _HIGH = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The contiguous run of a request's rows from position `first` on: `hidden` (N, H), `aux` (N, A H) or None."""

    first: int
    hidden: Tensor
    aux: Tensor | None


Expected = Callable[[Sequence[str], Array], Floats | Array]
"""Expected lengths of these requests, whose rows end before these positions."""


class RowStore:
    """Stores each row of an opened request; a later row of the same position replaces it.

    Memory is reserved at the first rows, at most `max_bytes`, and touched only as it fills. Once the store is full,
    requests `expected` to stay shorter than the one that needs room lose all their rows (`lost`): the shortest first,
    no more than necessary. Where they do not have enough, the request that needs room loses its own rows, or is
    `skipped` if it has none yet. By default the requests with fewer rows are expected to stay shorter. `max_positions`
    is one more than the highest position.
    """

    def __init__(self, max_bytes: int, max_positions: int, expected: Expected = lambda request_ids, ends: ends) -> None:
        self.max_bytes = max_bytes
        self._expected = expected
        self.skipped = 0
        self.lost = 0
        self.peak_bytes = 0
        self._width = max_positions // PAGE + 1
        self._page_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Drop every request, and release the memory."""
        self._slots: dict[str, int] = {}
        self._batch_ids: Sequence[str] = ()
        self._unused: list[int] = []
        self._spans = np.empty((4, 0), np.int64)
        self._table = np.empty((0, self._width), np.int64)
        self._add_slots()
        self._free: list[int] = []
        self._num_pages = self._num_touched = 0
        self._hidden: Tensor | None = None
        self._aux: Tensor | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def open(self, request_id: str) -> None:
        """Store the rows of this request from now on."""
        self._slots.setdefault(request_id, _WAITS)
        self._batch_ids = ()

    def put(
        self, request_ids: Sequence[str], bounds: Array, positions: Array, hidden: Tensor, aux: Sequence[Tensor] | None
    ) -> None:
        """Store an iteration's rows: those of `request_ids[i]` are bounds[i] to bounds[i + 1], in order of position.

        `positions`, `hidden` (.., H) and each of `aux` (.., H) are on the host and may extend beyond the last bound.
        """
        if self._hidden is None:
            self._reserve(hidden, aux)
        slots = self._slots_of(request_ids)
        counts = np.diff(bounds)
        starts = positions[bounds[:-1]]
        ends = starts + counts
        first, end, _, high = self._spans[:, slots]
        odd = np.flatnonzero((slots | (starts - first) | (end - starts) | (high - ends)) < 0)
        if len(odd):
            for i in odd:
                self._settle(request_ids[i], int(starts[i]), int(ends[i]))
            slots = self._slots_of(request_ids)
            is_open = slots >= 0
            if not is_open.all():
                rows = np.flatnonzero(is_open.repeat(counts))
                source = torch.from_numpy(rows)
                positions, hidden, aux = positions[rows], hidden[source], [states[source] for states in aux or ()]
                slots, counts, ends = slots[is_open], counts[is_open], ends[is_open]
        self._spans[_END, slots] = ends
        num_rows = int(counts.sum())
        owners = slots if num_rows == len(slots) else slots.repeat(counts)
        into = self._rows(owners, positions[:num_rows])
        assert self._hidden is not None
        self._hidden.index_copy_(0, into, hidden[:num_rows])
        for layer, states in enumerate(aux or ()):
            assert self._aux is not None
            self._aux[:, layer].index_copy_(0, into, states[:num_rows])

    def close(self, request_id: str, num_rows: int = 0) -> Rows | None:
        """Drop a request and return its rows below position `num_rows`; None where some of the last are missing."""
        slot = self._slots.get(request_id, _UNKNOWN)
        rows = None
        if slot >= 0:
            first, end = self._spans[:_LOW, slot].tolist()
            if first < num_rows <= end:
                assert self._hidden is not None
                at = self._rows(slot, np.arange(first, num_rows))
                aux = self._aux.index_select(0, at).flatten(1) if self._aux is not None else None
                rows = Rows(first=first, hidden=self._hidden.index_select(0, at), aux=aux)
            elif num_rows:
                self.lost += 1
            self._drop(request_id)
        self._slots.pop(request_id, None)
        self._batch_ids = ()
        return rows

    def _slots_of(self, request_ids: Sequence[str]) -> Array:
        # Most iterations have the batch of the previous one.
        if request_ids != self._batch_ids:
            self._batch_ids = list(request_ids)
            self._batch_slots = np.array([self._slots.get(name, _UNKNOWN) for name in request_ids], np.int64)
        return self._batch_slots

    def _rows(self, slots: Array | int, positions: Array) -> Tensor:
        page, row = np.divmod(positions, PAGE)
        return torch.from_numpy(self._table[slots, page] * PAGE + row)

    def _reserve(self, hidden: Tensor, aux: Sequence[Tensor] | None) -> None:
        num_states = 1 + len(aux or ())
        self._page_bytes = PAGE * hidden.shape[1] * hidden.element_size() * num_states
        self._num_pages = self.max_bytes // self._page_bytes
        num_rows = self._num_pages * PAGE
        # Outside of inference mode, even if the caller is in it: slices of these tensors are trained on.
        with torch.inference_mode(False):
            self._hidden = torch.empty((num_rows, hidden.shape[1]), dtype=hidden.dtype)
            if aux:
                self._aux = torch.empty((num_rows, len(aux), aux[0].shape[1]), dtype=aux[0].dtype)

    def _settle(self, request_id: str, start: int, end: int) -> None:
        """Make room for rows from position `start` to before `end`, and note where the contiguous run begins."""
        slot = self._slots.get(request_id, _UNKNOWN)
        new = slot == _WAITS
        if new:
            if not self._unused:
                self._add_slots()
            slot = self._slots[request_id] = self._unused.pop()
            self._batch_ids = ()
            self._spans[:, slot] = start, start, start, start
        if slot < 0:
            return
        if not self._grow(slot, start, end, request_id):
            self._drop(request_id)
            self.skipped += new
            self.lost += not new
            return
        if start < self._spans[_FIRST, slot] or start > self._spans[_END, slot]:
            self._spans[_FIRST, slot] = start
        # The next request that needs room compares with this length.
        self._spans[_END, slot] = end

    def _grow(self, slot: int, start: int, end: int, request_id: str) -> bool:
        """Give the slot pages for positions from `start` to `end`; return False, and give none, without room."""
        low, high = self._spans[_LOW:, slot].tolist()
        low, high = min(start, low) // PAGE, -(-max(end, high) // PAGE)
        missing = low + np.flatnonzero(self._table[slot, low:high] < 0)
        surplus = len(missing) - len(self._free) - (self._num_pages - self._num_touched)
        if surplus > 0 and not self._make_room(surplus, request_id, end):
            return False
        self._table[slot, missing] = [self._page() for _ in missing]
        self._spans[_LOW:, slot] = low * PAGE, high * PAGE
        self.peak_bytes = max(self.peak_bytes, (self._num_touched - len(self._free)) * self._page_bytes)
        return True

    def _page(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def _make_room(self, num_pages: int, request_id: str, end: int) -> bool:
        """Drop the fewest requests, expected to stay shorter, with `num_pages`; return False if they have fewer.

        O(requests), and each request is dropped only once.
        """
        names = [name for name, slot in self._slots.items() if slot >= 0 and name != request_id]
        slots = [self._slots[name] for name in names]
        ends = np.append(self._spans[_END, slots], end)
        # Requests with equal expectations are ordered by their length so far.
        lengths = list(zip(self._expected([*names, request_id], ends).tolist(), ends.tolist(), strict=True))
        shorter = sorted((length, name) for length, name in zip(lengths, names, strict=False) if length < lengths[-1])
        victims: list[str] = []
        while num_pages > 0 and len(victims) < len(shorter):
            victims.append(shorter[len(victims)][1])
            num_pages -= int((self._table[self._slots[victims[-1]]] >= 0).sum())
        if num_pages > 0:
            return False
        for name in victims:
            self._drop(name)
        self.lost += len(victims)
        return True

    def _drop(self, request_id: str) -> None:
        slot, self._slots[request_id] = self._slots[request_id], _DROPPED
        pages = self._table[slot]
        self._free += pages[pages >= 0].tolist()
        pages[:] = -1
        self._unused.append(slot)
        self._batch_ids = ()

    def _add_slots(self) -> None:
        before = len(self._table)
        more = max(before, 64)
        self._unused = list(range(before, before + more))[::-1]
        self._table = np.concatenate([self._table, np.full((more, self._width), -1, np.int64)])
        self._spans = np.concatenate([self._spans, np.zeros((4, more), np.int64)], axis=1)
