"""Device memory of captured CUDA graphs: engines with graphs against the same engine without, where there is CUDA.

vLLM drafts chains only, so what is captured are one depth, three depths by batch size, and plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

KV_CACHE_BYTES = 4 << 30
"""The same in every engine, so that graphs alone differ."""


def cuda() -> bool:
    """Whether this machine has a CUDA device and an engine for it."""
    if find_spec("torch") is None or find_spec("vllm") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def measured_rows(
    model: str | None,
    max_batch: int,
    bytes_per_layer: float,
    *,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Predicted and measured GiB of each policy's graphs; none without a CUDA device or a model.

    Measured is the device memory that an engine takes more than one that runs eagerly, each in a process of its own:
    nothing else may use the device meanwhile. Not run on CUDA yet.
    """
    if model is None or not cuda():
        return []
    from tltlab.runtime.cli.export_policy import graph_pool
    from tltlab.runtime.engine.graphs import GIB, chain_policies, memory_bytes, plan_graphs

    eager_bytes = _engine_bytes(model, max_batch, {"enforce_eager": True}, depth=0)
    pool = graph_pool(model, 1, bytes_per_layer)
    rows = []
    for name, policy in chain_policies().items():
        plan = plan_graphs(policy, max_batch)
        told = plan.settings()
        progress(f"capturing {len(plan.full_graphs())} graphs for {name}")
        args = {"enforce_eager": False, "compilation_config": told["compilation_config"]}
        taken = _engine_bytes(model, max_batch, args, depth=plan.depths[-1]) - eager_bytes
        rows.append(
            {
                "model": model,
                "plan": f"{name} (vLLM)",
                "strategies": f"K in {', '.join(map(str, plan.depths))}",
                "graphs": len(plan.full_graphs()) + len(plan.capture_sizes),
                "predicted_gib": memory_bytes(pool, plan) / GIB,
                "measured_gib": taken / GIB,
            }
        )
    return rows


def _engine_bytes(model: str, max_batch: int, args: Mapping[str, Any], *, depth: int) -> int:
    """Bytes of device memory that an engine holds after its start, in its own process."""
    import torch

    from tltlab.runtime.engine.engine import Engine

    free_before, _ = torch.cuda.mem_get_info()
    vllm_args = {"max_num_seqs": max_batch, "kv_cache_memory_bytes": KV_CACHE_BYTES, **args}
    engine = Engine(model, max_draft_depth=depth, own_process=True, vllm_args=vllm_args)
    try:
        free_after, _ = torch.cuda.mem_get_info()
        return int(free_before - free_after)
    finally:
        engine.close()
