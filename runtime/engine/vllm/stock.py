"""Stock vLLM, without tltlab's scheduler: plain rollouts, and evaluation of a drafter's checkpoint."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tltlab.errors import ConfigError, RunError, one_line
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.engine.generation import GenerationRequest, Rollout

from . import on_cpu, starting, uncompiled
from .llm import add_request, client_errors, engine_arguments, response, running, sampling_params, scheduler_of

_DRAFTS = "vllm:spec_decode_num_drafts"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class PlainStock:
    """A `vllm.LLM` in this process with an `Engine`'s arguments, vLLM's own scheduler and no speculation; close it."""

    def __init__(self, model: str, *, seed: int = 0, vllm_args: Fields):
        with starting():
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            args = engine_arguments(seed, vllm_args)
            with uncompiled(on_cpu() and args["enforce_eager"]):
                import vllm

                self.llm = vllm.LLM(model, **args)

    def close(self) -> None:
        """Release the engine's memory and threads."""
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, requests: Sequence[GenerationRequest], *, rl_step: int, temperature: float) -> Rollout:
        """Generate every request to its end, in the loop of `Engine.generate`. Nothing may be running.

        A row of `iterations` has only what is visible from outside: its time, and the requests that ran.
        """
        engine, names, responses = self.llm.llm_engine, {}, {}
        scheduler = scheduler_of(self.llm)
        start = time.perf_counter()
        for number, request in enumerate(requests):
            name = f"{rl_step}.{number}"
            names[name] = request
            add_request(self.llm, name, request, sampling_params(request, {"temperature": temperature}))
        rows: list[Json] = []
        prefilling = True
        since = start
        with running(self.llm):
            while engine.has_unfinished_requests():
                batch = len(scheduler.running)
                outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    request = names[output.request_id]
                    responses[output.request_id] = response(request, output.outputs[0], now - start, now - start)
                rows.append(
                    {
                        "iteration": len(rows),
                        "t_start": since - start,
                        "duration": now - since,
                        "batch": batch,
                        # The number of prefilled tokens is unknown.
                        "prefill_tokens": int(prefilling),
                        "num_drafted": 0,
                        "num_accepted": 0,
                        "num_generated": batch,
                        "accepted_per_request": None,
                    }
                )
                if prefilling:
                    counts = (request.num_output_tokens for request in scheduler.running)
                    prefilling = bool(scheduler.waiting) or not all(counts)
                since = now
        return Rollout(
            responses=[responses[name] for name in names],
            iterations=pa.Table.from_pylist(rows),
            decisions=pa.table({}),
            duration_s=time.perf_counter() - start,
            recorder_s=0.0,
            policy_s=0.0,
        )


@frozen
class StockRun:
    """Result of stock vLLM on some prompts: responses, and its own counters of speculative decoding.

    `accepted[i]` counts the drafts whose token i was accepted; `num_drafts` the passes that verified a draft.
    """

    token_ids: list[list[int]]
    num_drafts: int
    accepted: list[int]


class StockEngine:
    """A `vllm.LLM` of a target and a drafter's checkpoint, in this process; close it.

    `method` is vLLM's name of the drafter's kind, `depth` the tokens it drafts, `max_model_len` the most tokens of a
    prompt and its response. RunError where vLLM does not start.
    """

    def __init__(
        self, target: str | Path, drafter: str | Path, *, method: str, depth: int, max_model_len: int, seed: int = 0
    ):
        self._cpu = cpu = on_cpu()
        # As for tltlab's engines: ten prompts do not need 92 % of the memory and minutes of compilation.
        cpu_arguments = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
        with starting(), uncompiled(cpu):
            # A separate process releases all of a device's memory when it ends.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if cpu else "1"
            try:
                import vllm

                self._llm = vllm.LLM(
                    str(target),
                    max_model_len=max_model_len,
                    speculative_config={"method": method, "model": str(drafter), "num_speculative_tokens": depth},
                    disable_log_stats=False,
                    generation_config="vllm",
                    seed=seed,
                    **(cpu_arguments if cpu else {}),
                )
            except Exception as error:  # vLLM passes on errors of its loaders, from KeyError to AttributeError
                why = f"{type(error).__name__}: {one_line(error)[:400]}"
                raise RunError(f"stock vLLM does not start on {target} with the drafter {drafter}: {why}") from error
        self.depth = depth

    def close(self) -> None:
        """Release the engine's memory and threads."""
        self._llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int) -> StockRun:
        """Generate one response per prompt of token ids. ConfigError for prompts that vLLM refuses."""
        from vllm import SamplingParams

        before = self._counters()
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, detokenize=False)
        try:
            inputs: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            with uncompiled(self._cpu):
                outputs = self._llm.generate(inputs, params, use_tqdm=False)
        except client_errors() as error:
            raise ConfigError(f"vLLM refuses these prompts: {one_line(error)[:300]}") from error
        after = self._counters()
        drafts, *accepted = (now - then for now, then in zip(after, before, strict=True))
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return StockRun(token_ids=token_ids, num_drafts=drafts, accepted=accepted)

    def _counters(self) -> list[int]:
        metrics: Json = {metric.name: metric for metric in self._llm.get_metrics()}
        accepted = metrics.get(_PER_POSITION)
        if accepted is None:
            return [0] * (1 + self.depth)
        return [metrics[_DRAFTS].value, *accepted.values[: self.depth]]
