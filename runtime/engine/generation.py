"""What an engine is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tltlab.drafters.base import Key
from tltlab.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to generate: its key (rl_step, prompt_id, sample, turn), prompt token ids and cap in tokens.

    With `ignore_eos` it runs to its cap. Sampling settings that are None are those of the call. It also stops behind a
    token of `stop_token_ids`, and `prompt_text` is for environments, which may read the prompt. It begins once the
    engine has the weights of `from_version`, and a rollout that stops at a quota goes on for as long as it is `due`.
    """

    key: Key
    prompt_token_ids: list[int]
    max_response_tokens: int
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    prompt_text: str = ""
    from_version: int = 0
    due: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The next turn of a response: its request, whose prompt ends with the tokens `observed` of what a tool said.

    It came at `submit_s`, seconds since the rollout began, `tool_s` after the turn before it had ended.
    """

    request: GenerationRequest
    observed: list[int]
    submit_s: float
    tool_s: float


class FollowUps(Protocol):
    """What goes on after responses that have ended; an engine asks it between iterations."""

    @property
    def pending(self) -> int:
        """How many are away at their tools."""

    def ended(self, request: GenerationRequest, token_ids: Sequence[int], now_s: float) -> None:
        """A request has ended with these tokens."""

    def ready(self, now_s: Callable[[], float], *, wait_for_one: bool) -> list[FollowUp]:
        """Turns that may begin; with `wait_for_one` not before one call is done, if any is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResponse:
    """What came back. `logprobs` are the behaviour's, at the sampling temperature; times are since `generate`.

    `finish_reason` is "stop", "length" or "abort". Tokens and log-probs are lists from an engine, and arrays of 4 bytes
    each from a rollout worker. A turn after the first came at `t_submit`, after `tool_s` at a tool, which said the
    tokens `observed`, the end of its prompt. `versions` are (policy version, tokens) of its spans, where weights may
    change while it runs; else it is empty.
    """

    key: Key
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    t_first_token: float
    t_finish: float
    t_submit: float = 0.0
    tool_s: float | None = None
    observed: Sequence[int] = ()
    versions: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One engine's share of a rollout: responses in the order of the requests, rows for the trace, seconds.

    `recorder_s` went into the ledger, `policy_s` into choosing, sharing out and learning, `drafting_s` into drafters
    beside the scheduler: what they were fed, and what they looked up. `follow_ups` are the requests of later turns,
    whose responses come behind the others; `notes` is what the run should say.
    """

    responses: list[GenerationResponse]
    iterations: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]
    duration_s: float
    recorder_s: float
    policy_s: float
    drafting_s: float = 0.0
    follow_ups: list[GenerationRequest] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class EngineDied(RunError):
    """The engine failed in mid-rollout: `responses` came back whole, `lost` are the keys of those that did not."""

    def __init__(
        self, message: str, responses: list[GenerationResponse] | None = None, lost: list[Key] | None = None
    ) -> None:
        super().__init__(message, responses, lost)
        self.responses = responses or []
        self.lost = lost or []

    def __str__(self) -> str:
        return str(self.args[0])
