"""A few idle workers that train one drafter together, for as long as none of them is needed elsewhere.

Built straight on a store and a process group, without torch.distributed's default group: a worker joins and leaves many
groups in its life, and the engine beside the trainer may have a default group of its own.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import is_nccl_available

from tltlab.errors import ConfigError, RunError

LOOPBACK = "127.0.0.1"
LEADER = 0


class GroupLost(RunError):
    """A member died, hangs or never came. Nothing of the step under way was applied; the rest may go on without it."""


class DrafterGroup:
    """Members `rank` 0 to `world` - 1; rank 0 leads. After a `GroupLost` the group is closed.

    >>> group = DrafterGroup.join(Path("/run/groups"), "term-7", rank=0, world=2, timeout_s=20.0)   # doctest: +SKIP
    >>> group.sum(gradients)                                                                        # doctest: +SKIP
    """

    def __init__(self, backend: Any, rank: int, world: int, *, on_host: bool) -> None:
        self.rank, self.world = rank, world
        self._backend = backend
        self._on_host = on_host

    @classmethod
    def join(
        cls,
        folder: Path,
        name: str,
        rank: int,
        world: int,
        timeout_s: float,
        *,
        backend: Literal["gloo", "nccl"] = "gloo",
    ) -> DrafterGroup:
        """Meet the others and wait for them, at most about `timeout_s` seconds; so long may a step's exchange take too.

        Members are processes of one machine that share `folder`. `name` is used once: two groups of one name would
        mix. nccl wants a device per member. Raises GroupLost where somebody does not come.
        """
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} of a group of {world} members: ranks go from 0 to {world - 1}")
        timeout = timedelta(seconds=timeout_s)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The last member to leave deletes the file; after one that was killed it stays, a few hundred bytes.
            store = FileStore(str(folder / name), world)
            store.set_timeout(timeout)
            connect = _gloo if backend == "gloo" else _nccl
            return cls(connect(store, rank, world, timeout), rank, world, on_host=backend == "gloo")
        except RuntimeError as error:
            raise GroupLost(
                f"training group {name!r}: {world} members did not meet within {timeout_s:g} s: {_first_line(error)}"
            ) from error

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over members, bit by bit the same for all. After a GroupLost it is undefined."""
        self._exchange("allreduce", tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by the leader's. After a GroupLost it is undefined."""
        self._exchange("broadcast", tensor)

    def close(self) -> None:
        """Leave; the others notice at their next exchange."""
        self._backend = None

    def __enter__(self) -> DrafterGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, what: Literal["allreduce", "broadcast"], tensor: Tensor) -> None:
        if self._backend is None:
            raise GroupLost("this training group is closed: join another one")
        shared = tensor.cpu() if self._on_host else tensor
        work = None
        try:
            work = self._backend.allreduce([shared]) if what == "allreduce" else self._backend.broadcast(shared, LEADER)
            work.wait()
        except RuntimeError as error:
            lost = GroupLost(f"a member of the training group died or hangs: {_first_line(error)}")
        else:
            if shared is not tensor:
                tensor.copy_(shared)
            return
        # The connections close with the group, so that the members still waiting notice now and not at their timeout.
        del work
        self.close()
        raise lost


def _gloo(store: Store, rank: int, world: int, timeout: timedelta) -> ProcessGroupGloo:
    # torch's stubs know neither of both options.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Store, rank: int, world: int, timeout: timedelta) -> Any:
    # Else a member that dies would take this whole process with it, and a rollout worker's engine may live here.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    if not (torch.cuda.is_available() and is_nccl_available()):
        raise ConfigError("a training group over nccl needs a CUDA device: take gloo")
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, world, options)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
