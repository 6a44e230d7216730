"""One real vLLM engine in this process, driven iteration by iteration under a policy."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo

from tltlab.errors import ConfigError, RunError
from tltlab.selector import Selector
from tltlab.selectors import Fixed
from tltlab.strategy import NO_SPECULATION, Strategy

from .vllm_plugin import LOCAL_BACKEND, TESTED_VLLM, speculative_sampling_is_sound

Key = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to generate: its key (rl_step, prompt_id, sample, turn), prompt token ids and cap in tokens."""

    key: Key
    prompt_token_ids: list[int]
    max_response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What came back. `logprobs` are the behaviour's, at the sampling temperature; times are since `generate`."""

    key: Key
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    t_first_token: float
    t_finish: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One engine's share of a rollout: responses in the order of the requests, rows for the trace, seconds."""

    responses: list[Response]
    iterations: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    duration_s: float
    recorder_s: float


class Engine:
    """A vLLM engine with the policy's seam attached.

    `vllm_args` pass through to `vllm.LLM` under vLLM's own names and win over the defaults here. With
    `max_draft_depth` 0 the engine is built without speculation. Close it: it owns threads and memory.
    """

    def __init__(
        self,
        model: str,
        *,
        worker: int = 0,
        max_draft_depth: int = 8,
        drafter: str = "ngram",
        seed: int = 0,
        vllm_args: Mapping[str, Any] | None = None,
    ) -> None:
        # The policy lives beside the scheduler, so the engine core must run in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TQDM_DISABLE", "1")
        import vllm

        if not vllm.__version__.startswith(TESTED_VLLM + "."):
            raise ConfigError(f"tltlab's engine is tested with vLLM {TESTED_VLLM}.x, found {vllm.__version__}")
        from .policy_scheduler import Control, PolicyScheduler

        cpu = vllm.platforms.current_platform.is_cpu()
        args: dict[str, Any] = {
            "dtype": "float32" if cpu else "bfloat16",
            "enforce_eager": cpu,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "disable_log_stats": True,
            "seed": seed,
        }
        if cpu:
            # vLLM's own default takes 92 % of the machine's memory.
            args["kv_cache_memory_bytes"] = 256 << 20
        args |= dict(vllm_args or {})
        if cpu and args["enforce_eager"]:
            # Eager mode still compiles parts of the sampler on first use, which takes longer than the engine's start.
            torch._dynamo.config.disable = True
        if max_draft_depth:
            args["speculative_config"] = {
                "method": "custom_class",
                "model": f"{PolicyScheduler.__module__}.NgramProposer",
                "num_speculative_tokens": max_draft_depth,
            }
        try:
            self.llm = vllm.LLM(
                model=model,
                scheduler_cls=PolicyScheduler,
                weight_transfer_config=vllm.config.WeightTransferConfig(backend=LOCAL_BACKEND),
                **args,
            )
        except (ValueError, OSError, TypeError) as error:
            raise ConfigError(f"vLLM cannot start on {model}: {' '.join(str(error).split())[:500]}") from error
        if max_draft_depth and not speculative_sampling_is_sound():
            raise ConfigError("vLLM did not load the plugin 'tltlab' that mends its sampler: name it in VLLM_PLUGINS")
        self.llm.init_weight_transfer_engine({"init_info": {}})
        core = self.llm.llm_engine.engine_core.engine_core
        self.control = Control(worker, max_draft_depth, drafter)
        core.scheduler.control = self.control
        if max_draft_depth:
            runner = core.model_executor.driver_worker.worker.model_runner
            runner.drafter.control, runner.drafter.runner = self.control, runner

    def set_policy(self, selector: Selector) -> None:
        """Choose with `selector` from the next iteration on; ConfigError if it may ask for what the engine lacks."""
        self.control.set_selector(selector)

    def warm_up(self, temperature: float) -> None:
        """Run plain and speculative iterations once, so that no rollout pays for what happens only at first."""
        deepest = Strategy.chain(self.control.drafter_name, self.control.max_depth)
        requests = [
            GenerationRequest(key=(-1, "warm-up", n, 0), prompt_token_ids=[1, 2] * 4, max_response_tokens=8)
            for n in range(4)
        ]
        before = self.control.selector
        for strategy in (NO_SPECULATION, deepest):
            self.control.set_selector(Fixed(strategy))
            self.generate(requests, rl_step=-1, temperature=temperature)
        self.llm.reset_prefix_cache()
        self.control.set_selector(before)

    def evaluate(self, requests: Sequence[GenerationRequest], *, temperature: float) -> Rollout:
        """Generate without speculation; the policy in force neither chooses nor learns."""
        selector = self.control.selector
        self.control.set_selector(None)
        try:
            return self.generate(requests, rl_step=-1, temperature=temperature)
        finally:
            self.control.set_selector(selector)

    def generate(self, requests: Sequence[GenerationRequest], *, rl_step: int, temperature: float) -> Rollout:
        """Generate every request to its end. Raises RunError when the engine loses one."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        by_id: dict[str, GenerationRequest] = {}
        internal: dict[str, str] = {}
        for number, request in enumerate(requests):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=request.max_response_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            name = f"{rl_step}.{number}"
            by_id[name] = request
            internal[engine.add_request(name, {"prompt_token_ids": request.prompt_token_ids}, params)] = name
        start = self.control.begin(
            rl_step,
            {i: by_id[name].key for i, name in internal.items()},
            {i: by_id[name].prompt_token_ids for i, name in internal.items()},
        )
        outputs: dict[str, tuple[Any, float]] = {}
        inside = self.control.seconds_inside
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = (output.outputs[0], time.perf_counter() - start)
        iterations, decisions = self.control.end()
        lost = [r.key for name, r in by_id.items() if name not in outputs]
        if lost:
            raise RunError(f"the engine lost {len(lost)} of {len(requests)} responses, the first with key {lost[0]}")
        first = {internal[i]: seconds for i, seconds in self.control.first_token_s.items()}
        responses = [
            Response(
                key=request.key,
                token_ids=list(outputs[name][0].token_ids),
                logprobs=list(outputs[name][0].logprobs.logprobs),
                finish_reason=outputs[name][0].finish_reason,
                t_first_token=first.get(name, outputs[name][1]),
                t_finish=outputs[name][1],
            )
            for name, request in by_id.items()
        ]
        return Rollout(
            responses=responses,
            iterations=iterations,
            decisions=decisions,
            duration_s=time.perf_counter() - start,
            recorder_s=self.control.seconds_inside - inside,
        )

    def snapshot(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """What a rollout depends on besides requests and weights: the random state and what the policy has learned."""
        selector = self.control.selector
        return torch.get_rng_state(), copy.deepcopy(selector.state_dict()) if selector else {}

    def restore(self, state: tuple[torch.Tensor, dict[str, Any]]) -> None:
        """Go back to a `snapshot`, with nothing cached."""
        torch.set_rng_state(state[0])
        if self.control.selector:
            self.control.selector.load_state_dict(state[1])
        self.llm.reset_prefix_cache()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load the trainer's weights through vLLM's weight-update calls and forget cached prefixes of the old ones."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": list(weights)}})
        self.llm.finish_weight_update(str(version))
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Release the engine's memory and threads."""
        self.llm.llm_engine.engine_core.shutdown()
