"""The running requests as a policy sees them, made one at a time when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from tltlab.state import RequestState

from .batch import Batch
from .requests import Requests


class RequestsView(Sequence[RequestState]):
    """Residents of a batch in order of admission. Holds for the iteration it was made for."""

    def __init__(self, requests: Requests, batch: Batch) -> None:
        self._requests, self._batch = requests, batch

    @cached_property
    def _running(self) -> Sequence[int]:
        return self._batch.running

    def __len__(self) -> int:
        return len(self._batch)

    @overload
    def __getitem__(self, index: int) -> RequestState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestState]: ...
    def __getitem__(self, index: int | slice) -> RequestState | Sequence[RequestState]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        request = self._running[index]
        key = self._requests.keys[request]
        return RequestState(
            key=key,
            prompt_id=key[1],
            generated_tokens=int(self._batch.generated(request)),
            max_response_tokens=self._requests.max_response_tokens[request],
            recent_acceptance=self._batch.recent_acceptance(request),
        )
