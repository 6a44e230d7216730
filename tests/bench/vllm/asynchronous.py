"""Asynchronous scheduling on a CPU, where vLLM turns it off and has no streams and events for it.

A CPU does everything in order. Its host and device buffers, which vLLM makes the same, are apart here, as on a GPU:
drafts that never reach the device show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from tltlab.runtime.engine.vllm import replaced


class _Nothing:
    """A stream or an event of a device that has done everything."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record = self.synchronize = self.wait_stream = lambda *args: None


@contextmanager
def asynchronous() -> Iterator[None]:
    """Within the block, engines start that are scheduled asynchronously, unless their settings forbid it, and run."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        stock(cls, config)
        config.scheduler_config.async_scheduling = wanted

    cuda = {"Event": _Nothing, "Stream": _Nothing, "current_stream": _Nothing, "stream": lambda _: nullcontext()}
    with ExitStack() as patches:
        patches.enter_context(replaced(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)))
        patches.enter_context(replaced(CPUModelRunner, "_postprocess_tensors", lambda self: None))
        for name, value in cuda.items():
            patches.enter_context(replaced(torch.cuda, name, value))
        yield
