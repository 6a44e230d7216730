"""Drafter trainers on a CUDA device each, over NCCL. Torch only."""

import os
import signal
import time
import traceback

import pytest
import torch
from torch import multiprocessing
from transformers import LlamaConfig

from tltlab.runtime.drafter.group import DrafterGroup, GroupLost, RendezvousServer, rendezvous_store
from tltlab.runtime.drafter.heads.head import EagleHead
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and torch sees fewer"),
]

HIDDEN, TIMEOUT_S = 256, 10.0


def training(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=512
    )
    weights = torch.randn(512, HIDDEN)
    target = FrozenTarget(embedding=weights, lm_head=weights)
    return HeadTraining(EagleHead(config), target, LossConfig(), OptimConfig(), "cuda")


def sequence():
    return TrainingSequence(key=(0, "p", 0, 0), token_ids=torch.randint(512, (65,)), hidden=torch.randn(64, HIDDEN))


def member(rank, address, dies, out):
    try:
        torch.cuda.set_device(rank)
        made = training(seed=rank)
        group = DrafterGroup.join(rendezvous_store(address, "term-1", TIMEOUT_S), rank, 2, TIMEOUT_S)
        made.share(group)
        for _ in range(3):
            made.update([sequence()], group)
        found = {
            "on_host": group._on_host,
            "sum": float(made.head.get_parameter("fc.weight").detach().double().sum()),
        }
        if dies:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.perf_counter()
            try:
                made.update([sequence()], group)
            except GroupLost as error:
                found["lost"] = str(error)
            found["seconds"] = time.perf_counter() - began
            found["alone"] = made.update([sequence()]).tokens
        out.put((rank, found))
        group.close()
    except BaseException:
        out.put((rank, traceback.format_exc()))


def run(*, dies):
    context, point = multiprocessing.get_context("spawn"), RendezvousServer()
    out = context.Queue()
    members = [context.Process(target=member, args=(rank, point.address, dies, out), daemon=True) for rank in range(2)]
    try:
        for process in members:
            process.start()
        found = dict(out.get(timeout=240) for _ in range(1 if dies else 2))
        for process in members[: len(found)]:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in members:
            process.kill()
            process.join()
        point.close()
    assert all(isinstance(one, dict) for one in found.values()), found
    return found


def test_members_with_a_gpu_each_exchange_over_nccl():
    found = run(dies=False)
    assert not any(one["on_host"] for one in found.values())
    assert found[0]["sum"] == found[1]["sum"]


def test_a_trainer_survives_a_dead_peer_in_nccl():
    found = run(dies=True)[0]
    assert "hangs" in found["lost"]
    assert found["seconds"] < TIMEOUT_S + 5
    assert found["alone"] > 0
