"""Which kind of CUDA graph vLLM's iterations run in, and the memory of the graphs: for measurements on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any


def count_dispatches() -> Counter[str]:
    """Count what both of vLLM's dispatchers choose in this process from now on, as "FULL, 16 tokens".

    Model runners also keep the bytes that their capture took (`captured_bytes`). Call it once, before an
    engine starts, in a process that makes nothing else: vLLM's classes stay as they are made here.
    """
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

    dispatched: Counter[str] = Counter()

    def count(owner: Any, kind: Callable[[Any], tuple[str, int]]) -> None:
        dispatch = owner.dispatch

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = dispatch(self, *args, **kwargs)
            mode, num_tokens = kind(chosen)
            dispatched[f"{mode}, {num_tokens} tokens"] += 1
            return chosen

        owner.dispatch = counted

    count(CudagraphDispatcher, lambda chosen: (chosen[0].name, chosen[1].num_tokens))
    count(CudaGraphManager, lambda chosen: (chosen.cg_mode.name, chosen.num_tokens))
    for runner in (V1Runner, V2Runner):
        keep_captured_bytes(runner)
    return dispatched


def keep_captured_bytes(runner: Any) -> None:
    """Have model runners of this class keep what their `capture_model` returns; call it before the engine starts.

    vLLM 0.32 logs that number ("Graph capturing finished in ... secs, took ... GiB") and forgets it.
    """
    capture = runner.capture_model

    @wraps(capture)
    def kept(self: Any, *args: Any, **kwargs: Any) -> int:
        self.tltlab_captured_bytes = taken = int(capture(self, *args, **kwargs))
        return taken

    runner.capture_model = kept


def captured_bytes(worker: Any) -> int | None:
    """Bytes of device memory that a vLLM worker's graph capture took; None where nothing was captured or kept."""
    return getattr(worker.model_runner, "tltlab_captured_bytes", None) or None
