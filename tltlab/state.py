"""What a policy sees before an iteration, and what it is told after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .strategy import NO_SPECULATION, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """One running request. `recent_acceptance` is accepted tokens per draft lately (bonus excluded), None if none."""

    key: tuple[int, str, int, int]
    prompt_id: str
    generated_tokens: int
    max_response_tokens: int
    recent_acceptance: float | None = None
    length_class: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    """Freshness of a drafter: `age` in RL steps since its last update, updates so far, accepted tokens per draft."""

    age: int = 0
    updates: int = 0
    accept_estimate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """The engine just before an iteration.

    `batch` requests run and `waiting` wait on this worker; `context_tokens` is the sum over the batch of prompt and
    generated tokens; `free_kv_tokens` is None where the capacity is unlimited; `strategy` is the one in force.
    `requests` is a lazy view: reading it costs time, not reading it is free.
    """

    rl_step: int
    batch: int
    worker: int = 0
    waiting: int = 0
    context_tokens: float = 0.0
    free_kv_tokens: float | None = None
    strategy: Strategy = NO_SPECULATION
    drafters: Mapping[str, DrafterState] = field(default_factory=dict)
    requests: Sequence[RequestState] = ()

    @property
    def remaining(self) -> int:
        """Running and waiting requests."""
        return self.batch + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What an iteration under a chosen strategy did.

    `elapsed_s` seconds; `drafted` and `accepted` tokens per request of the batch, without the bonus token (expected
    values in the simulator's fluid mode); `had_prefill` marks an iteration that also prefilled prompts.

    >>> StepOutcome(elapsed_s=0.01, batch=2, drafted=(4, 4), accepted=(3, 1)).accept_length
    3.0
    """

    elapsed_s: float
    batch: int
    drafted: Sequence[float] = ()
    accepted: Sequence[float] = ()
    had_prefill: bool = False

    @property
    def accept_length(self) -> float:
        """Tokens per request, the bonus token included."""
        return float(sum(self.accepted)) / self.batch + 1.0


NEWEST_WEIGHT = 0.2
"""Weight of the newest draft in a request's `recent_acceptance`: about its last five drafts count."""


def recent_acceptance(previous: float | None, accepted: float, num_drafts: int = 1) -> float:
    """Return a request's recent acceptance after `num_drafts` more drafts, of each of which `accepted` were kept.

    The first draft sets it; until then `previous` is None.

    >>> recent_acceptance(None, 3.0), round(recent_acceptance(3.0, 1.0), 3), round(recent_acceptance(3.0, 1.0, 2), 3)
    (3.0, 2.6, 2.28)
    """
    return accepted if previous is None else accepted + (previous - accepted) * (1.0 - NEWEST_WEIGHT) ** num_drafts
