"""The engine under audit: tltlab's on the tiny target, answering requests that may differ in their sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tltlab.drafters.base import Key
from tltlab.policies.policy import Policy
from tltlab.runtime.engine.engine import Engine, GenerationRequest
from tltlab.runtime.engine.vllm import on_cpu

from .models import MAX_POSITIONS
from .samples import PROMPTS, Answer, Answers, Asked

_UPDATE_AFTER = 3
"""Iterations after which a weight update arrives in a running batch: prompts are through, few responses have ended."""


def settings(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM arguments of a small engine in full precision, as the reference is; `vllm_args` win."""
    memory = {"kv_cache_memory_bytes": 64 << 20} if on_cpu() else {"gpu_memory_utilization": 0.1}
    return {"dtype": "float32", "max_model_len": MAX_POSITIONS, "max_num_seqs": 128, **memory, **vllm_args}


class AuditedEngine:
    """An `Engine` on the tiny target that runs at most `max_num_seqs` requests at once."""

    def __init__(self, engine: Engine, max_num_seqs: int) -> None:
        self.engine = engine
        self.max_num_seqs = max_num_seqs
        self._round = 0

    def prepare(self, policy: Policy) -> None:
        """Draft by `policy` from now on, with nothing remembered."""
        self.engine.set_policy(policy, (self._round,))
        self.engine.forget()

    def remember(self, prompt: int, responses: Sequence[Sequence[int]]) -> None:
        """Show the drafters earlier responses to a prompt, by its number."""
        self._round += 1
        self.engine.remember(
            [((self._round, f"p{prompt}", n, 0), PROMPTS[prompt], response) for n, response in enumerate(responses)]
        )

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample by these weights from now on."""
        self._round += 1
        self.engine.update_weights(weights.items(), self._round)

    def ask(
        self, requests: Sequence[Asked], *, ignore_eos: bool = False, update: Callable[[], None] | None = None
    ) -> Answers:
        """Answer all requests; `update` is called once, while they run."""
        self._round += 1
        keys = [(self._round, f"p{asked.prompt}", n, 0) for n, asked in enumerate(requests)]
        before: dict[Key, int] = {}
        waited = 0

        def until(ended: Sequence[Key]) -> bool:
            nonlocal waited
            waited += 1
            if update is not None and waited == _UPDATE_AFTER:
                before.update({live.key: len(live.output) for live in self.engine.control.live.values()})
                update()
            return False

        rollout = self.engine.generate(
            [
                GenerationRequest(
                    key=key,
                    prompt_token_ids=list(PROMPTS[asked.prompt]),
                    max_response_tokens=asked.max_tokens,
                    ignore_eos=ignore_eos,
                    temperature=asked.sampling.temperature,
                    top_p=asked.sampling.top_p,
                    top_k=asked.sampling.top_k,
                )
                for key, asked in zip(keys, requests, strict=True)
            ],
            rl_step=keys[0][0],
            temperature=1.0,
            until=until,
        )
        answers = [
            Answer(asked=a, tokens=tuple(r.token_ids), logprobs=tuple(r.logprobs), num_before=before.get(r.key))
            for a, r in zip(requests, rollout.responses, strict=True)
        ]
        return _counted(answers, rollout.iterations)


def _counted(answers: list[Answer], iterations: Sequence[Mapping[str, Any]]) -> Answers:
    return Answers(
        answers=answers,
        num_drafted=sum(row["num_drafted"] for row in iterations),
        num_accepted=sum(row["num_accepted"] for row in iterations),
    )
