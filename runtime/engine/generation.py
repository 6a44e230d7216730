"""What an engine is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tltlab.drafters.base import Key
from tltlab.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to generate: its key (rl_step, prompt_id, sample, turn), prompt token ids and cap in tokens.

    With `ignore_eos` it runs to its cap. Sampling settings that are None are those of the call.
    """

    key: Key
    prompt_token_ids: list[int]
    max_response_tokens: int
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What came back. `logprobs` are the behaviour's, at the sampling temperature; times are since `generate`.

    `finish_reason` is "stop", "length" or "abort". Tokens and log-probs are lists from an engine, and arrays of 4 bytes
    each from a rollout worker.
    """

    key: Key
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    t_first_token: float
    t_finish: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One engine's share of a rollout: responses in the order of the requests, rows for the trace, seconds.

    `recorder_s` went into the ledger, `policy_s` into choosing, sharing out and learning, `drafting_s` into drafters
    beside the scheduler: what they were fed, and what they looked up.
    """

    responses: list[Response]
    iterations: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]
    duration_s: float
    recorder_s: float
    policy_s: float
    drafting_s: float = 0.0


class EngineDied(RunError):
    """The engine failed in mid-rollout: `responses` came back whole, `lost` are the keys of those that did not."""

    def __init__(self, message: str, responses: list[Response] | None = None, lost: list[Key] | None = None) -> None:
        super().__init__(message, responses, lost)
        self.responses = responses or []
        self.lost = lost or []

    def __str__(self) -> str:
        return str(self.args[0])
