"""A request in an engine: all that is known of it, in one record, for policies, drafters, recordings and captures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tltlab.drafters.base import Key

Drafting = Literal["any", "none", "none beside"]
"""Drafts that a request may have: "any", "none", or "none beside", which excludes others' in the batch too."""

RlStepEnd = Literal["update", "call", "gap"]
"""The end of an RL step of requests without keys, see `recording.Grouping`."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """A request in the engine, with the fields of `tltlab.state.RequestState`, always current.

    `output` is a live view of its tokens. A prompt of embeddings has no ids, but `embedded_tokens`. It arrived at
    `arrived_s` and had its first token at `first_token_s`, in seconds of the tracker's clock. `drafter` made the draft
    in flight; each model-free drafter was `shown` so many tokens of the output. It arrived under `version` of the
    weights, and had so many tokens at each of the `updates` since.

    `computed` tokens were sampled for it and its client got the first `kept`, both as of `Control.finish`; a client
    that aborts it says how many it `got`. `ended` is the reason and the time at which its turn ended, before it left;
    tokens of `ends` end it.
    """

    name: str
    key: Key
    prompt: Sequence[int]
    output: Sequence[int]
    max_response_tokens: int
    embedded_tokens: int = 0
    drafting: Drafting = "any"
    arrived_s: float = 0.0
    first_token_s: float | None = None
    recent_acceptance: float | None = None
    drafter: str = ""
    drafted: int = 0
    accepted: int = 0
    shown: dict[str, int] = field(default_factory=dict)
    version: int = 0
    updates: list[int] = field(default_factory=list)
    computed: int = 0
    got: int | None = None
    kept: int | None = None
    ended: tuple[str | None, float] | None = None
    ends: frozenset[int | None] = frozenset()

    @property
    def prompt_id(self) -> str:
        return self.key[1]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) or self.embedded_tokens

    @property
    def generated_tokens(self) -> int:
        return len(self.output)


class BatchRequests(Sequence[LiveRequest]):
    """The requests of an iteration, looked up when a policy first reads one: most policies never do."""

    def __init__(self, ids: Sequence[str], live: Mapping[str, LiveRequest]):
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


class Observer:
    """Follows the requests of an engine, of which `Control` tells it; each method does nothing here."""

    def arrived(self, live: LiveRequest) -> None:
        """Note a request that has entered."""

    def returned(self) -> None:
        """Note that the output of the oldest iteration in flight is known."""

    def left(self, live: LiveRequest, reason: str | None) -> None:
        """Note a request that leaves for good; `reason` is vLLM's finish reason, None where it has none."""

    def landed(self, live: LiveRequest) -> None:
        """Note that all tokens of a request that has left are counted: it is in no iteration in flight."""

    def idle(self) -> None:
        """Note that no request is left."""
