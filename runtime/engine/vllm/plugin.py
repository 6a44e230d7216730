"""What every vLLM process needs from us, loaded by vLLM as a `vllm.general_plugins` entry point.

Two defects of vLLM's CPU build are mended; a weight-transfer backend for trainers on the same machine is registered;
drafting is timed, and what CUDA graphs take is kept; and an engine core, in whatever process it runs, can be asked
about its policy. All this changes vLLM's own modules for as long as the process lives. What a version of vLLM has no
room for is left out (`capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from .capabilities import missing
from .dispatch import keep_captured_bytes
from .runners import model_runners, spare_speculation, time_drafting
from .transfer import register_backend

GRACE_S = 60.0
"""How long a server that ends waits at most for an engine core that records to finish its trace."""


def register() -> None:
    """Entry point: everything the module's first lines say. Safe to call twice, and raises nothing."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger(__name__)
    for capability, apply in _CHANGES.items():
        if capability.endswith("on CPU") and not current_platform.is_cpu():
            continue
        try:
            without = missing(capability)
            if not without:
                apply()
        except Exception as error:  # whatever it is, others are being served
            without = f"{capability}: {type(error).__name__}: {error}"
        if without:
            logger.warning("tltlab: %s", without)


def answer_for_the_policy() -> None:
    """Let vLLM's utility messages reach what sits beside the scheduler, `engine_core.call_utility("tltlab", bytes)`.

    What it records is finished before the engine core goes, and workers that draft nothing are not asked for drafts.
    """
    from vllm.v1.engine.core import EngineCore

    def tltlab(self: Any, message: bytes) -> bytes:
        from .scheduler import call_control

        return call_control(self, message)

    if hasattr(EngineCore, "tltlab"):
        return
    EngineCore.tltlab = tltlab
    stock, stock_step = EngineCore.shutdown, EngineCore.post_step

    def post_step(self: Any, model_executed: bool) -> None:
        # Asking takes a message to each rank and back.
        if not getattr(self.scheduler, "drafts_here_alone", False):
            stock_step(self, model_executed)

    def shutdown(self: Any) -> None:
        # First of all: vLLM gives an engine core seconds to go, and most of them to its workers.
        close_recording = getattr(getattr(self, "scheduler", None), "close_recording", None)
        if close_recording is not None:
            close_recording()
        stock(self)

    EngineCore.shutdown, EngineCore.post_step = shutdown, post_step


def wait_for_recordings() -> None:
    """Have a server that ends wait for engine cores that record.

    By default `vllm serve` kills its engine cores (SIGKILL) in the instant after it has asked them to end (SIGTERM).
    Their requests are aborted as before; what they get is the time to write down what there was.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    if hasattr(CoreEngineProcManager, "tltlab_grace_s"):
        return
    CoreEngineProcManager.tltlab_grace_s = 0.0
    start, stop = CoreEngineProcManager.__init__, CoreEngineProcManager.shutdown

    @wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = getattr(kwargs.get("vllm_config"), "additional_config", None)
        if isinstance(config, dict) and (config.get("tltlab") or {}).get("record") is not None:
            self.tltlab_grace_s = GRACE_S
        start(self, *args, **kwargs)

    @wraps(stop)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        grace_s = self.tltlab_grace_s
        stop(self, timeout=max(timeout or 0.0, grace_s) if grace_s else timeout)

    CoreEngineProcManager.__init__, CoreEngineProcManager.shutdown = __init__, shutdown


def mend_speculative_sampling() -> None:
    """Expand per-request sampling parameters to draft tokens correctly.

    The C++ fallback of the CPU build (0.24 to 0.33) writes the expanded temperature, top-p and top-k into an int64
    copy, so the rejection sampler reads uninitialised memory: at temperature > 0 speculative tokens follow the wrong
    distribution. The kernel is put in place when modules are imported, or, before 0.31, when a model runner is made,
    so what is replaced is the function that calls it.
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


class _Memory(TorchFunctionMode):
    """Within, what `new_empty` makes of floating-point numbers holds `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(self._value) if func == torch.Tensor.new_empty and made.is_floating_point() else made


@contextmanager
def unmended_sampling(memory: float | None = None) -> Iterator[None]:
    """Within, engines of this process verify drafts as vLLM's CPU build ships: to show that this can be noticed.

    `memory` is what the memory that nobody writes is made to hold; None leaves that to chance, as it is.
    """
    from vllm.v1.sample import rejection_sampler

    mended = rejection_sampler.expand_batch_to_tokens
    stock = getattr(mended, "stock", mended)

    def expand(*args: Any, **kwargs: Any) -> torch.Tensor:
        with nullcontext() if memory is None else _Memory(memory):
            return cast(torch.Tensor, stock(*args, **kwargs))

    rejection_sampler.expand_batch_to_tokens = expand
    try:
        yield
    finally:
        rejection_sampler.expand_batch_to_tokens = mended


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

    stock = topk_topp_sampler.apply_top_k_only
    if getattr(stock, "mended_by_tltlab", False):
        return

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return logits if logits.shape[0] == 0 else stock(logits, k)

    apply_top_k_only.mended_by_tltlab = True  # type: ignore[attr-defined]
    topk_topp_sampler.apply_top_k_only = apply_top_k_only


def _keep_captured_bytes() -> None:
    for runner in model_runners():
        keep_captured_bytes(runner)


_CHANGES: Mapping[str, Callable[[], None]] = {
    "policies": answer_for_the_policy,
    "weight updates": register_backend,
    "sound sampling on CPU": mend_speculative_sampling,
    "top-k of nothing on CPU": mend_top_k_of_nothing,
    "plain iterations": spare_speculation,
    "draft times": time_drafting,
    "graph plans": _keep_captured_bytes,
    "traces of servers": wait_for_recordings,
}
"""What is changed in vLLM, by the capability that it needs. Drafting is timed with what `spare_speculation` adds."""
