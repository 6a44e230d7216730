"""tltlab's part in every vLLM process, loaded by vLLM as a `vllm.general_plugins` entry point.

`_CHANGES` lists the changes to vLLM's own modules, which last as long as the process. Changes that a version of vLLM
does not support are left out (`CAPABILITIES`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tltlab.errors import ConfigError, one_line
from tltlab.runtime.engine.guard import FAULTS, notify

from . import CALL, OPTIONS, POLICY, RECORD, VARIABLES, guarded_call, has_option, missing, replacing
from .late import schedule_host_drafts, take_late_drafts
from .runners import bypass_speculation, keep_captured_bytes, model_runners, time_drafting
from .sampling import (
    fix_speculative_sampling,
    fix_top_k_without_drafts,
    sample_beside_drafts,
    speculative_sampling_is_sound,
)
from .transfer import register_backend

if TYPE_CHECKING:
    # Import policies where there is one to follow, not in every process of vLLM.
    from .options import Variables

GRACE_S = 60.0
"""Most seconds that a server at its end waits for an engine core to finish its trace."""

GOT = "tltlab got "
"""Prefix of a front end's additions to the names of requests that it aborts, see `_delivered_tokens`."""


def register() -> None:
    """Apply the changes in `_CHANGES`. The entry point: safe to call twice, and raises nothing."""
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
        except FAULTS as error:  # the program must start in any case
            without = f"{capability}: {type(error).__name__}: {error}"
        if without:
            logger.warning("tltlab: %s", without)


def follow_variables() -> None:
    """Make `EngineArgs` configure every engine by the environment variables, and print a line on the result.

    `LLM`, `AsyncLLM` and `vllm serve` all use it. Settings that cannot be followed are left out and the line has the
    reason: the policy alone, or all. It ends the program only if TLTLAB_OPTIONS has `strict`.
    """
    from vllm.engine.arg_utils import EngineArgs

    @replacing(EngineArgs, "create_engine_config")
    def create_engine_config(stock, self, *args, **kwargs):
        make = partial(stock, self, *args, **kwargs)
        if not any(os.environ.get(name) for name in VARIABLES):
            return make()
        # Several front ends of one server make the same configuration again for themselves.
        quiet = getattr(self, "_api_process_count", 1) > 1 and self._api_process_rank >= 0
        return _configuration(self, make, (lambda _: None) if quiet else notify)


def _configuration(engine_args, make: Callable[[], Any], report: Callable[[str], None]):
    """Return the configuration that `make` makes of the arguments, with as much of the environment's as is possible."""
    environments = [dict(os.environ)]
    if os.environ.get(POLICY) and os.environ.get(RECORD):
        # A wrong policy must not lose the trace.
        environments.append({name: value for name, value in os.environ.items() if name != POLICY})
    faults: list[str] = []
    for environment in environments:
        before = vars(engine_args).copy()
        try:
            from .options import Variables

            variables = Variables.read(environment)
            if variables is None:
                return make()
            _check_arguments(engine_args, variables)
            options = variables.engine_options(engine_args.async_scheduling, engine_args.speculative_config)
            for name, value in options.items():
                _set(engine_args, name, value)
            on_host = options["additional_config"]["tltlab"]["host_drafts"]
            if "speculative_config" in options and (on_host or missing("depths in the V2 runner")):
                # The V2 runner keeps a learned drafter's drafts on the device, out of reach of the other drafters.
                os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
            config = make()
            exceptions = _check_configuration(config, variables)
        except FAULTS as error:
            vars(engine_args).update(before)
            if "VLLM_USE_V2_MODEL_RUNNER" not in environment:
                os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
            if _strict():
                raise
            faults.append(_one_line(error))
            continue
        sentence = f"{variables}; not the policy: {faults[0]}" if faults else f"{variables}{exceptions}"
        report(f"the engine of {config.model_config.model} {sentence}")
        return config
    config = make()
    report(f"nothing is done for the engine of {config.model_config.model}: {'; '.join(dict.fromkeys(faults))}")
    return config


def _strict() -> bool:
    try:
        from .options import Variables

        return Variables.read_options(os.environ.get(OPTIONS, "")).strict
    except FAULTS:  # the options, or the code that reads them, may be broken
        return '"strict": true' in os.environ.get(OPTIONS, "")


def _one_line(error: BaseException) -> str:
    text = one_line(error)[:400]
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _check_arguments(engine_args, variables: Variables) -> None:
    """Raise ConfigError where the program itself has set something else."""
    if without := missing("policies"):
        raise ConfigError(without)
    if "tltlab" in (engine_args.additional_config or {}):
        raise ConfigError("its program gives it options of tltlab's itself")
    if variables.record is not None:
        folder = next(each for each in Path(variables.record).parents if each.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot record to {variables.record}: {folder} is not a folder to write to")
    if variables.policy is None:
        return
    if any(getattr(engine_args, name, None) for name in ("spec_method", "spec_model")):
        raise ConfigError("its program speculates by itself, without the speculative_config that a policy needs")


def _set(engine_args, name: str, value) -> None:
    """Set an argument, merging dictionaries; ConfigError where the program has set it to something else."""
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


def _check_configuration(config, variables: Variables) -> str:
    """Return the end of the line: the requests that a policy does not draft for, "" without drafts.

    ConfigError for an engine that could not start, or whose ranks would each decide for themselves.
    """
    from .options import Attachment, check_engine

    if config.model_config.runner_type != "generate":
        raise ConfigError("it pools and generates nothing")
    attachment = Attachment.of_engine(config)
    check_engine(config, attachment, plugged_in=True, sound=speculative_sampling_is_sound())
    if variables.record is not None and attachment.record is None:
        raise ConfigError("the first of its tensor-parallel ranks records")
    overlapped, speculates = bool(config.scheduler_config.async_scheduling), config.speculative_config is not None
    on_device = speculates and getattr(config, "use_v2_model_runner", False)
    attachment.control(overlapped=overlapped, on_host=not on_device)  # Refuses a policy that the engine cannot run.
    if variables.policy is None or not speculates:
        return ""
    return "; requests with min_p or logit_bias are decoded plainly, and so are sampled requests with a seed"


def attach() -> None:
    """Finish a recording before its engine core ends, and ask no drafts of workers that draft nothing. vLLM's own
    schedulers are recorded where an engine's settings request a recording and no policy (`record_only`).
    """
    from vllm.entrypoints.llm import LLM
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.output_processor import OutputProcessor

    EngineCore.tltlab = True
    schedule_host_drafts()

    @replacing(EngineCore, "__init__")
    def begin(stock, self, *args, **kwargs) -> None:
        stock(self, *args, **kwargs)
        if hasattr(self.scheduler, "draft_late"):
            self.scheduler.draft_late(self)

    @replacing(EngineCore, "post_step")
    def post_step(stock, self, model_executed: bool) -> None:
        # Asking costs a message to each rank and back.
        if not getattr(self.scheduler, "drafts_here_alone", False):
            stock(self, model_executed)

    @replacing(OutputProcessor, "abort_requests")
    def abort(stock, self, *args, **kwargs):
        states = dict(self.request_states)
        names = stock(self, *args, **kwargs)
        return [*guarded_call(self, _delivered_tokens, states, names, otherwise=()), *names]

    @replacing(EngineCore, "abort_requests")
    def aborted(stock, self, request_ids):
        if hasattr(self.scheduler, "note_delivered"):
            guarded_call(self, _note_delivered, self.scheduler, request_ids)
        return stock(self, [name for name in request_ids if not name.startswith(GOT)])

    for call in ("generate", "chat", "beam_search"):
        replacing(LLM, call)(_note_call_before)

    @replacing(EngineCore, "shutdown")
    def shutdown(stock, self) -> None:
        # First: vLLM gives an engine core seconds to end, and most of them to its workers.
        scheduler: Any = getattr(self, "scheduler", None)
        if hasattr(scheduler, "close_recording"):
            guarded_call(scheduler, scheduler.close_recording)
        stock(self)

    # Schedulers are not notified of new weights: frameworks load them in the workers, by name, or set a version in the
    # core.
    for name in ("collective_rpc", "set_weight_version", "wake_up"):
        if hasattr(EngineCore, name):
            replacing(EngineCore, name)(_note_weights_after)

    @replacing(Scheduler, "__init__")
    def start(stock, self, *args, **kwargs) -> None:
        stock(self, *args, **kwargs)
        guarded_call(self, _record_where_asked, self)


def _delivered_tokens(states: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the number of tokens that clients got of the requests they abort, as names of no request.

    The engine core computes further tokens meanwhile. Names reach the core in order, with the requests' own; a core
    without tltlab ignores unknown names.
    """
    detokenizers = {name: states[name].detokenizer for name in names if name in states}
    return [f"{GOT}{each.num_output_tokens()} {name}" for name, each in detokenizers.items() if each is not None]


def _note_call_before(stock, self, *args, **kwargs):
    """Precede the requests of a call by a note to the engine core, as `_delivered_tokens` are."""
    if guarded_call(self, has_option, self.llm_engine.vllm_config, "record", otherwise=False):
        guarded_call(self, self.llm_engine.engine_core.abort_requests, [f"{GOT}0 {CALL}"])
    return stock(self, *args, **kwargs)


def _note_delivered(scheduler, request_ids: Sequence[str]) -> None:
    notes = [name.removeprefix(GOT).split(" ", 1) for name in request_ids if name.startswith(GOT)]
    scheduler.note_delivered({name: int(num_tokens) for num_tokens, name in notes})


def _note_weights_after(stock, self, *args, **kwargs):
    result = stock(self, *args, **kwargs)
    scheduler: Any = getattr(self, "scheduler", None)
    if hasattr(scheduler, "new_weights"):
        name: str | None = stock.__name__
        if name == "collective_rpc":
            method = kwargs.get("method", *args[:1])
            name = method if isinstance(method, str) else getattr(method, "__name__", "")
        elif name == "set_weight_version":
            name = None
        guarded_call(self, scheduler.new_weights, name)
    return result


def _record_where_asked(scheduler) -> None:
    if "tltlab" in (scheduler.vllm_config.additional_config or {}):
        from .scheduler import record_only

        record_only(scheduler)


def wait_for_recordings() -> None:
    """Make a server at its end wait for engine cores that record.

    By default `vllm serve` kills its engine cores (SIGKILL) right after asking them to end (SIGTERM). Their requests
    are aborted as before; the wait gives them time to write the trace.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    @replacing(CoreEngineProcManager, "__init__")
    def start(stock, self, *args, **kwargs) -> None:
        records = guarded_call(self, has_option, kwargs.get("vllm_config"), "record", otherwise=False)
        self.tltlab_grace_s = GRACE_S if records else 0.0
        stock(self, *args, **kwargs)

    @replacing(CoreEngineProcManager, "shutdown")
    def shutdown(stock, self, timeout: float | None = None, *args, **kwargs) -> None:
        grace_s = self.tltlab_grace_s
        stock(self, max(timeout or 0.0, grace_s) if grace_s else timeout, *args, **kwargs)


_CHANGES: Mapping[str, Callable[[], None]] = {
    "policies": attach,
    "weight updates": register_backend,
    "sound sampling on CPU": fix_speculative_sampling,
    "top-k of nothing on CPU": fix_top_k_without_drafts,
    "requests without drafts": sample_beside_drafts,
    "plain iterations": bypass_speculation,
    "late drafts": take_late_drafts,
    "draft times": time_drafting,
    "graph plans": lambda: keep_captured_bytes(*model_runners()),
    "traces of servers": wait_for_recordings,
    "environment variables": follow_variables,
}
"""Changes to vLLM, by the capability that each needs. Drafting is timed with parts that `bypass_speculation` adds."""
