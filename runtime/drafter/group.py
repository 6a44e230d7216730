"""A few idle workers that train one drafter together, for as long as none of them is needed elsewhere.

Built directly on a store and a process group, without torch.distributed's default group: a worker joins and leaves many
groups in its life, and the engine next to the trainer may have its own default group. The store is the run's, at a
`RendezvousServer` on the driver's machine; members may be on any machine that reaches it and each other.

The cost of an update in a group of n, with S bytes in its one message (4 per trained parameter), B bytes a second
between neighbours and a latency of a: a ring sends 2 (n - 1) / n S bytes per member in 2 (n - 1) rounds,

    t(n) = t(1) + 2 (n - 1) / n S / B + 2 (n - 1) a

so the bytes of a member stay below 2 S for any n. Members process as many tokens as one alone: updates become fewer by
the time of the exchange, and larger by the number of members.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import is_nccl_available

from tltlab.errors import RunError

LOOPBACK = "127.0.0.1"
LEADER = 0
POLL_S = 0.0002
"""Seconds between checks for the end of NCCL's exchange, which takes milliseconds."""


class GroupLost(RunError):
    """A member failed, hangs or never came. Nothing of the step under way was applied; the rest may continue."""


class RendezvousServer:
    """The store where members of a run's groups meet, at `address`, HOST:PORT, until `close`.

    It listens at `host` alone, at a free port. RunError where it cannot. The entries of groups, a few hundred bytes
    each, end with it.
    """

    def __init__(self, host: str = LOOPBACK):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.bind((host, 0))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise RunError(f"drafter trainers cannot meet at {host}: {error.strerror}") from error
        port = listener.getsockname()[1]
        # By default the store would listen at every address of the machine.
        self._store: TCPStore | None = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.address = f"{host}:{port}"

    def close(self) -> None:
        self._store = None


def rendezvous_store(address: str, name: str, timeout_s: float) -> Store:
    """Return the store of group `name` at a `RendezvousServer`; reading a key waits `timeout_s` at most.

    Raises GroupLost where the address does not answer.
    """
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = PrefixStore(name, TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout))
        store.set_timeout(timeout)
    except RuntimeError as error:
        raise GroupLost(f"drafter trainers cannot meet at {address}: {_first_line(error)}") from error
    return store


def gather(store: Store, worker: int, members: Sequence[int], updates: int, withdrawn: Callable[[], bool]) -> list[int]:
    """Return the members in the order of their ranks, once all are here; empty if `withdrawn()` before that.

    Members first announce themselves, so one ordered to stop while others are missing just leaves. They also announce
    their updates: the member with most updates is rank 0, whose state all take, so a restarted trainer's saved progress
    is not lost. `withdrawn` is called repeatedly, and sets the pace. Raises GroupLost where the store is out of reach.
    """
    try:
        store.set(f"here-{worker}", str(updates))
        while not store.check([f"here-{member}" for member in members]):
            if withdrawn():
                store.delete_key(f"here-{worker}")
                return []
        updates_of = {member: int(store.get(f"here-{member}")) for member in members}
    except RuntimeError as error:
        raise GroupLost(f"the members of a training group cannot meet: {_first_line(error)}") from error
    return sorted(members, key=lambda member: (-updates_of[member], member))


class DrafterGroup:
    """Members `rank` 0 to `world` - 1; rank 0 leads. After a `GroupLost` the group is closed.

    >>> store = rendezvous_store(point.address, "term-7", 20.0)  # doctest: +SKIP
    >>> group = DrafterGroup.join(store, rank=0, world=2, timeout_s=20.0)                           # doctest: +SKIP
    >>> group.sum(gradients)                                                                        # doctest: +SKIP
    """

    def __init__(self, connection: Any, rank: int, world: int, timeout_s: float, *, on_host: bool):
        self.rank, self.world = rank, world
        self._connection, self._timeout_s, self._on_host = connection, timeout_s, on_host

    @classmethod
    def join(cls, store: Store, rank: int, world: int, timeout_s: float, *, host: str = LOOPBACK) -> DrafterGroup:
        """Join the others, waiting at most about `timeout_s` seconds, also the limit of a step's exchange.

        `store` is used for one group: two would mix. Members reach this one at `host`, its machine's address (over
        gloo; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface instead). They exchange over nccl where every
        member has its own CUDA device, and over gloo elsewhere. Raises GroupLost where a member does not come.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            store.set(f"device-{rank}", _device())
            devices = {store.get(f"device-{member}") for member in range(world)}
            on_host = len(devices) < world or b"" in devices
            connect = _gloo if on_host else _nccl
            return cls(connect(store, rank, world, timeout, host), rank, world, timeout_s, on_host=on_host)
        except RuntimeError as error:
            raise GroupLost(
                f"a training group's {world} members did not meet within {timeout_s:g} s: {_first_line(error)}"
            ) from error

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over members, bitwise the same for all. After a GroupLost it is undefined."""
        self._exchange(tensor, lambda connection, shared: connection.allreduce([shared]))

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by the leader's. After a GroupLost it is undefined."""
        self._exchange(tensor, lambda connection, shared: connection.broadcast(shared, LEADER))

    def close(self) -> None:
        """Leave; the others notice at their next exchange."""
        self._part(lost=False)

    def __enter__(self) -> DrafterGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _exchange(self, tensor: Tensor, start: Callable[[Any, Tensor], Any]) -> None:
        if self._connection is None:
            raise GroupLost("this training group is closed: join another one")
        shared = tensor.cpu() if self._on_host else tensor
        work = None
        try:
            work = start(self._connection, shared)
            if not self._on_host:
                self._await(work)
            work.wait()
        except RuntimeError as error:
            lost = GroupLost(f"a member of the training group failed or hangs: {_first_line(error)}")
        else:
            if shared is not tensor:
                tensor.copy_(shared)
            return
        # The connections close with the group, so that waiting members notice now and not at their time-out.
        del work
        self._part(lost=True)
        raise lost

    def _part(self, *, lost: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not self._on_host:
            # A communicator whose members are gone must be aborted.
            with suppress(RuntimeError):
                connection.abort() if lost else connection.shutdown()

    def _await(self, work: Any) -> None:
        """Wait for NCCL, whose kernels wait forever for a lost member unless the communicator is aborted."""
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"an exchange took more than {self._timeout_s:g} s")
            time.sleep(POLL_S)


def _device() -> str:
    """Return a unique name of this process's CUDA device; empty where there is none, or no NCCL."""
    if not (torch.cuda.is_available() and is_nccl_available()):
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _gloo(store: Store, rank: int, world: int, timeout: timedelta, host: str) -> Any:
    # torch's stubs lack both options.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._timeout = timeout
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    address = {"interface": interface} if interface else {"hostname": host}
    options._devices = [ProcessGroupGloo.create_device(**address)]
    return ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Store, rank: int, world: int, timeout: timedelta, host: str) -> Any:
    # Otherwise torch's watchdog ends this process when a member fails or an abort takes long.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # For connecting, which does not block then; an exchange has the group's time-out.
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(timeout.total_seconds()))))
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return ProcessGroupNCCL(store, rank, world, options)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
