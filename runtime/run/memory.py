"""What a run's processes hold, by the names that a dry run gives its parts (`tltlab.runtime.recipe.memory`).

`RUN/memory.json` has it as it was after the first RL step and, at its end, after the last.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process, number `number` of its kind. `parts` are bytes of tensors, and of texts, by whose they are.

    `resident_bytes` are all that it has on the host, `peak_bytes` the most since it began or last did measured work,
    pages that processes share among them; 0 where the system does not say.
    """

    process: str
    number: int
    parts: dict[str, int]
    resident_bytes: int
    peak_bytes: int

    @classmethod
    def now(cls, process: str, number: int, parts: dict[str, int]) -> ProcessMemory:
        """Of this process."""
        resident, peak = _resident()
        return cls(process=process, number=number, parts=parts, resident_bytes=resident, peak_bytes=peak)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind tensors, each once; of a sharded one what this process has."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}.values())


class Peak:
    """The most that the last piece of work took beyond what was there when it began, in `bytes`.

    On CUDA of the device, by torch's count. On a CPU of resident memory, by Linux's: freed memory that glibc keeps is
    given back before, and what it keeps meanwhile counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self._cuda = device.type == "cuda"

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within, the work is done."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            with suppress(OSError, AttributeError):  # neither is there but on Linux with glibc
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")
            before = _resident()[0]
        yield
        most = torch.cuda.max_memory_allocated() if self._cuda else _resident()[1]
        self.bytes = max(most - before, 0)


def _resident() -> tuple[int, int]:
    """Bytes of this process on the host, now and at most."""
    try:
        status = _STATUS.read_text()
    except OSError:
        return 0, 0
    now, most = (re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE) for name in ("VmRSS", "VmHWM"))
    return (int(now[1]) << 10 if now else 0), (int(most[1]) << 10 if most else 0)
