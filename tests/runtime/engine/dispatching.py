"""What vLLM's own dispatchers of CUDA graphs choose for a plan, set up without a device."""

from types import SimpleNamespace

from tltlab.runtime.engine.vllm.runners import GRAPH_KINDS


def dispatched_kinds(plan, *, uniform_only=False):
    """What vLLM's own dispatcher chooses for each batch size and K that the plan's policy may run, all drafting alike.

    It is set up as on a CUDA device, whose attention takes any batch in a full graph, or with `uniform_only` such as
    is uniform (`AttentionCGSupport`).
    """
    if plan.runner == "V2":
        modes = v2_manager(plan).dispatch
        return {(n, k): GRAPH_KINDS[modes(n, n * (k + 1), k + 1, 0).cg_mode.name] for n, k in plan.may_run}
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    dispatcher = v1_dispatcher(plan, uniform_only=uniform_only)
    found = {}
    for n, k in plan.may_run:
        uniform = GPUModelRunner._is_uniform_decode(k + 1, dispatcher.uniform_decode_query_len, n * (k + 1), n)
        found[n, k] = GRAPH_KINDS[dispatcher.dispatch(n * (k + 1), uniform_decode=uniform)[0].name]
    return found


def v1_dispatcher(plan, *, uniform_only=False):
    """vLLM's `CudagraphDispatcher` for a plan, its keys made as the V1 runner makes them once attention is known."""
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    told = {"cudagraph_mode": "FULL_AND_PIECEWISE", **plan.engine_settings(None)["compilation_config"]}
    told["max_cudagraph_capture_size"] = told["cudagraph_capture_sizes"][-1]
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, **told)
    compilation.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    compilation.post_init_cudagraph_sizes()
    query_len, num_seqs = plan.deepest + 1, plan.max_num_seqs
    support = AttentionCGSupport.UNIFORM_BATCH if uniform_only else AttentionCGSupport.ALWAYS
    engine = {"use_v2_model_runner": False, "max_num_reqs": num_seqs}
    mode = compilation.resolve_cudagraph_mode_and_sizes(support, "attention", query_len, **engine)
    config = SimpleNamespace(compilation_config=compilation, num_speculative_tokens=plan.deepest, lora_config=None)
    config.scheduler_config = SimpleNamespace(max_num_seqs=num_seqs)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    return dispatcher


def v2_manager(plan):
    """vLLM's `CudaGraphManager` for a plan: its candidates, as if all were captured."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    sizes, schedule = plan.capture_sizes, [list(row) for row in plan.schedule] or None
    manager = CudaGraphManager.__new__(CudaGraphManager)
    drafts = SimpleNamespace(num_speculative_tokens_per_batch_size=schedule)
    drafts.uses_dynamic_speculative_decoding = lambda: schedule is not None
    cache = SimpleNamespace(use_kda_recoverssm=False)
    manager.vllm_config = SimpleNamespace(speculative_config=drafts, cache_config=cache)
    manager.vllm_config.num_speculative_tokens = plan.deepest
    graphs = {"cudagraph_capture_sizes": list(sizes), "max_cudagraph_capture_size": sizes[-1]}
    manager.compilation_config = SimpleNamespace(**graphs)
    manager.max_num_reqs = plan.max_num_seqs
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.decode_query_len, manager.varlen_decode = plan.deepest + 1, False
    manager.lora_capture_cases, manager._lora_dispatch_map, manager.ubatch_runner = [0], {}, None
    manager._candidates, manager._capture_descs, manager._graphs_captured = {}, {}, True
    manager._init_candidates()
    return manager
