"""Workers that train together: members in threads of this process; processes that are killed are in `test_run.py`."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed

from tests.refused import refused
from tltlab.errors import RunError
from tltlab.runtime.drafter.group import DrafterGroup, GroupLost, RendezvousServer, rendezvous_store
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from ..small_models import until
from . import drafting_text as text
from .drafting_text import same, together

TIMEOUT_S, PATIENT_S = 4.0, 120.0
"""For a member that is lost on purpose, and for those that all come."""


@pytest.fixture
def point():
    point = RendezvousServer()
    yield point
    point.close()


def all_of(world, member):
    """What each member returned, in its own thread."""
    return together([lambda rank=rank: member(rank) for rank in range(world)])


def made(folder, seed=0, kind="eagle"):
    return HeadTraining(
        text.head(folder, seed), text.frozen(), LossConfig(kind=kind, token_weight=1.0), OptimConfig(lr=3e-3)
    )


def joined(address, name, rank, world, timeout_s=PATIENT_S):
    """In the group `name` of a meeting point; each member at its own address."""
    return DrafterGroup.join(
        rendezvous_store(address, name, timeout_s), rank, world, timeout_s, host=f"127.0.0.{2 + rank}"
    )


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_process_joins_and_leaves_many_groups(point):
    default_group, files = torch.distributed.group.WORLD, []
    for term in range(5):

        def member(rank, term=term):
            with joined(point.address, f"term-{term}", rank, 3) as group:
                values = torch.full((1000,), float(rank + term))
                group.sum(values)
            return float(values[0])

        assert all_of(3, member) == [3.0 + 3 * term] * 3
        files.append(open_files())
    until(lambda: open_files() <= files[1] + 2)
    assert torch.distributed.group.WORLD is default_group


@pytest.mark.parametrize("kind", ["eagle", "hass"])
def test_two_members_end_where_one_does(point, tmp_path, kind):
    """They begin with their own heads; sharing makes them the leader's."""
    members = [made(tmp_path / str(rank), seed=rank, kind=kind) for rank in range(2)]
    alone = made(tmp_path / "alone", kind=kind)
    for training in (members[0], alone):
        training.update([text.sequence(77)])
    # Unrolled steps are weighed by the first's tokens: with texts of one length by their own.
    lengths = [8, 14, 20, 26] if kind == "eagle" else [12] * 4
    texts = [[text.sequence(4 * n + i, rows=rows) for i, rows in enumerate(lengths)] for n in range(3)]

    def trains_with_the_other(rank):
        with joined(point.address, "term-1", rank, 2) as group:
            members[rank].share(group)
            return [members[rank].update(four[1:] if rank else four[:1], group) for four in texts]

    reports = all_of(2, trains_with_the_other)
    for *pair, four in zip(*reports, texts, strict=True):
        one = alone.update(four)
        for report in pair:
            assert report.tokens == one.tokens
            assert report.loss == pytest.approx(one.loss, rel=1e-5)
    left, right, expected = (training.state_dict() for training in (*members, alone))
    assert same(left, right)
    assert left["counters"].tolist() == [4, 0, 0, 4]
    for name, value in expected.items():
        # The first moment holds the gradients themselves.
        assert torch.allclose(left[name], value, rtol=0, atol=1e-6 if name.startswith("exp_avg.") else 1e-5), name


@pytest.mark.parametrize("hangs", [False, True], ids=["leaves", "hangs"])
def test_a_lost_member_costs_the_others_one_update(point, tmp_path, hangs):
    """The others continue, first alone and then in a new group."""
    over, met = threading.Event(), threading.Barrier(3, timeout=PATIENT_S)

    def begins(rank):
        """Share and make an update with the others."""
        training, group = made(tmp_path / str(rank)), joined(point.address, "term-1", rank, 3, TIMEOUT_S)
        training.share(group)
        training.update([text.sequence(rank)], group)
        met.wait()
        return training, group

    def is_lost():
        with begins(1)[1]:
            over.wait(PATIENT_S if hangs else 0.0)

    def goes_on(rank):
        training, group = begins(2 * rank)
        before, began = training.state_dict(), time.perf_counter()
        with refused(GroupLost):
            training.update([text.sequence(10 + rank)], group)
        assert time.perf_counter() - began < TIMEOUT_S + 100
        assert same(training.state_dict(), before)
        with refused(GroupLost, naming=("closed",)):
            group.sum(torch.zeros(1))
        tokens = training.update([text.sequence(20)]).tokens
        with joined(point.address, "term-2", rank, 2) as again:
            training.share(again)
            assert training.update([text.sequence(30 + rank)], again).tokens == 2 * tokens
        assert training.updates == 3

    lost = threading.Thread(target=is_lost)
    lost.start()
    try:
        all_of(2, goes_on)
    finally:
        over.set()
        lost.join()


def test_a_group_that_never_fills_is_lost(point):
    began = time.perf_counter()
    with refused(GroupLost, naming=("2", "0.2")):
        DrafterGroup.join(rendezvous_store(point.address, "term-1", 0.2), 0, 2, 0.2)
    point.close()
    with refused(GroupLost, naming=("127",)):
        rendezvous_store(point.address, "term-1", 0.2)
    assert time.perf_counter() - began < 120


def test_a_meeting_point_listens_at_one_address(point):
    host, port = point.address.split(":")
    with socket.create_connection((host, int(port))), refused(OSError, naming=("refused",)):
        socket.create_connection(("127.0.0.9", int(port)))
    with refused(RunError, naming=("192.0.2.1",)):
        RendezvousServer("192.0.2.1")
