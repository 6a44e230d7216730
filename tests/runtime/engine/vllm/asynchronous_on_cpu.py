"""Asynchronous scheduling on a CPU, where vLLM turns it off and has no streams and events for it.

A CPU does everything in order, and its host and device buffers are the same: drafts that never reach a device do not
show here.
"""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def synchronize(self):
        pass


class _Stream(_Event):
    device = torch.device("cpu")

    def wait_stream(self, stream):
        pass


@contextmanager
def asynchronous():
    """Within the block, engines start that are scheduled asynchronously, unless their settings forbid it, and run."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        wanted = config.scheduler_config.async_scheduling
        stock(cls, config)
        config.scheduler_config.async_scheduling = wanted

    cuda = {"Event": _Event, "Stream": _Stream, "current_stream": _Stream, "stream": lambda _: nullcontext()}
    with (
        patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)),
        patch.multiple(torch.cuda, **cuda),
    ):
        yield
