"""Which kind of CUDA graph vLLM's iterations run in: its own dispatchers, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ..graphs import keep_captured_bytes


def count_dispatches() -> Counter[str]:
    """Count what both of vLLM's dispatchers choose in this process from now on, as "FULL, 16 tokens".

    Model runners also keep the bytes that their capture took (`graphs.measured_graph_bytes`). Call it once, before an
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
