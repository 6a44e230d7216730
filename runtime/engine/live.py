"""Requests in an engine, as policies and drafters see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tltlab.drafters.base import Key

Drafting = Literal["any", "own", "none", "none beside"]
"""Drafts that a request may have: "any"; from its "own" text alone, so that a seed repeats its tokens; "none"; or "none
beside", which also rules out drafts for the other requests in the batch.
"""


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """A request in the engine, with the fields of `tltlab.state.RequestState`, always current.

    `output` is a live view of its tokens; `drafter` made the draft in flight. `computed` tokens were sampled for it and
    its client got the first `kept`, both as of `Control.finish`. `ended` is the reason and the time, in seconds of the
    clock, of a turn that awaits another one.
    """

    key: Key
    prompt: Sequence[int]
    output: Sequence[int]
    max_response_tokens: int
    recent_acceptance: float | None = None
    drafting: Drafting = "any"
    drafter: str = ""
    drafted: int = 0
    accepted: int = 0
    computed: int = 0
    kept: int | None = None
    ended: tuple[str, float] | None = None

    @property
    def prompt_id(self) -> str:
        return self.key[1]

    @property
    def generated_tokens(self) -> int:
        return len(self.output)


class BatchRequests(Sequence[LiveRequest]):
    """The requests of an iteration, looked up when a policy first reads one: most policies never do."""

    def __init__(self, ids: Sequence[str], live: Mapping[str, LiveRequest]) -> None:
        self._ids, self._live = ids, live

    @cached_property
    def _requests(self) -> list[LiveRequest]:
        return [self._live[i] for i in self._ids if i in self._live]

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: Any) -> Any:
        return self._requests[index]

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests)
