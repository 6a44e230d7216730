"""Memory of a run's processes, by the names of a dry run's parts (`tltlab.runtime.recipe.dry_run`).

`RUN/memory.json` has the memory after the first RL step and, at the run's end, after the last.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tltlab.records import frozen

_STATUS = Path("/proc/self/status")


@frozen
class ProcessMemory:
    """One process, number `number` of its kind. `parts` are bytes of tensors, and of texts, by owner.

    `resident_bytes` is its memory on the host, `peak_bytes` the most since it began or last did measured work, shared
    pages included; 0 where the system does not report it.
    """

    process: str
    number: int
    parts: dict[str, int]
    resident_bytes: int
    peak_bytes: int

    @classmethod
    def now(cls, process: str, number: int, parts: dict[str, int]) -> ProcessMemory:
        """Measure this process."""
        resident, peak = _resident()
        return cls(process=process, number=number, parts=parts, resident_bytes=resident, peak_bytes=peak)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory behind tensors, each once; of a sharded one this process's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}.values())


class Peak:
    """The most memory that the last piece of work took beyond its start, in `bytes`.

    On CUDA of the device, by torch's count. On a CPU of resident memory, by Linux's: freed memory that glibc keeps is
    returned before, and memory that it keeps meanwhile counts.
    """

    def __init__(self, device: torch.device):
        self.bytes = 0
        self._cuda = device.type == "cuda"

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the work within the block."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            with suppress(OSError, AttributeError):  # both exist only on Linux with glibc
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")
            before = _resident()[0]
        yield
        most = torch.cuda.max_memory_allocated() if self._cuda else _resident()[1]
        self.bytes = max(most - before, 0)


def _resident() -> tuple[int, int]:
    """Return the bytes of this process on the host, now and at most."""
    try:
        status = _STATUS.read_text()
    except OSError:
        return 0, 0
    now, most = (re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE) for name in ("VmRSS", "VmHWM"))
    return (int(now[1]) << 10 if now else 0), (int(most[1]) << 10 if most else 0)
