"""Names of vLLM that the adapter uses, and the capabilities that a version of vLLM therefore has.

`CAPABILITIES`, stored in `capabilities.json`, is one table for two checks: `lacks` inspects the imported vLLM,
`tests/runtime/engine/vllm/versions.py` the sources of any version, and writes the result into `versions.json`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VERSIONS = Path(__file__).with_name("versions.json")
"""By version: the torch it needs, and whether it has each capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
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

    return _sentence(str(vllm.__version__), CAPABILITIES[capability], lacks(capability))


def _sentence(version: str, capability: Capability, lacking: Sequence[str]) -> str:
    return f"vLLM {version} has no {lacking[0].replace(':', '.')}: {capability.without}" if lacking else ""


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


def by_version(version: str) -> dict[str, str]:
    """Return what a version loses without each capability, "" where it has it; empty if not in `VERSIONS`."""
    row = json.loads(VERSIONS.read_text()).get(version.partition("+")[0], {"has": {}})
    return {name: "" if has else CAPABILITIES[name].without for name, has in row["has"].items()}


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
