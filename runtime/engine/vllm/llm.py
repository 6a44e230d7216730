"""Start of a vLLM engine in this process with a policy attached, and calls to the control beside its scheduler."""

import gc
import os
import pickle
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from tltlab.errors import ConfigError, RunError, one_line
from tltlab.records import Fields, Json
from tltlab.runtime.engine.generation import FollowUp, GenerationRequest, GenerationResponse
from tltlab.runtime.engine.recording import finish_reason_of
from tltlab.runtime.engine.weights import BucketSlots, MappedMemory, WeightBucket, write_adapter
from tltlab.runtime.ray.scratch import scratch_folder

from . import capture, missing, on_cpu, replaced, starting, uncompiled
from .capture import Sink
from .options import SCHEDULER, missing_plugin
from .sampling import set_rates
from .transfer import LOCAL_BACKEND


@contextmanager
def _without_collection() -> Iterator[None]:
    """Within the block, no garbage is collected: collection takes a third of the time of importing vLLM."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def start(
    model: str,
    *,
    attachment: Fields,
    planned: Fields,
    on_host: bool,
    seed: int,
    vllm_args: Fields,
) -> tuple[Any, bool]:
    """Start a `vllm.LLM` with the policy scheduler; return it, and True if it takes drafts. ConfigError if it fails.

    `vllm_args` override the `planned` arguments and the defaults here, those of `compilation_config` one by one. With
    `on_host` drafts are made next to the scheduler too, which only the V1 model runner takes. With a
    tensor_parallel_size above 1 the model runs in as many processes below the engine core's. `enable_sleep_mode` is
    ignored on CPU, where `sleep` does nothing. The process's environment, `sys.path` and torch's settings of
    compilation are restored; vLLM's own modules stay patched (`plugin`).
    """
    with starting():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if on_host and "speculative_config" in planned:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        args = {**planned, **engine_arguments(seed, vllm_args)}
        if {"compilation_config"} <= planned.keys() & vllm_args.keys():
            args["compilation_config"] = {**planned["compilation_config"], **vllm_args["compilation_config"]}
        args["additional_config"] = {**args.get("additional_config", {}), "tltlab": dict(attachment)}
        with uncompiled(on_cpu() and args["enforce_eager"]):
            llm = _build(model, args)
        config = llm.llm_engine.vllm_config
        # Read within `starting`: vLLM reads its environment variable at each access.
        return llm, not config.use_v2_model_runner


def engine_arguments(seed: int, vllm_args: Fields) -> Json:
    """Return vLLM's arguments with tltlab's defaults; set the environment variables that go with them."""
    for capability in ("policies", "own engines"):
        if without := missing(capability):
            raise ConfigError(without)
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if vllm_args.get(name, 1) != 1:
            raise ConfigError(f"{name}={vllm_args[name]}: an Engine is one scheduler with one batch; start several")
    cpu = on_cpu()
    args: Json = {
        "dtype": "float32" if cpu else "bfloat16",
        "enforce_eager": cpu,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        # Iterations report their CUDA graph: two numbers and a word each.
        "cudagraph_metrics": True,
        "seed": seed,
    }
    if cpu:
        # vLLM's own default takes 92 % of the machine's memory.
        args["kv_cache_memory_bytes"] = 256 << 20
    args |= dict(vllm_args)
    if args.get("tensor_parallel_size", 1) > 1:
        # Inside a Ray placement group vLLM would start Ray actors of its own, which find no GPU left.
        args.setdefault("distributed_executor_backend", "mp")
        if cpu:
            # vLLM would bind each rank to its own NUMA node, and refuses to start where there are fewer nodes.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if cpu:
        # Sleep does nothing on CPU, and vLLM refuses the setting.
        args.pop("enable_sleep_mode", None)
    return args


def _build(model: str, args: Fields):
    import vllm

    if vllm.envs.VLLM_PLUGINS is not None and "tltlab" not in vllm.envs.VLLM_PLUGINS:
        raise ConfigError(f"vLLM does not load tltlab's plugin: {missing_plugin()}")
    weight_transfer = {}
    if not missing("weight updates"):
        weight_transfer["weight_transfer_config"] = vllm.config.WeightTransferConfig(backend=LOCAL_BACKEND)
    try:
        with _rendezvous_in_scratch():
            llm = vllm.LLM(model=model, scheduler_cls=SCHEDULER, **weight_transfer, **args)
    except (ValueError, OSError, TypeError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"vLLM cannot start on {model}: {one_line(error)[:500]}") from error
    if args.get("async_scheduling") and not llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
        llm.llm_engine.engine_core.shutdown()
        raise ConfigError("vLLM turns asynchronous scheduling off here: leave async_scheduling out")
    if weight_transfer:
        llm.init_weight_transfer_engine({"init_info": {}})
    return llm


def _rendezvous_in_scratch() -> AbstractContextManager[None]:
    """Within the block, engines of this process put the file of torch's process group into the run's scratch folder.

    vLLM puts it into the temporary folder, and leaves it there.
    """
    from vllm.v1.executor import uniproc_executor

    name = "get_file_store_init_method"
    # Releases without that function have the group meet at a port.
    if not hasattr(uniproc_executor, name):
        return nullcontext()
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or scratch_folder()
    return replaced(uniproc_executor, name, lambda: f"file://{folder}/vllm_dist_{uuid4().hex}")


def running(llm) -> AbstractContextManager[None]:
    """Within the block, the engine generates; an eager engine on the CPU compiles nothing meanwhile."""
    config = llm.llm_engine.vllm_config
    return uncompiled(config.device_config.device_type == "cpu" and config.model_config.enforce_eager)


def _core(llm):
    return llm.llm_engine.engine_core.engine_core


def _worker(llm):
    """Return the worker that runs the model, where it is in this process; else None."""
    return getattr(_core(llm).model_executor, "driver_worker", None)


def scheduler_of(llm):
    return _core(llm).scheduler


def land(llm) -> None:
    """Wait for iterations in flight: they belong to the rollout that ends, or to the weights that are replaced.

    The next step of the engine returns what they gave.
    """
    core, given = _core(llm), []
    while core.batch_queue:
        future, scheduled, _ = core.batch_queue.pop()
        given.append(core.scheduler.update_from_output(scheduled, future.result()))
    if not given:
        return
    step = core.step_fn

    def landed() -> tuple[Any, bool]:
        if len(given) == 1:
            core.step_fn = step
        return given.pop(0), False

    core.step_fn = landed


def keep_drafts_at(llm, rates: Sequence[float]) -> None:
    """Set acceptance rates by draft position, in an engine of this process that `synthetic_rejection` started."""
    set_rates(_worker(llm).model_runner.rejection_sampler, rates)


def start_capture(llm, sink: Sink | bytes | None, max_bytes: int) -> None:
    """Pass every ended request with its hidden states to `sink`, in the model's process; None stops the capture.

    Running requests hold at most `max_bytes` of states. ConfigError where the sink cannot be sent there, and where the
    engine verifies fewer tokens than were scheduled.
    """
    if sink is not None:
        if without := missing("hidden states"):
            raise ConfigError(without)
        if getattr(llm.llm_engine.vllm_config.speculative_config, "enable_adaptive_verification", False):
            raise ConfigError("hidden states cannot be captured with enable_adaptive_verification: leave it out")
        if _worker(llm) is None:
            try:
                sink = pickle.dumps(sink)
            except Exception as error:  # objects in the sink may raise anything
                raise ConfigError(
                    "the engine's model runs in a process of its own, and the sink, which must go there, cannot: "
                    f"{error}"
                ) from error
    capture.start_capture(_core(llm), sink, max_bytes)


def on_rank_0(llm, function: Callable[[Any], Any]):
    """Return `function(worker)` of the model's rank 0; the other ranks compute the same."""
    return _core(llm).model_executor.collective_rpc(function)[0]


def reseed(llm, seed: list[int]) -> None:
    """Seed all random generators of this process and of the model's workers; all ranks draw the same tokens."""
    _seed_process(None, seed)
    _core(llm).model_executor.collective_rpc(_seed_process, args=(seed,))


def _seed_process(worker, seed: list[int]) -> None:
    """Seed the generators of this process: the V1 runner draws on its device, the V2 runner seeds from numpy."""
    for_torch, for_numpy, for_python = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()
    torch.manual_seed(for_torch % 2**63)
    np.random.seed(for_numpy % 2**32)
    random.seed(for_python)


def rng_state():
    """Return the random states that tokens are drawn from, see `_seed_process`."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all(), np.random.get_state()


def set_rng_state(state) -> None:
    cpu, cuda, numpy = state
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(cuda)
    np.random.set_state(numpy)


def client_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that vLLM raises for refused requests: since 0.28 some are no ValueError."""
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


def sampling_params(request: GenerationRequest, defaults: Mapping[str, float]):
    """Sampling settings of one request, with its key, log-probs and final output only.

    Settings are its own, else the `defaults`, by vLLM's names. ConfigError for settings that vLLM refuses.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    of_request: Json = {name: value for name in defaults if (value := getattr(request, name)) is not None}
    if request.stop_token_ids:
        of_request["stop_token_ids"] = list(request.stop_token_ids)
    try:
        return SamplingParams(
            **{**defaults, **of_request},
            max_tokens=request.max_response_tokens,
            ignore_eos=request.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"tltlab": list(request.key)},
        )
    except client_errors() as error:
        raise ConfigError(f"request {request.key}: {error}") from error


def response(
    request: GenerationRequest, output, t_finish: float, t_first_token: float, turn: FollowUp | None = None
) -> GenerationResponse:
    """Return the response to a request, the `turn` of a conversation if it is not the first."""
    return GenerationResponse(
        key=request.key,
        token_ids=list(output.token_ids),
        logprobs=list(output.logprobs.logprobs) if output.logprobs is not None else [],
        finish_reason=finish_reason_of(output.finish_reason, len(output.token_ids)),
        t_first_token=t_first_token,
        t_finish=t_finish,
        t_submit=0.0 if turn is None else turn.submit_s,
        tool_s=None if turn is None else turn.tool_s,
        observed=() if turn is None else turn.observed,
    )


def add_request(llm, name: str, request: GenerationRequest, params, adapter=None) -> None:
    """Add a request to the engine, for the model with `adapter`, a LoRARequest.

    ConfigError where vLLM refuses it; all running requests are then aborted.
    """
    try:
        llm.llm_engine.add_request(name, {"prompt_token_ids": request.prompt_token_ids}, params, lora_request=adapter)
    except client_errors() as error:
        abort(llm)
        raise ConfigError(f"request {request.key}: {error}") from error


def abort(llm, names: Container[str] | None = None) -> Json:
    """Abort unfinished requests, all or those of `names`; return their outputs by name, with finish_reason "abort"."""
    from vllm.v1.engine import FinishReason

    engine = llm.llm_engine
    outputs: Json = {}
    for state in list(engine.output_processor.request_states.values()):
        if names is not None and state.external_req_id not in names:
            continue
        request_output = state.make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )
        outputs[state.external_req_id] = request_output.outputs[0]
    engine.abort_request(list(outputs))
    return outputs


class WeightUpdates:
    """Updates of an engine's weights, in parts and in vLLM's weight-update sessions.

    From `start` to `finish` the model is half loaded. It stays so where a transfer is cut off or vLLM refuses a part:
    `unusable` then has the reason, empty otherwise, and `refused` is vLLM's error. `version` was loaded last.
    """

    def __init__(self, llm) -> None:
        self.unusable = ""
        self.refused: RunError | None = None
        self.version = ""
        self.adapter: Any = None
        """The LoRARequest of requests."""
        self._llm = llm

    def join(self, way: str, init_info: Fields) -> None:
        """Join a trainer's group of vLLM's backend `way`; `init_info` comes from its `transfer.DeviceSender`."""
        self._llm.init_weight_transfer_engine({"init_info": {"backend": way, "info": dict(init_info)}})

    def start(self, *, draft: bool = False) -> None:
        """Begin a weight update, of the learned drafter with `draft`. RunError where vLLM cannot."""
        if without := missing("drafters' weights" if draft else "weight updates"):
            raise RunError(without)
        land(self._llm)
        self.unusable = "it has only a part of its new weights: their transfer was cut off"
        with self._refusing():
            self._llm.start_draft_weight_update() if draft else self._llm.start_weight_update()

    def load(self, **update) -> None:
        """Load a part as `transfer.local_weight_transfer` does. RunError for names and shapes of another model."""
        with self._refusing():
            self._llm.update_weights({"update_info": update})

    def finish(self, version: str) -> None:
        """End the update and drop cached prefixes of the old weights. RunError where a layer is incomplete."""
        with self._refusing():
            # vLLM before 0.27 takes no version of the weights.
            self._llm.finish_weight_update(*(() if missing("weight versions") else (version,)))
        self._llm.reset_prefix_cache()
        self.unusable, self.version = "", version

    def load_all(self, weights: Iterable[tuple[str, torch.Tensor]], version: str, *, draft: bool = False) -> None:
        """Load weights of this process, through shared memory: other processes may have the model.

        ConfigError for no weights, RunError as above.
        """
        named = list(weights)
        if not named:
            raise ConfigError("a weight update needs weights, got none")
        self.start(draft=draft)
        with closing(BucketSlots.fit(tensor for _, tensor in named)) as slots:
            for bucket in slots.filled(named):
                self.load(bucket=asdict(bucket))
        self.finish(version)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)[:300]}"
            self.unusable = f"vLLM cannot load these weights and is left with half of them ({why})"
            self.refused = RunError(self.unusable)
            raise self.refused from error


class AdapterUpdates(WeightUpdates):
    """Updates of the LoRA adapters of a policy whose base, `model`, stands still: vLLM loads them as it loads any.

    An update's buckets hold peft's tensors. Requests are for the base before the first update. Draft weights go by
    vLLM's sessions.
    """

    def __init__(self, llm, model: str, alpha: int):
        super().__init__(llm)
        self._model, self._alpha = model, alpha
        self._folder = Path(scratch_folder("lora"))
        self._received: dict[str, torch.Tensor] | None = None

    def start(self, *, draft: bool = False) -> None:
        self._received = None if draft else {}
        if draft:
            super().start(draft=True)
        else:
            self.unusable = "it has only a part of its new adapters: their transfer was cut off"

    def load(self, **update) -> None:
        if self._received is None:
            super().load(**update)
            return
        with self._refusing():
            tensors = MappedMemory().tensors(WeightBucket(**update["bucket"]))
            self._received |= {name: tensor.clone() for name, tensor in tensors}

    def finish(self, version: str) -> None:
        if self._received is None:
            super().finish(version)
            return
        from vllm.lora.request import LoRARequest

        land(self._llm)
        with self._refusing():
            write_adapter(self._folder, self._received, self._alpha, self._model)
            self._llm.llm_engine.add_lora(LoRARequest("policy", 1, str(self._folder), load_inplace=True))
        self.adapter = LoRARequest("policy", 1, str(self._folder))
        self._llm.reset_prefix_cache()
        self.unusable, self.version = "", version
