"""Requests to an engine, its responses, and failures."""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Protocol

from tltlab.drafters.base import Key
from tltlab.errors import RunError
from tltlab.records import frozen


@frozen
class GenerationRequest:
    """One response to generate: its key (rl_step, prompt_id, sample, turn), prompt token ids and cap in tokens.

    With `ignore_eos` it runs to its cap. Sampling settings that are None are those of the call. It also stops after a
    token of `stop_token_ids`. `prompt_text` is for environments, which may read the prompt. Generation begins once the
    engine has the weights of `from_version`. A rollout that stops at a quota still completes the requests that are
    `due`, and takes a prompt for answered with all but `spare` of its requests.
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
    spare: int = 0


@frozen
class FollowUp:
    """The next turn of a response: its request, whose prompt ends with the tokens `observed` of a tool's output.

    The request was submitted at `submit_s`, seconds since the rollout began, `tool_s` after the previous turn ended.
    """

    request: GenerationRequest
    observed: list[int]
    submit_s: float
    tool_s: float


Until = Callable[[Sequence[Key]], bool]
"""Called after each iteration with the keys of ended responses, in that order; True ends a rollout."""


class FollowUps(Protocol):
    """Source of further turns of ended responses; an engine calls it between iterations."""

    @property
    def pending(self) -> int:
        """Number of responses with a tool call under way."""

    def ended(self, request: GenerationRequest, token_ids: Sequence[int], now_s: float) -> None:
        """Process a request that ended with these tokens; by default nothing follows."""
        return

    def ready(self, now_s: Callable[[], float], *, wait_for_one: bool) -> list[FollowUp]:
        """Return the turns that may begin; with `wait_for_one` wait for one tool call, if any is under way."""


@frozen
class GenerationResponse:
    """One response. `logprobs` are at the sampling temperature; times are in seconds since `generate`.

    `finish_reason` is "stop", "length" or "abort". Tokens and log-probs are lists from an engine, and arrays of 4 bytes
    each from a rollout worker. `t_submit` is the time of its submission, 0 at the start of the rollout. A turn after
    the first comes after `tool_s` at a tool; `observed` are the tool's tokens, the end of its prompt. `versions` are
    (policy version, tokens) of its spans where weights may change while it runs, else empty.
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


@frozen
class Rollout:
    """One engine's share of a rollout: responses in the order of the requests, rows for the trace, seconds.

    `iterations` and `decisions` are `pa.Table`s, or lists of rows once they were read back from a file.
    `recorder_s` were spent in the tracker, `policy_s` on choosing, sharing out and learning, `drafting_s` in drafters
    next to the scheduler (feeding and look-ups). `follow_ups` are the requests of later turns; their responses come
    after the others. `notes` are messages for the user.

    Where a planner moves requests, `asked` are those that the responses answer, in place of those that the worker was
    given. `moves` are the gathers of the rollout, (start, seconds, requests, shape) each; `lent` are iterations of
    engines of another shape that ran on this worker's GPUs too. The first part has the rows of `plans`.
    """

    responses: list[GenerationResponse]
    iterations: Any
    decisions: Any
    duration_s: float
    recorder_s: float
    policy_s: float
    drafting_s: float = 0.0
    follow_ups: list[GenerationRequest] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: list[GenerationRequest] | None = None
    moves: tuple[tuple[float, float, int, str], ...] = ()
    plans: list[Any] = field(default_factory=list)
    lent: list[Any] = field(default_factory=list)


class EngineDied(RunError):
    """The engine failed during a rollout: `responses` are complete, `lost` are the keys of the others."""

    def __init__(self, message: str, responses: list[GenerationResponse] | None = None, lost: list[Key] | None = None):
        super().__init__(message, responses, lost)
        self.responses = responses or []
        self.lost = lost or []

    def __str__(self) -> str:
        return str(self.args[0])


class PolicyFailed(RunError):
    """The policy raised during a rollout, which then ran partly under no policy."""
