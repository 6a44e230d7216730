"""Workers that train together: real processes, killed and hanging ones among them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.group import DrafterGroup, GroupLost, MeetingPoint, meeting
from tltlab.runtime.drafter.training import DrafterTraining
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from . import drafting_text as text
from .drafting_text import same

TIMEOUT_S, PATIENT_S = 4.0, 120.0
"""For a member that is lost on purpose, and for those that all come."""
# New processes, forked from one that has imported torch and nothing more: that takes seconds, once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tltlab.runtime.drafter.training", "tltlab.runtime.drafter.heads.kinds"])


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    made = MeetingPoint()
    yield made
    made.close()


def _run(member: Callable[..., Any], rank: int, args: tuple[Any, ...], out: Any) -> None:
    torch.set_num_threads(1)
    try:
        out.put((rank, member(rank, *args)))
    except BaseException:
        out.put((rank, traceback.format_exc()))


def run(member: Callable[..., Any], world: int, *args: Any, dying: int = -1) -> dict[int, Any]:
    """What each member returned, in processes of their own; the one that dies returns nothing."""
    out, point = CONTEXT.Queue(), MeetingPoint()
    (args[0] / "address").write_text(point.address)
    processes = [CONTEXT.Process(target=_run, args=(member, rank, args, out), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        found = dict(out.get(timeout=300) for rank in range(world) if rank != dying)
    finally:
        for process in processes:
            process.kill()
            process.join()
        point.close()
    for one in found.values():
        assert not (isinstance(one, str) and one.startswith("Traceback")), one
    return found


def made(folder: Path, seed: int = 0, kind: str = "eagle") -> DrafterTraining:
    return DrafterTraining(
        text.head(folder, seed), text.frozen(), LossConfig(kind=kind, token_weight=1.0), OptimConfig(lr=3e-3)
    )


def joined(folder: Path, name: str, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> DrafterGroup:
    """In the group `name` of the meeting point that `run` opened; each member at an address of its own."""
    store = meeting((folder / "address").read_text(), name, timeout_s)
    return DrafterGroup.join(store, rank, world, timeout_s, host=f"127.0.0.{2 + rank}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def joins_and_leaves(rank: int, folder: Path) -> dict[str, Any]:
    files, sums = [], []
    for term in range(5):
        with joined(folder, f"term-{term}", rank, 3, PATIENT_S) as group:
            values = torch.full((1000,), float(rank + term))
            group.sum(values)
            sums.append(float(values[0]))
        files.append(open_files())
    return {"files": files, "sums": sums, "default_group": torch.distributed.is_initialized()}


def test_a_process_joins_and_leaves_many_groups(tmp_path: Path):
    found = run(joins_and_leaves, 3, tmp_path)
    for one in found.values():
        assert one["sums"] == [3.0 + 3 * term for term in range(5)]
        assert one["files"][-1] <= one["files"][1] + 2
        assert not one["default_group"]


def trains_with_others(rank: int, folder: Path, kind: str) -> tuple[dict[str, Any], list[float]]:
    """Members begin with heads of their own; sharing makes them the leader's."""
    training = made(folder / str(rank), seed=rank, kind=kind)
    if rank == 0:
        training.update([text.sequence(77)])
    losses = []
    with joined(folder, "term-1", rank, 2, PATIENT_S) as group:
        training.share(group)
        for n in range(3):
            texts = [text.sequence(4 * n + i, rows=12) for i in range(4)]
            losses.append(training.update(texts[2 * rank : 2 * rank + 2], group).loss)
    # Arrays: a tensor in a queue lives in the process that sent it.
    return {name: value.numpy() for name, value in training.state_dict().items()}, losses


@pytest.mark.parametrize("kind", ["eagle", "hass"])
def test_two_members_with_half_the_data_each_end_where_one_with_all_of_it_does(tmp_path: Path, kind: str):
    found = run(trains_with_others, 2, tmp_path, kind)
    alone = made(tmp_path / "alone", kind=kind)
    alone.update([text.sequence(77)])
    losses = [alone.update([text.sequence(4 * n + i, rows=12) for i in range(4)]).loss for n in range(3)]
    for name, value in alone.state_dict().items():
        assert np.array_equal(found[0][0][name], found[1][0][name]), name
        if name.startswith("exp_avg."):
            # The first moment holds the gradients themselves.
            assert np.allclose(found[0][0][name], value.numpy(), rtol=0, atol=1e-6), name
    assert found[0][1] == pytest.approx(losses, rel=1e-5)
    assert found[0][0]["counters"].tolist() == [4, 0, 0, 4]


def shares_another_drafter(rank: int, folder: Path) -> str:
    training = made(folder / str(rank), kind=["eagle", "hass"][rank])
    before = training.state_dict()
    with joined(folder, "term-1", rank, 2, PATIENT_S) as group, pytest.raises(RunError) as caught:
        training.share(group)
    assert same(training.state_dict(), before)
    return str(caught.value)


def test_members_that_train_differently_say_so_and_share_nothing(tmp_path: Path):
    found = run(shares_another_drafter, 2, tmp_path)
    assert all("different shapes or with other losses" in sentence for sentence in found.values())


class Large:
    """A group whose sums are so large that they cannot have gone through when a member dies."""

    SIZE = 10_000_000

    def __init__(self, group: DrafterGroup) -> None:
        self.group, self.world = group, group.world

    def sum(self, tensor: torch.Tensor) -> None:
        padded = torch.zeros(self.SIZE)
        padded[: tensor.numel()] = tensor
        self.group.sum(padded)
        tensor.copy_(padded[: tensor.numel()])

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.group.broadcast(tensor)


def dies_in_mid_sum(rank: int, folder: Path, how: int) -> dict[str, Any]:
    """Rank 1 dies or stops once its part is on the way; the others go on, first alone and then in a new group."""
    training = made(folder / str(rank))
    with joined(folder, "ready", rank, 3, PATIENT_S) as ready:
        # None of them has still to be started; without an exchange, one could leave while others still connect.
        ready.sum(torch.zeros(1))
    group = joined(folder, "term-1", rank, 3, TIMEOUT_S)
    training.share(group)
    training.update([text.sequence(rank)], group)
    if rank == 1:
        group._connection.allreduce([torch.zeros(Large.SIZE)])
        os.kill(os.getpid(), how)
    before = training.state_dict()
    began = time.perf_counter()
    try:
        training.update([text.sequence(10 + rank)], Large(group))
    except GroupLost as error:
        sentence = str(error)
    seconds = time.perf_counter() - began
    unchanged = same(training.state_dict(), before)
    with pytest.raises(GroupLost, match="closed"):
        group.sum(torch.zeros(1))
    alone = training.update([text.sequence(20)])
    with joined(folder, "term-2", rank // 2, 2, PATIENT_S) as again:
        training.share(again)
        report = training.update([text.sequence(30 + rank)], again)
    return {
        "sentence": sentence,
        "seconds": seconds,
        "unchanged": unchanged,
        "alone": alone.members,
        "members": report.members,
        "updates": training.updates,
    }


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_member_lost_in_mid_exchange_costs_the_others_one_update_and_a_bounded_time(tmp_path: Path, how: int):
    found = run(dies_in_mid_sum, 3, tmp_path, how, dying=1)
    for one in found.values():
        assert "died or hangs" in one["sentence"]
        assert one["seconds"] < TIMEOUT_S + 100
        assert one["unchanged"]
        assert (one["alone"], one["members"], one["updates"]) == (1, 2, 3)


def test_a_group_that_never_fills_or_whose_driver_is_gone_is_lost_in_time(point: MeetingPoint):
    began = time.perf_counter()
    with pytest.raises(GroupLost, match=r"2 members did not meet within 0\.2 s"):
        DrafterGroup.join(meeting(point.address, "term-1", 0.2), 0, 2, 0.2)
    point.close()
    with pytest.raises(GroupLost, match="cannot meet at 127"):
        meeting(point.address, "term-1", 0.2)
    assert time.perf_counter() - began < 120


def test_a_meeting_point_listens_at_one_address_and_says_when_it_cannot(point: MeetingPoint):
    host, port = point.address.split(":")
    with socket.create_connection((host, int(port))), pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.9", int(port)))
    with pytest.raises(RunError, match=f"cannot meet at 127.0.0.1:{port}: Address already in use"):
        MeetingPoint(port=int(port))


def test_what_cannot_be_is_a_mistake_of_the_caller(point: MeetingPoint):
    store = meeting(point.address, "term-1", 1.0)
    with pytest.raises(ConfigError, match="ranks go from 0 to 1"):
        DrafterGroup.join(store, 2, 2, 1.0)
    with pytest.raises(ConfigError, match="nccl needs a CUDA device"):
        DrafterGroup.join(store, 0, 2, 1.0, backend="nccl")
