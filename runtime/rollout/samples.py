"""What the trainer learns from: whole responses, each with the tokens' log-probs under the policies that drew them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tltlab.runtime.data.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One whole response of N tokens to learn from.

    `logprobs` are the behaviour's as the engine returned them, N natural logarithms; `token_versions` says which policy
    version drew each token. `group` numbers the prompt that it answers; `truncated`: it ended at its cap.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    reward: float
    group: int
    token_versions: list[int] = field(default_factory=list)
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One whole response of a prompt, whatever RL steps its tokens are from; `epoch` is that of the data."""

    prompt: Prompt
    epoch: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    token_versions: list[int]
    truncated: bool
    reward: float | None = None
