"""New weights on their way: buckets of shared memory, which another process maps, and vLLM's own transfer backends.

What those ask for is what they get, checked by their own code.
"""

import multiprocessing
from dataclasses import asdict

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.refused import refused
from tltlab.errors import RunError
from tltlab.runtime.engine.vllm import starting
from tltlab.runtime.engine.weights import BucketSlots, Engines, MappedMemory, WeightBucket
from tltlab.runtime.trainer.whole import WholeTensors

KIB = 1 << 10


def tensors():
    torch.manual_seed(0)
    return {
        "embed": torch.randn(40, 8),
        "odd": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "large": torch.randn(2 * KIB),
        "transposed": torch.randn(16, 8).T,
        "parameter": torch.nn.Parameter(torch.randn(9)),
    }


@pytest.fixture
def slots():
    slots = BucketSlots.fit(tensors().values(), bucket_bytes=KIB)
    yield slots
    slots.close()


def reads(pipe):
    """Answers each bucket with what it finds in it."""
    mapped = MappedMemory()
    while (bucket := pipe.recv()) is not None:
        pipe.send([described(name, tensor) for name, tensor in mapped.tensors(bucket)])


def described(name, tensor):
    return name, tensor.dtype, tensor.shape, float(tensor.detach().double().sum())


def test_another_process_reads_while_next_bucket_is_filled(slots):
    weights = tensors()
    pipe, end = multiprocessing.Pipe()
    # Forked: a process that has yet to import torch takes seconds.
    reader = multiprocessing.get_context("fork").Process(target=reads, args=(end,), daemon=True)
    reader.start()
    found = []
    numbers = []
    for bucket in slots.filled(weights.items()):
        # One bucket behind: when the generator continues, the one before the last is done and the last may be in use.
        if numbers:
            found += pipe.recv()
        numbers.append((bucket.number, bucket.last))
        pipe.send(bucket)
    found += pipe.recv()
    pipe.send(None)
    reader.join(300)
    assert found == [described(name, tensor) for name, tensor in weights.items()]
    assert len(numbers) > 1
    assert numbers == [(n, n == len(numbers) - 1) for n in range(len(numbers))]


def test_bucket_is_no_larger_than_it_must_be(slots):
    largest = max(tensor.nbytes for tensor in tensors().values())
    assert largest <= slots.size < largest + 2 * 4 * KIB
    assert all(bucket.nbytes <= slots.size for bucket in slots.filled(tensors().items()))


def test_bucket_comes_to_another_machine_as_its_bytes(slots):
    there = BucketSlots(slots.size, 1)
    found = {}
    mapped = MappedMemory()
    for bucket in slots.filled(tensors().items()):
        copy_in = there.copy_in(bucket, slots.bytes_of(bucket).copy())
        found |= {name: tensor.clone() for name, tensor in mapped.tensors(copy_in)}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_memory_that_is_gone_or_another_is_error(slots, tmp_path):
    (bucket, *_) = slots.filled(tensors().items())
    for path in (str(tmp_path / "none"), "/proc/self/fd/0"):
        with refused(RunError):
            MappedMemory().tensors(WeightBucket(**asdict(bucket) | {"path": path}))


def test_vllms_nccl_sender_takes_policy_as_source(random_model):
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


def test_engines_are_a_client_for_vllms_senders():
    """And get ranks of their own in its group."""
    with starting():
        from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    engines = Engines([None, None, None], 1, transport="nccl", gpus_each=2)
    assert isinstance(engines, VLLMWeightSyncClient)
    place = {"master_address": "10.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 7}
    told = worker_init_payload(NCCLWeightTransferInitInfo(**place))
    joined = [NCCLWeightTransferInitInfo(**info) for info in engines.joining(told).values()]
    assert [info.rank_offset for info in joined] == [1, 3, 5]
    assert {info.world_size for info in joined} == {1 + engines.num_ranks}
    assert engines.joining({"packed": True}) == {n: {"packed": True} for n in range(3)}
