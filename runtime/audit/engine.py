"""The engine under audit: tltlab's on the tiny target, with requests that may differ in their sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tltlab.drafters.base import Key
from tltlab.policies.policy import Policy
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.engine.vllm import on_cpu

from .exact import Sampling
from .models import MAX_POSITIONS

RESPONSE_TOKENS = 12
_UPDATE_AFTER = 3
"""Iterations after which a weight update arrives in a running batch: prompts are through, few responses have ended."""

# Every pair of letters occurs, so n-grams have a continuation for any first token.
_ALL_PAIRS = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3]
PROMPTS = tuple(tuple(_ALL_PAIRS[i:] + _ALL_PAIRS[: i + 1]) for i in (0, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """A request of the audit; with `updated` the updated weights answer it."""

    prompt: int
    sampling: Sampling
    max_tokens: int = RESPONSE_TOKENS
    updated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens that the engine sampled; the first `num_before` by the old weights where they changed meanwhile."""

    request: AuditRequest
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A round's answers, and the numbers of verified and accepted draft tokens."""

    answers: list[Answer]
    num_drafted: int
    num_accepted: int


def settings(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM arguments of a small engine in full precision, like the reference; `vllm_args` override."""
    memory = {"kv_cache_memory_bytes": 64 << 20} if on_cpu() else {"gpu_memory_utilization": 0.1}
    return {"dtype": "float32", "max_model_len": MAX_POSITIONS, "max_num_seqs": 128, **memory, **vllm_args}


class AuditedEngine:
    """An `Engine` on the tiny target that runs at most `max_num_seqs` requests at once."""

    def __init__(self, engine: Engine, max_num_seqs: int) -> None:
        self.engine = engine
        self.max_num_seqs = max_num_seqs
        self._round = 0

    def prepare(self, policy: Policy) -> None:
        """Draft by `policy` from now on, with an empty history."""
        self.engine.set_policy(policy, (self._round,))
        self.engine.forget()

    def remember(self, prompt: int, responses: Sequence[Sequence[int]]) -> None:
        """Add earlier responses to a prompt, by its number, to the drafters."""
        self._round += 1
        self.engine.remember(
            [((self._round, f"p{prompt}", n, 0), PROMPTS[prompt], response) for n, response in enumerate(responses)]
        )

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample from these weights from now on."""
        self._round += 1
        self.engine.update_weights(weights.items(), self._round)

    def ask(
        self, requests: Sequence[AuditRequest], *, ignore_eos: bool = False, update: Callable[[], None] | None = None
    ) -> Answers:
        """Answer all requests; `update` is called once, while they run."""
        self._round += 1
        num_before: dict[Key, int] = {}
        iterations = 0

        def until(ended: Sequence[Key]) -> bool:
            nonlocal iterations
            iterations += 1
            if update is not None and iterations == _UPDATE_AFTER:
                num_before.update({live.key: len(live.output) for live in self.engine.control.live.values()})
                update()
            return False

        rollout = self.engine.generate(
            [
                GenerationRequest(
                    key=(self._round, f"p{request.prompt}", number, 0),
                    prompt_token_ids=list(PROMPTS[request.prompt]),
                    max_response_tokens=request.max_tokens,
                    ignore_eos=ignore_eos,
                    temperature=request.sampling.temperature,
                    top_p=request.sampling.top_p,
                    top_k=request.sampling.top_k,
                )
                for number, request in enumerate(requests)
            ],
            rl_step=self._round,
            temperature=1.0,
            until=until,
        )
        return Answers(
            answers=[
                Answer(
                    request=a, tokens=tuple(r.token_ids), logprobs=tuple(r.logprobs), num_before=num_before.get(r.key)
                )
                for a, r in zip(requests, rollout.responses, strict=True)
            ],
            num_drafted=sum(row["num_drafted"] for row in rollout.iterations),
            num_accepted=sum(row["num_accepted"] for row in rollout.iterations),
        )
