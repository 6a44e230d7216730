"""Repairs of sampling in vLLM's CPU build, checks of the repairs, and synthetic acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from tltlab.records import Json

from . import guarded_call, has_option, replaced, replacing

if TYPE_CHECKING:
    from tltlab.runtime.engine.requests import Drafting


def fix_speculative_sampling() -> None:
    """Expand per-request sampling parameters to draft tokens correctly.

    The C++ fallback of the CPU build (0.24 to 0.33) writes the expanded temperature, top-p and top-k into an int64
    copy, so the rejection sampler reads uninitialised memory: at temperature > 0 speculative tokens follow the wrong
    distribution. The function that calls the kernel is replaced, since the kernel is put in place at various times.
    """
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.expand_batch_to_tokens
    if stock is not expand_to_tokens:
        expand_to_tokens.stock = stock  # type: ignore[attr-defined]
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens


def speculative_sampling_is_sound() -> bool:
    """Return True if this process verifies drafts with a correct sampler: always on CUDA, on CPU if repaired."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    return not current_platform.is_cpu() or rejection_sampler.expand_batch_to_tokens is expand_to_tokens


def expand_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Return `x` [B] as [num_tokens], each as often as its request has tokens; `replace_from` is replaced.

    `cu_num_tokens` [B] counts the tokens up to each request and its own.
    """
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def fix_top_k_without_drafts() -> None:
    """Let top-k-only sampling pass an iteration without draft tokens, where the stock build calls max() on nothing."""
    from vllm.v1.sample.ops import topk_topp_sampler

    @replacing(topk_topp_sampler, "apply_top_k_only")
    def apply_top_k_only(stock, logits: torch.Tensor, k: torch.Tensor):
        return logits if logits.shape[0] == 0 else stock(logits, k)


_NONE, _NONE_BESIDE = ("min_p", "logit_bias"), ("logprob_token_ids", "thinking_token_budget")


def drafting_of(params) -> Drafting:
    """Return the drafts that a request of these `SamplingParams` may have.

    vLLM's V1 sampler (0.26 to 0.33) does not apply `min_p` and `logit_bias` to drafted tokens. With drafts it fails for
    `logprob_token_ids`, and ends thinking at wrong tokens for a `thinking_token_budget`. The random numbers that
    a request with a seed draws would depend on its drafts.
    """
    if any(getattr(params, name, None) is not None for name in _NONE_BESIDE):
        return "none beside"
    if any(getattr(params, name) for name in _NONE) or params.sampling_type.name == "RANDOM_SEED":
        return "none"
    return "any"


def sample_beside_drafts() -> None:
    """Let engines with a policy take requests with `min_p` and `logit_bias`, which they decode plainly (`drafting_of`).

    vLLM refuses these requests in engines that speculate, and has no logits processors for them there.
    """
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker import gpu_model_runner

    @replacing(InputProcessor, "__init__")
    def start(stock, self, *args, **kwargs) -> None:
        stock(self, *args, **kwargs)
        if guarded_call(self, has_option, self.vllm_config, "policy", otherwise=False):
            # Used only to validate requests.
            self.speculative_config = None

    @replacing(gpu_model_runner, "build_logitsprocs")
    def build_logitsprocs(stock, vllm_config, *args, **kwargs):
        hidden = has_option(vllm_config, "policy")
        with replaced(vllm_config, "speculative_config", None) if hidden else nullcontext():
            return stock(vllm_config, *args, **kwargs)


def synthetic_rejection(rates: Sequence[float]) -> Json:
    """Return the fields of vLLM's `speculative_config` that accept draft token i with probability `rates[i]`, from 0.

    A rate is the probability that the whole draft up to its token is accepted, so rates never rise; the text does not
    matter. On a CPU, whose sampler has no such mode, this adds one.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        replacing(rejection_sampler, "rejection_sample")(_rejection_sample)
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}


def set_rates(sampler, rates: Sequence[float]) -> None:
    """Set other rates in a rejection sampler that `synthetic_rejection` started, 0 at all further positions."""
    conditional = [rate / before if before else 0.0 for rate, before in zip(rates, (1.0, *rates), strict=False)]
    held = sampler.synthetic_conditional_rates
    held.zero_()
    held[: len(conditional)] = torch.tensor(conditional, dtype=held.dtype)


def _rejection_sample(
    stock,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    **more,
) -> torch.Tensor:
    """vLLM's `rejection_sample` with a synthetic mode: [B, max_spec_len + 1] tokens, in no less time than without."""
    arguments = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits)
    tokens: torch.Tensor = stock(*arguments, bonus_token_ids, sampling_metadata, **more)
    if synthetic_conditional_rates is None:
        return tokens
    counts = torch.tensor(num_draft_tokens)
    drafted = torch.arange(max_spec_len) < counts[:, None]
    drafts = torch.full(drafted.shape, -1, dtype=tokens.dtype)
    drafts[drafted] = draft_token_ids.to(tokens.dtype)
    lucky = torch.rand(drafted.shape) < synthetic_conditional_rates[:max_spec_len]
    kept = (lucky & (drafts >= 0)).cumprod(1).sum(1)
    places = torch.arange(max_spec_len + 1)
    # The target's own token follows: the bonus token after a whole draft, else the first token that stock sampled.
    last = torch.where(kept == counts, bonus_token_ids.flatten().to(tokens.dtype), tokens[:, 0])
    drafts = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
    out = torch.where(places < kept[:, None], drafts, torch.full_like(drafts, -1))
    return torch.where(places == kept[:, None], last[:, None], out)
