"""vLLM by itself, for benchmarks that compare with it."""

from __future__ import annotations

from typing import Any


def stock_llm(model: str, **arguments: Any) -> Any:
    """Create a `vllm.LLM` with vLLM's own arguments."""
    import vllm

    return vllm.LLM(model, **arguments)


def fixed_length(num_tokens: int) -> Any:
    """Return vLLM's sampling parameters for responses of exactly `num_tokens` at temperature 1."""
    import vllm

    return vllm.SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def keep_linear_weights() -> None:
    """Make vLLM multiply by torch's linear, its own fallback where the build has neither oneDNN nor AMX kernels.

    On CPU it otherwise packs weights after loading, and `load_weights`, by which TRL writes new ones, finds no
    parameter to write to.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
