"""Where a trainer's rank computes, and how ranks find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tltlab.errors import ConfigError, RunError
from tltlab.runtime.recipe.recipe import TrainConfig


def device_of(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """The device of a backend, CUDA where there is one unless it is gloo, and what the recipe computes in there.

    ConfigError for nccl without a CUDA device.
    """
    cuda = torch.cuda.is_available() and config.backend != "gloo"
    if config.backend == "nccl" and not cuda:
        raise ConfigError("train.backend is nccl, which needs a CUDA device, and there is none: take gloo, or auto")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    dtype = dtypes.get(config.dtype, torch.bfloat16 if cuda else torch.float32)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"), dtype


def meet(device: torch.device, rank: int, world: int, rendezvous: str | None, timeout_s: float) -> None:
    """Join the other ranks in torch's default process group: gloo, and nccl for tensors on CUDA devices.

    `rendezvous` is as in `Trainer`. `timeout_s` is how long a rank waits for the others, here (RunError then) and later
    in each collective; a `TrainerGroup` ends a start that takes too long before that.
    """
    if rendezvous is None and world > 1:
        raise ConfigError(f"{world} trainer ranks need a place to meet: file:///PATH or tcp://HOST:PORT")
    if rendezvous is None or not rendezvous.startswith("tcp://"):
        # Ranks of one machine talk over its loopback interface.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    where: dict[str, Any] = {"store": HashStore()} if rendezvous is None else {"init_method": rendezvous}
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            **where,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"trainer rank {rank} of {world} did not meet the others within {timeout_s:g} s: {str(error)[:200]}"
        ) from error


def be_repeatable(device: torch.device) -> None:
    """Let CUDA kernels give the same bits each time; on CPU they do anyway."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
