"""Trainers beside vLLM's own transfer backends: what those ask for is what they get, checked by their own code."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tltlab.runtime.engine.vllm import starting
from tltlab.runtime.engine.weights import Engines
from tltlab.runtime.trainer.model import WholeTensors


def test_the_policy_is_a_source_that_vllms_nccl_sender_takes(random_model: Path):
    with starting():
        from vllm.distributed.weight_transfer.base import layerwise_groups
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
    config = AutoConfig.from_pretrained(random_model, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = WholeTensors(model, torch.bfloat16)
    declared = source.metadata()
    # It splits the stream by what is declared, and hangs or loads garbage where that is not what comes.
    came = dict(NCCLTrainerWeightTransferEngine._checked_iter(source, declared))
    assert list(came) == [name for name, _ in model.named_parameters()], "a tied tensor goes once"
    assert {tensor.dtype for tensor in came.values()} == {torch.bfloat16}
    assert sum(meta.nbytes for meta in declared) == sum(tensor.nbytes for tensor in came.values())
    assert len(layerwise_groups(list(came))) == config.num_hidden_layers + 2


def test_engines_are_a_client_for_vllms_senders_and_get_ranks_of_their_own_in_its_group():
    with starting():
        from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    engines = Engines([None, None, None], 1, way="nccl", gpus_each=2)
    assert isinstance(engines, VLLMWeightSyncClient)
    told = worker_init_payload(
        NCCLWeightTransferInitInfo(master_address="10.0.0.1", master_port=1234, rank_offset=1, world_size=7)
    )
    joined = [NCCLWeightTransferInitInfo(**info) for info in engines.joining(told).values()]
    assert [info.rank_offset for info in joined] == [1, 3, 5]
    assert {info.world_size for info in joined} == {1 + engines.num_ranks}
    assert engines.joining({"packed": True}) == {n: {"packed": True} for n in range(3)}
