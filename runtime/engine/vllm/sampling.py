"""Repairs of sampling in vLLM's CPU build, and whether they are in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from . import in_place_of, replaced


def mend_speculative_sampling() -> None:
    """Expand per-request sampling parameters to draft tokens correctly.

    The C++ fallback of the CPU build (0.24 to 0.33) writes the expanded temperature, top-p and top-k into an int64
    copy, so the rejection sampler reads uninitialised memory: at temperature > 0 speculative tokens follow the wrong
    distribution. What is replaced is the function that calls the kernel, since that is put in place at various times.
    """
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.expand_batch_to_tokens
    if stock is not expand_to_tokens:
        expand_to_tokens.stock = stock  # type: ignore[attr-defined]
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens


def speculative_sampling_is_sound() -> bool:
    """Whether this process verifies drafts with a sampler that is right: always on CUDA, on CPU if mended."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    return not current_platform.is_cpu() or rejection_sampler.expand_batch_to_tokens is expand_to_tokens


def unmended_sampling() -> AbstractContextManager[None]:
    """Within, engines of this process verify drafts as vLLM's CPU build ships: to show that this can be noticed."""
    from vllm.v1.sample import rejection_sampler

    mended = rejection_sampler.expand_batch_to_tokens
    # Never the mended one itself: `speculative_sampling_is_sound` looks which it is.
    stock = partial(getattr(mended, "stock", mended))
    return replaced(rejection_sampler, "expand_batch_to_tokens", stock)


def expand_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Return `x` [B] as [num_tokens], each as often as its request has tokens; `replace_from` is replaced.

    `cu_num_tokens` [B] counts the tokens up to each request and its own.
    """
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def mend_top_k_of_nothing() -> None:
    """Let top-k-only sampling pass an iteration without draft tokens, where the stock build takes max() of nothing."""
    from vllm.v1.sample.ops import topk_topp_sampler

    @in_place_of(topk_topp_sampler, "apply_top_k_only")
    def apply_top_k_only(stock: Any, logits: torch.Tensor, k: torch.Tensor) -> Any:
        return logits if logits.shape[0] == 0 else stock(logits, k)
