"""Which kind of CUDA graph vLLM runs iterations in: asked of its dispatchers, which need no GPU, and of engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tltlab.runtime.engine.graphs import BatchDepth, GraphPlan, Kind, Runner

_KINDS: Mapping[str, Kind] = {"FULL": "full", "PIECEWISE": "piecewise", "NONE": "eager"}


def kind_of(runtime_mode: str) -> Kind:
    """vLLM's name of a runtime mode in ours.

    >>> kind_of("NONE")
    'eager'
    """
    return _KINDS[runtime_mode]


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


def keep_captured_bytes(runner: Any) -> None:
    """Have model runners of this class keep what their `capture_model` returns; call it before the engine starts.

    vLLM 0.32 logs that number ("Graph capturing finished in ... secs, took ... GiB") and forgets it.
    """
    capture = runner.capture_model
    if hasattr(capture, "kept_by_tltlab"):
        return

    @wraps(capture)
    def kept(self: Any, *args: Any, **kwargs: Any) -> int:
        self.tltlab_captured_bytes = taken = int(capture(self, *args, **kwargs))
        return taken

    kept.kept_by_tltlab = True  # type: ignore[attr-defined]
    runner.capture_model = kept


def captured_bytes(worker: Any) -> int | None:
    """Bytes of device memory that a vLLM worker's graph capture took; None where nothing was captured or kept."""
    return getattr(worker.model_runner, "tltlab_captured_bytes", None) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraphs:
    """The CUDA graphs of one engine, as its model runner has them; `mode` is vLLM's, "NONE" where there are none.

    `full` has (tokens, K) of each, K None where it serves requests of any lengths, `piecewise` the tokens of each,
    ascending. `num_bytes` is the device memory that capture took, None where nothing was measured.
    """

    runner: Runner
    mode: str
    full: tuple[tuple[int, int | None], ...] = ()
    piecewise: tuple[int, ...] = ()
    num_bytes: int | None = None


def captured_graphs(worker: Any) -> CapturedGraphs:
    """What a vLLM worker has captured."""
    runner = worker.model_runner
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        by_kind = {kind_of(mode.name): descs for mode, descs in dispatcher.get_capture_descs()}
        full = {(d.num_tokens, d.num_tokens // d.num_reqs - 1 if d.uniform else None) for d in by_kind.get("full", ())}
        name, mode = "V1", dispatcher.cudagraph_mode
    else:
        manager = runner.cudagraph_manager
        by_kind = {kind_of(mode.name): descs for mode, descs in manager._capture_descs.items()}
        lengths = [(d.num_tokens, d.uniform_token_count) for d in by_kind.get("full", ())]
        full = {(tokens, None if each is None else each - 1) for tokens, each in lengths}
        name, mode = "V2", manager.cudagraph_mode
    return CapturedGraphs(
        runner="V1" if name == "V1" else "V2",
        mode=mode.name,
        full=tuple(sorted(full, key=lambda graph: (graph[0], graph[1] or 0))),
        piecewise=tuple(sorted({d.num_tokens for d in by_kind.get("piecewise", ())})),
        num_bytes=captured_bytes(worker),
    )
