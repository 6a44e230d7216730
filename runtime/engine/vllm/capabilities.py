"""What the adapter touches in vLLM, and what it can therefore do with a version of it.

`CAPABILITIES` is one table for two checks of the same names: `lacks` asks the vLLM that is imported, `Sources` the
sources of any version, in a wheel or a folder, without running them. `python -m tltlab.runtime.engine.vllm.capabilities
WHEEL ...` writes what wheels have into `versions.json`, and prints the table of the runtime's README.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VERSIONS = Path(__file__).with_name("versions.json")
"""By version the torch it needs, and whether it has each capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something that is done with vLLM.

    It needs every name that it `touches`: "module:Name.member(parameter, ...)", the module below `vllm`. A member may
    be an attribute that only instances have, and a class's parameters are its fields. `without` completes the sentence
    that begins with the version, where one is missing.
    """

    name: str
    touches: tuple[str, ...]
    without: str


def _touches(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names)


CAPABILITIES: Mapping[str, Capability] = {
    capability.name: capability
    for capability in (
        Capability(
            name="policies",
            touches=(
                *_touches(
                    "v1.core.sched.scheduler",
                    *("Scheduler.schedule", "Scheduler._update_after_schedule(scheduler_output)"),
                    *("Scheduler.update_from_output(scheduler_output, model_runner_output)", "Scheduler.requests"),
                    *("Scheduler.update_draft_token_ids(draft_token_ids)", "Scheduler._free_request(request)"),
                    *("Scheduler.add_request(request)", "Scheduler._update_request_as_session(session, update)"),
                    *("Scheduler.running", "Scheduler.waiting", "Scheduler.num_spec_tokens", "Scheduler.block_size"),
                    *("Scheduler.max_num_running_reqs", "Scheduler.dynamic_sd_lookup", "Scheduler.kv_cache_manager"),
                    *("Scheduler.use_v2_model_runner", "Scheduler.reset_prefix_cache"),
                ),
                "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule(scheduler_output)",
                "v1.core.kv_cache_manager:KVCacheManager.block_pool",
                "v1.core.block_pool:BlockPool.get_num_free_blocks",
                "v1.core.sched.output:SchedulerOutput(scheduled_new_reqs, scheduled_cached_reqs, num_scheduled_tokens, "
                "total_num_scheduled_tokens, scheduled_spec_decode_tokens, finished_req_ids, "
                "num_spec_tokens_to_schedule)",
                "v1.core.sched.output:CachedRequestData(resumed_req_ids)",
                *_touches(
                    "v1.request",
                    *("Request._output_token_ids", "Request._all_token_ids", "Request.spec_token_ids"),
                    *("Request.num_output_placeholders", "Request.num_output_tokens", "Request.get_finished_reason"),
                    *("Request.sampling_params", "Request.max_tokens"),
                ),
                "v1.outputs:DraftTokenIds(req_ids, draft_token_ids)",
                "v1.outputs:ModelRunnerOutput(req_ids, req_id_to_index, sampled_token_ids, cudagraph_stats)",
                "config.vllm:VllmConfig.use_v2_model_runner",
                "config.vllm:VllmConfig.num_speculative_tokens",
                "config.parallel:ParallelConfig(data_parallel_index, pipeline_parallel_size)",
                "engine.arg_utils:EngineArgs(scheduler_cls, additional_config, async_scheduling, speculative_config)",
                "v1.engine.core:EngineCore.post_step(model_executed)",
                "v1.engine.core:EngineCore.shutdown",
                "v1.engine.core_client:SyncMPClient.call_utility",
                "config.speculative:SpeculativeConfig(method, model, num_speculative_tokens)",
                "v1.spec_decode.custom_class_proposer:create_custom_proposer",
            ),
            without="policies cannot be attached",
        ),
        Capability(
            name="depths in the V2 runner",
            touches=("v1.worker.gpu.model_runner:ExecuteModelState(num_spec_tokens_to_schedule)",),
            without="the V2 model runner drafts as deep as it was started to, whatever a policy chooses: "
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        Capability(
            name="sound sampling on CPU",
            touches=(
                "v1.sample.rejection_sampler:expand_batch_to_tokens"
                "(x, cu_num_tokens, num_tokens, replace_from, replace_to)",
            ),
            without="the CPU build's sampler cannot be mended: drafts are refused there",
        ),
        Capability(
            name="top-k of nothing on CPU",
            touches=("v1.sample.ops.topk_topp_sampler:apply_top_k_only(logits, k)",),
            without="the CPU build may die of top-k without top-p where an iteration verifies no draft",
        ),
        Capability(
            name="plain iterations",
            touches=(
                *_touches(
                    "v1.worker.gpu_model_runner",
                    *("GPUModelRunner.execute_model(scheduler_output)", "GPUModelRunner.sample_tokens"),
                    *("GPUModelRunner._sample(logits, spec_decode_metadata)", "GPUModelRunner.execute_model_state"),
                    "GPUModelRunner.propose_draft_token_ids(scheduler_output, sampled_token_ids, sampling_metadata, "
                    "hidden_states, sample_hidden_states, aux_hidden_states, spec_decode_metadata, "
                    "common_attn_metadata, slot_mappings)",
                    *("GPUModelRunner.speculative_config", "GPUModelRunner.input_batch"),
                    *("GPUModelRunner.use_async_scheduling", "GPUModelRunner.supports_mm_inputs"),
                    *("GPUModelRunner.uses_mrope", "ExecuteModelState(spec_decode_metadata)"),
                ),
                "v1.worker.gpu_input_batch:InputBatch.num_computed_tokens_cpu",
                "v1.worker.gpu_input_batch:InputBatch.token_ids_cpu",
            ),
            without="iterations without drafts cost a quarter more than without speculation",
        ),
        Capability(
            name="resting draft models",
            touches=(
                "v1.spec_decode.draft_model:DraftModelProposer.max_num_tokens",
                "v1.spec_decode.draft_model:DraftModelProposer.parallel_drafting",
                "v1.spec_decode.draft_model:DraftModelProposer.propose(num_speculative_tokens, target_token_ids, "
                "target_positions, target_hidden_states, next_token_ids, token_indices_to_sample, "
                "common_attn_metadata, sampling_metadata)",
                "v1.attention.backend:CommonAttentionMetadata(query_start_loc, query_start_loc_cpu, seq_lens, "
                "seq_lens_cpu_upper_bound, num_reqs, num_actual_tokens, max_query_len, max_seq_len, "
                "block_table_tensor, slot_mapping, positions, is_prefilling, _num_computed_tokens_cache, "
                "_token_to_req_indices_cache)",
                "v1.attention.backend:CommonAttentionMetadata.replace",
            ),
            without="a draft model runs a pass in iterations without drafts too",
        ),
        Capability(
            name="draft times",
            touches=(
                *_touches(
                    "v1.worker.gpu_model_runner",
                    *("GPUModelRunner.propose_draft_token_ids", "GPUModelRunner.take_draft_token_ids"),
                ),
                "v1.worker.gpu.model_runner:GPUModelRunner.take_draft_token_ids",
                "v1.worker.gpu.model_runner:GPUModelRunner.speculator",
            ),
            without="how long drafting takes is not known, so policies that learn pair choice and time worse",
        ),
        Capability(
            name="traces of servers",
            touches=(
                "v1.engine.utils:CoreEngineProcManager.shutdown(timeout)",
                "v1.engine.utils:CoreEngineProcManager.__init__(vllm_config)",
            ),
            without="'vllm serve' kills its engine cores before their traces are finished: 'tltlab trace repair'",
        ),
        Capability(
            name="metrics",
            touches=_touches(
                "v1.engine.core_client",
                *("AsyncMPClient._call_utility_async(method, engine)", "AsyncMPClient.core_engines"),
                *("AsyncMPClient.engine_ranks_managed", "AsyncMPClient.vllm_config", "AsyncMPClient.resources"),
                "BackgroundResources(output_queue_task)",
            ),
            without="a server's metrics say nothing of its policy",
        ),
        Capability(
            name="environment variables",
            touches=("engine.arg_utils:EngineArgs.create_engine_config",),
            without="TLTLAB_POLICY and TLTLAB_RECORD are not read: pass the engine vllm_options(...)",
        ),
        Capability(
            name="weight updates",
            touches=(
                *_touches(
                    "distributed.weight_transfer.factory",
                    *("WeightTransferEngineFactory._registry", "WeightTransferEngineFactory.register_engine"),
                    "WeightTransferEngineFactory.create_engine(config, vllm_config, device, model)",
                ),
                *_touches(
                    "distributed.weight_transfer.base",
                    *("WeightTransferEngine.start_weight_update", "WeightTransferEngine.receive_weights(update_info)"),
                    "WeightTransferEngine.finish_weight_update",
                    *("WeightTransferInitInfo", "WeightTransferUpdateInfo"),
                ),
                "config.weight_transfer:WeightTransferConfig(backend)",
                "model_executor.model_loader.reload:initialize_layerwise_reload",
                "model_executor.model_loader.reload:finalize_layerwise_reload",
                "model_executor.model_loader.reload.layerwise:get_layerwise_info",
                *_touches(
                    "entrypoints.llm",
                    *("LLM.init_weight_transfer_engine", "LLM.start_weight_update", "LLM.update_weights"),
                    "LLM.finish_weight_update",
                ),
            ),
            without="engines cannot take new weights from a trainer of ours: 'tltlab train' needs another version",
        ),
        Capability(
            name="weight versions",
            touches=("entrypoints.llm:LLM.finish_weight_update(weight_version)",),
            without="vLLM is not told which version its new weights are",
        ),
        Capability(
            name="drafters' weights",
            touches=("entrypoints.llm:LLM.start_draft_weight_update",),
            without="a learned drafter keeps the weights that it was started with",
        ),
        Capability(
            name="weights over NCCL and IPC",
            touches=(
                "distributed.weight_transfer.base:WeightTransferEngine.set_weight_update_target",
                "distributed.weight_transfer.ipc_engine:IPCTrainerWeightTransferEngine.trainer_init",
                "distributed.weight_transfer.ipc_engine:IPCTrainerInitInfo(rank, packed, packed_buffer_size_bytes)",
                "distributed.weight_transfer.nccl_engine:NCCLTrainerWeightTransferEngine.trainer_init",
                "distributed.weight_transfer.nccl_engine:NCCLTrainerInitInfo(rank, packed_buffer_size_bytes)",
            ),
            without="weights go through memory that processes share, or Ray's, not from device to device",
        ),
        Capability(
            name="hidden states",
            touches=(
                "v1.worker.gpu_model_runner:ExecuteModelState(hidden_states, aux_hidden_states)",
                "v1.worker.gpu_model_runner:GPUModelRunner.query_start_loc",
                "v1.worker.gpu_model_runner:GPUModelRunner.positions",
                "v1.worker.gpu.model_runner:ExecuteModelState(input_batch, hidden_states, aux_hidden_states)",
                "v1.worker.gpu.model_runner:GPUModelRunner.execute_model_state",
                "v1.worker.gpu.input_batch:InputBatch(query_start_loc_np, positions, req_ids, num_reqs)",
                "v1.worker.worker_base:WorkerWrapperBase.rpc_rank",
            ),
            without="drafters cannot be trained on what an engine computes",
        ),
        Capability(
            name="graph counters",
            touches=(
                "engine.arg_utils:EngineArgs(cudagraph_metrics)",
                "compilation.cuda_graph:CUDAGraphStat(runtime_mode, num_padded_tokens)",
                "v1.worker.gpu.model_runner:ExecuteModelState(cudagraph_stats)",
            ),
            without="traces do not say which CUDA graphs of the V2 model runner ran",
        ),
        Capability(
            name="graph plans",
            touches=(
                "v1.cudagraph_dispatcher:CudagraphDispatcher.initialize_cudagraph_keys",
                "v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch(num_tokens, uniform_decode)",
                "v1.cudagraph_dispatcher:CudagraphDispatcher.get_capture_descs",
                "v1.worker.gpu_model_runner:GPUModelRunner._is_uniform_decode",
                "v1.worker.gpu_model_runner:GPUModelRunner.capture_model",
                "v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
                "v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
                "v1.worker.gpu.cudagraph_utils:CudaGraphManager._capture_descs",
                "v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
                "config.compilation:CompilationConfig.resolve_cudagraph_mode_and_sizes"
                "(min_cg_support, min_cg_attn_backend, uniform_decode_query_len, use_v2_model_runner, max_num_reqs)",
            ),
            without="which CUDA graphs a policy's batches run in cannot be told",
        ),
        Capability(
            name="own engines",
            touches=(
                "engine.arg_utils:EngineArgs(kv_cache_memory_bytes, logprobs_mode, generation_config, "
                "disable_log_stats, weight_transfer_config)",
                "sampling_params:SamplingParams(flat_logprobs, extra_args, output_kind, ignore_eos)",
                *_touches(
                    "v1.engine.output_processor",
                    "OutputProcessor.request_states",
                    "RequestState.make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason)",
                    "RequestState.external_req_id",
                ),
                "v1.engine.llm_engine:LLMEngine.abort_request",
                "v1.engine.llm_engine:LLMEngine.add_request(request_id, prompt, params)",
                "v1.engine.core_client:SyncMPClient.outputs_queue",
                "v1.engine.core_client:SyncMPClient.utility_results",
                "v1.engine.core_client:BackgroundResources(engine_manager)",
                "v1.engine.utils:CoreEngineProcManager.processes",
                "v1.engine.exceptions:EngineDeadError",
            ),
            without="tltlab's own Engine does not run; policies and recordings do",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class _Touch:
    module: str
    path: tuple[str, ...]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> _Touch:
        match = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?", text)
        assert match is not None, text
        module, path, parameters = match.groups()
        return cls(module, tuple(path.split(".")), tuple(re.split(r",\s*", parameters)) if parameters else ())


def missing(capability: str) -> str:
    """Of the vLLM of this process: the sentence of what it lacks for a capability, and what goes without; "" for
    nothing. Imports the modules that the capability touches."""
    import vllm

    return _sentence(str(vllm.__version__), CAPABILITIES[capability], lacks(capability))


def _sentence(version: str, capability: Capability, lacking: Sequence[str]) -> str:
    return f"vLLM {version} has no {lacking[0].replace(':', '.')}: {capability.without}" if lacking else ""


@cache
def lacks(capability: str) -> tuple[str, ...]:
    """What a capability touches that the vLLM of this process does not have."""
    return tuple(touch for touch in CAPABILITIES[capability].touches if not _imported_has(_Touch.of(touch)))


def _imported_has(touch: _Touch) -> bool:
    try:
        found: Any = import_module(f"vllm.{touch.module}")
    except ImportError:
        return False
    for name in touch.path:
        if not hasattr(found, name):
            return not touch.parameters and inspect.isclass(found) and name in _instance_attributes(found)
        found = getattr(found, name)
    if not touch.parameters:
        return True
    names = set(inspect.signature(found).parameters)
    return names.issuperset(touch.parameters) or (
        inspect.isclass(found) and _instance_attributes(found).issuperset(touch.parameters)
    )


def _instance_attributes(cls: type) -> set[str]:
    """Names that instances have: fields, and what methods give or take of an object."""
    found: set[str] = set()
    for base in cls.__mro__:
        found.update(inspect.get_annotations(base))
        for member in base.__dict__.values():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            found.update(code.co_names if code is not None else ())
    return found


class Sources:
    """vLLM's sources: a wheel, or the folder that `vllm` is in. Nothing of them is run."""

    def __init__(self, path: Path) -> None:
        self._root: Any = zipfile.Path(path) if path.is_file() else path
        self._modules: dict[str, Mapping[str, ast.AST]] = {}
        self._classes: dict[ast.ClassDef, Mapping[str, ast.AST]] = {}

    @classmethod
    def installed(cls) -> Sources | None:
        """Those of the vLLM that an import would find, which is not imported; None without one."""
        spec = find_spec("vllm")
        return cls(Path(spec.origin).parents[1]) if spec is not None and spec.origin else None

    def version(self) -> str:
        """The version that the sources give themselves; "" where they give none."""
        path = self._root / "vllm" / "_version.py"
        match = (
            re.search(r"^__version__ = version = ['\"]([^'\"+]+)", path.read_text(), re.M) if path.is_file() else None
        )
        return match[1] if match else ""

    def torch(self) -> str:
        """The torch that a wheel needs; "" where it is not told."""
        for path in self._root.iterdir():
            if re.fullmatch(r"vllm(_cpu)?-.*\.dist-info", path.name):
                match = re.search(r"^Requires-Dist: torch==([\d.]+)", (path / "METADATA").read_text(), re.M)
                return match[1] if match else ""
        return ""

    def lacks(self, capability: str) -> tuple[str, ...]:
        """What a capability touches that is not in these sources."""
        return tuple(touch for touch in CAPABILITIES[capability].touches if not self.has(touch))

    def missing(self, capability: str) -> str:
        """As the function of this name, of these sources."""
        return _sentence(self.version(), CAPABILITIES[capability], self.lacks(capability))

    def has(self, touch: str) -> bool:
        """Whether what is touched is there."""
        wanted = _Touch.of(touch)
        found = self._named(wanted.module, wanted.path[0])
        if found is None:
            return False
        module, node = found
        if len(wanted.path) > 1:
            if not isinstance(node, ast.ClassDef):
                return False
            member = self._member(module, node, wanted.path[1])
            if member is None or not wanted.parameters:
                return member is not None
            node = member
        names = _parameters(node)
        if isinstance(node, ast.ClassDef):
            names = _parameters(self._member(module, node, "__init__"))
            names.update(name for name in wanted.parameters if self._member(module, node, name) is not None)
        return names.issuperset(wanted.parameters)

    def _member(self, module: str, cls: ast.ClassDef, name: str) -> ast.AST | None:
        """What a class or one of its bases defines by a name, in its body or on `self`."""
        if cls not in self._classes:
            members: dict[str, ast.AST] = {}
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    members[node.attr] = node
            for statement in cls.body:
                members.update(dict.fromkeys(_defined(statement), statement))
            self._classes[cls] = members
        if name in self._classes[cls]:
            return self._classes[cls][name]
        for base in cls.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self._named(module, plain.id) if isinstance(plain, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not cls:
                member = self._member(found[0], found[1], name)
                if member is not None:
                    return member
        return None

    def _named(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """What a module calls by a name, and the module that defines it."""
        node = self._module(module).get(name)
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (module, node)
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        package = module.split(".") if self._is_package(module) else module.split(".")[:-1]
        if node.level:
            source = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        elif (node.module or "").startswith("vllm."):
            source = (node.module or "").removeprefix("vllm.")
        else:
            return module, node
        return self._named(source, alias.name)

    def _file(self, module: str) -> Any:
        path = self._root / "vllm"
        for part in module.split("."):
            path = path / part
        return path

    def _is_package(self, module: str) -> bool:
        return bool((self._file(module) / "__init__.py").is_file())

    def _module(self, module: str) -> Mapping[str, ast.AST]:
        """A module's names, also those that only some platforms define."""
        if module not in self._modules:
            base = self._file(module)
            path = base / "__init__.py" if self._is_package(module) else base.parent / f"{base.name}.py"
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            names: dict[str, ast.AST] = {}
            for statement in _statements(ast.parse(text).body):
                names.update(dict.fromkeys(_defined(statement), statement))
            self._modules[module] = names
        return self._modules[module]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _defined(statement: ast.AST) -> list[str]:
    """The names that a statement gives a meaning to."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    return []


def _parameters(node: ast.AST | None) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def has_each(sources: Sources) -> dict[str, bool]:
    """Whether these sources have each capability."""
    return {name: not sources.lacks(name) for name in CAPABILITIES}


def table(versions: Mapping[str, Any]) -> str:
    """The README's table of what `VERSIONS` holds, the newest version first."""
    lines = ["| vLLM | torch | all but |", "|---|---|---|"]
    for version in sorted(versions, key=_numbers, reverse=True):
        lacking = [name for name, has in versions[version]["has"].items() if not has]
        lines.append(f"| {version} | {versions[version]['torch']} | {', '.join(lacking)} |")
    return "\n".join(lines) + "\n"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def main(paths: Sequence[str]) -> None:
    """Hold wheels, or folders that a vLLM is installed in, against the table; `VERSIONS` and what goes into the README.

    What was found of other versions before is kept as long as the capabilities are the same.
    """
    before = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else {}
    versions = {v: row for v, row in before.items() if row["has"].keys() == CAPABILITIES.keys()}
    for sources in (Sources(Path(path)) for path in paths):
        versions[sources.version()] = {"torch": sources.torch(), "has": has_each(sources)}
    VERSIONS.write_text(json.dumps({v: versions[v] for v in sorted(versions, key=_numbers)}, indent=1) + "\n")
    sys.stdout.write(table(versions))


if __name__ == "__main__":
    main(sys.argv[1:])
