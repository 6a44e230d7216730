"""Trainer ranks: their devices, their meeting, and the assignment of sequences."""

import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tltlab.errors import ConfigError, RunError
from tltlab.records import Json
from tltlab.runtime.recipe.sections import TrainConfig

from .attention import ALONE, SequenceGroup

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Environment variable of torch's settings for memory of CUDA devices."""


def device_of(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """Return the device of a backend, CUDA where there is one unless it is gloo, and the recipe's compute dtype.

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

    `rendezvous` is as in `Trainer`. `timeout_s` limits a rank's wait for the others, here (RunError then) and later in
    each collective; a `TrainerGroup` ends a slow start before that.
    """
    if rendezvous is None and world > 1:
        raise ConfigError(f"{world} trainer ranks need a place to meet: file:///PATH or tcp://HOST:PORT")
    if rendezvous is None or not rendezvous.startswith("tcp://"):
        # Ranks of one machine use its loopback interface.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    place: Json = {"store": HashStore()} if rendezvous is None else {"init_method": rendezvous}
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            **place,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(f"trainer rank {rank} of {world} met none within {timeout_s:g} s: {str(error)[:200]}") from error


def sequence_groups(
    rank: int, world: int, size: int, timeout_s: float
) -> tuple[SequenceGroup, dist.ProcessGroup | None]:
    """Return the group of `size` neighbours that share sequences with `rank`, and the group of ranks in its place.

    With 4 ranks and size 2, (0, 1) and (2, 3) share sequences, and (0, 2) and (1, 3) sum over all sequences. None means
    all ranks. All ranks call it once they have met. ConfigError where `size` does not divide `world`.
    """
    if world % size:
        raise ConfigError(f"{world} trainer ranks cannot share sequences by train.sequence_parallel = {size}")
    if size == 1:
        return ALONE, None
    timeout = timedelta(seconds=timeout_s)
    neighbours = [list(range(first, first + size)) for first in range(0, world, size)]
    group, _ = dist.new_subgroups_by_enumeration(neighbours, timeout=timeout)
    across, _ = dist.new_subgroups_by_enumeration([list(place) for place in zip(*neighbours, strict=True)], timeout)
    return SequenceGroup(group=group, rank=rank % size, size=size), across


@contextmanager
def ordinary_segments() -> Iterator[None]:
    """Within, allocate memory that other processes can open by CUDA IPC; expandable segments ask them for rights."""
    conf = os.environ.get(ALLOCATOR, "")
    if expandable := "expandable_segments:True" in conf:
        torch.cuda.memory._set_allocator_settings(conf.replace("segments:True", "segments:False"))
    try:
        yield
    finally:
        if expandable:
            torch.cuda.memory._set_allocator_settings(conf)


def make_deterministic(repeatable: bool = True) -> None:
    """Make this process compute the same bits each time, where torch can; RuntimeError for operations that cannot.

    On a CPU it mostly does anyway. On CUDA FlashAttention's backward pass does only on request, and not by `warn_only`.
    """
    if repeatable:
        # Read when cuBLAS starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(repeatable)
    # Memory that is never read need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def micro_batches(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Return each of `ranks` ranks' micro-batches, each a list of indices into `lengths` (tokens), ascending.

    Every rank gets the same number of them, hardly more than needed, some empty where there are fewer sequences, to
    keep collectives of sharded models in step. A micro-batch has up to `budget` tokens; a longer sequence has one of
    its own. Longest sequences go first, each to the micro-batch with the fewest tokens, and ranks then take turns from
    both ends (longest processing time first, Graham 1969). The same lengths give the same answer.

    >>> micro_batches([5, 3, 4, 2], ranks=2, budget=8)
    [[[0, 3]], [[1, 2]]]
    """
    assert ranks >= 1
    assert budget >= 1
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # Two sequences of more than half a budget never share a micro-batch.
    least = max(-(-sum(min(n, budget) for n in lengths) // budget), sum(2 * n > budget for n in lengths))
    per_rank = -(-least // ranks)
    while (bins := _bins(order, lengths, ranks * per_rank, budget)) is None:
        # By 2 %: one at a time would take seconds for thousands of sequences.
        per_rank += 1 + per_rank // 50
    bins.sort(key=lambda members: (-sum(lengths[i] for i in members), members))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn in range(per_rank):
        row = bins[turn * ranks : (turn + 1) * ranks]
        for rank, members in enumerate(row if turn % 2 == 0 else reversed(row)):
            dealt[rank].append(members)
    return dealt


def ranks_of(lengths: Sequence[int], parts: Sequence[Sequence[int]], ranks: int, budget: int) -> list[int]:
    """Return the rank that computes each sequence: each of `parts`, together all indices, is dealt out evenly.

    Evenly by tokens, as `micro_batches` does.

    >>> ranks_of([5, 3, 4, 2], [[0, 1], [2, 3]], ranks=2, budget=8)
    [0, 1, 0, 1]
    """
    rank_of = [0] * len(lengths)
    for part in parts:
        for rank, dealt in enumerate(micro_batches([lengths[i] for i in part], ranks, budget)):
            for members in dealt:
                for m in members:
                    rank_of[part[m]] = rank
    return rank_of


def own_micro_batches(
    lengths: Sequence[int], rank_of: Sequence[int], rank: int, ranks: int, budget: int
) -> list[list[int]]:
    """Return the micro-batches of `rank`'s sequences, with empty ones up to the most that any rank has.

    >>> own_micro_batches([5, 3, 4, 2], [0, 1, 0, 0], rank=1, ranks=2, budget=8)
    [[1], []]
    """
    batches: list[list[int]] = []
    most = 0
    for number in range(ranks):
        rows = [i for i, owner in enumerate(rank_of) if owner == number]
        (packed,) = micro_batches([lengths[i] for i in rows], 1, budget)
        most = max(most, len(packed))
        if number == rank:
            batches = [[rows[m] for m in members] for members in packed]
    return batches + [[] for _ in range(most - len(batches))]


def _bins(order: Sequence[int], lengths: Sequence[int], num: int, budget: int) -> list[list[int]] | None:
    """Return `num` micro-batches that hold all sequences within the budget, or None where they do not fit."""
    bins: list[list[int]] = [[] for _ in range(num)]
    heap = [(0, n) for n in range(num)]
    for i in order:
        if not heap:
            return None
        tokens, n = heapq.heappop(heap)
        if tokens and tokens + lengths[i] > budget:
            return None
        bins[n].append(i)
        heapq.heappush(heap, (tokens + lengths[i], n))
    return [sorted(members) for members in bins]
