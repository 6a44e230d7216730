"""What vLLM's own dispatchers of CUDA graphs choose for a plan, set up without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tltlab.runtime.engine.graphs import BatchDepth, GraphPlan, Kind
from tltlab.runtime.engine.vllm.runners import kind_of


def dispatched_kinds(plan: GraphPlan, *, uniform_only: bool = False) -> dict[BatchDepth, Kind]:
    """What vLLM's own dispatcher chooses for each batch size and K that the plan's policy may run, all drafting alike.

    It is set up as on a CUDA device, whose attention takes any batch in a full graph, or with `uniform_only` such as
    is uniform (`AttentionCGSupport`).
    """
    if plan.runner == "V2":
        manager = v2_manager(plan)
        return {
            (n, k): kind_of(manager.dispatch(n, n * (k + 1), k + 1, 0).cg_mode.name) for n, k in plan.may_run
        }  # fmt: skip
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    dispatcher = v1_dispatcher(plan, uniform_only=uniform_only)
    found: dict[BatchDepth, Kind] = {}
    for n, k in plan.may_run:
        uniform = GPUModelRunner._is_uniform_decode(k + 1, dispatcher.uniform_decode_query_len, n * (k + 1), n)
        found[n, k] = kind_of(dispatcher.dispatch(n * (k + 1), uniform_decode=uniform)[0].name)
    return found


def v1_dispatcher(plan: GraphPlan, *, uniform_only: bool = False) -> Any:
    """vLLM's `CudagraphDispatcher` for a plan, its keys made as the V1 runner makes them once attention is known."""
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    told = plan.engine_settings(None)["compilation_config"]
    sizes = told["cudagraph_capture_sizes"]
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        max_cudagraph_capture_size=sizes[-1],
        **{"cudagraph_mode": "FULL_AND_PIECEWISE", **told},
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    compilation.post_init_cudagraph_sizes()
    query_len = plan.deepest + 1
    mode = compilation.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.UNIFORM_BATCH if uniform_only else AttentionCGSupport.ALWAYS,
        "attention",
        query_len,
        use_v2_model_runner=False,
        max_num_reqs=plan.max_num_seqs,
    )
    dispatcher = CudagraphDispatcher(
        SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=query_len - 1,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=plan.max_num_seqs),
        )
    )
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    return dispatcher


def v2_manager(plan: GraphPlan) -> Any:
    """vLLM's `CudaGraphManager` for a plan: its candidates, as if all were captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    sizes, schedule = plan.capture_sizes, [list(row) for row in plan.schedule] or None
    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
            num_speculative_tokens_per_batch_size=schedule,
        ),
        num_speculative_tokens=plan.deepest,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=sizes[-1]
    )
    manager.max_num_reqs = plan.max_num_seqs
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.decode_query_len, manager.varlen_decode = plan.deepest + 1, False
    manager.lora_capture_cases, manager._lora_dispatch_map, manager.ubatch_runner = [0], {}, None
    manager._candidates, manager._capture_descs, manager._graphs_captured = {}, {}, True
    manager._init_candidates()
    return manager
