"""The trainer's memory by phase as torch counts it, on fake tensors of a 7B or 32B model's width."""

import weakref
from collections import deque
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from tltlab.costs.profiles import find_model
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.trainer import trainer as module
from tltlab.runtime.trainer.attention import ALONE, SequenceGroup
from tltlab.runtime.trainer.whole import WholeTensors

RANKS = 8


class Held(TorchDispatchMode):
    """Bytes of all storages of tensors of `fake`, now and at most; dtypes of what ranks `gathered`."""

    def __init__(self, fake):
        super().__init__()
        self.fake, self.bytes, self.most, self.gathered = fake, 0, 0, set()
        self._sizes, self._resize = {}, torch.UntypedStorage.resize_

    def __enter__(self):
        # FSDP2 frees what it gathered by this method, which is no operation of tensors.
        def resize(storage, size):
            self._resize(storage, size)
            if id(storage) in self._sizes:
                self._note(id(storage), size)

        self._patched = patch.object(torch.UntypedStorage, "resize_", resize)
        self._patched.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patched.stop()
        return super().__exit__(*error)

    def peak(self, work):
        """Return the most bytes held during `work`."""
        self.most = self.bytes
        work()
        return self.most

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        name = str(operation)
        # The tensor that is waited for is itself; only as a fake is it another.
        result = args[0] if "wait_tensor" in name else operation(*args, **kwargs or {})
        if "all_gather_into_tensor" in name:
            self.gathered.add(result.dtype)
        for tensor in tree_leaves(result):
            if type(tensor) is FakeTensor and tensor.fake_mode is self.fake:
                self._see(tensor.untyped_storage())
        self.most = max(self.most, self.bytes)
        return result

    def _see(self, storage):
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = (weakref.ref(storage, lambda _: self._note(key, 0)), 0)
        self._note(key, storage.nbytes())

    def _note(self, key, size):
        reference, before = self._sizes.pop(key)
        self.bytes += size - before
        if reference() is not None:
            self._sizes[key] = (reference, size)


@pytest.fixture
def ranks():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def recipe_of(folder, width, tokens, **train):
    shape = find_model(f"Qwen2.5-{width}")
    config = Qwen2Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=3, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
    )  # fmt: skip
    config.save_pretrained(folder)
    return Recipe.model_validate({
        "model": str(folder), "reward": "parity:reward", "data": {"train": "t.jsonl", "max_prompt_tokens": 1024},
        "rollout": {"max_response_tokens": tokens - 1024, "vllm": {"kv_cache_memory_bytes": 1 << 40}},
        "train": {"ranks": RANKS, "dtype": "bfloat16", "tokens_per_microbatch": tokens, **train},
    })  # fmt: skip


def policy_of(recipe, mesh, group):
    """The policy of rank 0, as `load_policy_model` and `Trainer` make it."""
    network = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(recipe.model), dtype=torch.float32, attn_implementation=module.PACKED
    )
    policy = module.PolicyModel(network, 1.0, group)
    module._shard(policy, torch.device("cpu"), mesh, torch.bfloat16)
    policy.eval()
    if recipe.train.activation_checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in module.decoder_layers(network):
            layer.training = True
    return policy


def batch_of(tokens, size):
    """Rank 0's share of one sequence."""
    share = tokens // size
    return module.PackedTokens(
        token_ids=torch.zeros(1, share, dtype=torch.long), positions=torch.zeros(1, share, dtype=torch.long),
        # Fakes have no numbers to list.
        boundaries=SimpleNamespace(diff=lambda: SimpleNamespace(tolist=lambda: [tokens])), longest=tokens,
        rows=torch.zeros(share - 1, dtype=torch.long), next_tokens=torch.zeros(share - 1, dtype=torch.long),
        own=slice(0, share - 1), num_rows=tokens - 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "tokens", "train"),
    [
        ("7B", 8192, {}),
        ("7B", 33792, {"activation_checkpointing": True}),
        ("32B", 34816, {"activation_checkpointing": True, "sequence_parallel": RANKS}),
    ],
)
def test_each_phase_takes_what_is_reckoned(width, tokens, train, tmp_path, ranks):
    recipe = recipe_of(tmp_path, width, tokens, **train)
    plan = {found.phase: found for found in plan_of(recipe).memory if found.where == "a trainer rank's process"}
    tensors = {phase: {part.name: part.num_bytes for part in found.parts} for phase, found in plan.items()}
    for parts in tensors.values():
        del parts["trainer rank runtime"], parts["weights, shared"]
    del tensors["training"]["samples"]
    size = recipe.train.sequence_parallel
    group = ALONE if size == 1 else SequenceGroup(group=dist.group.WORLD, rank=0, size=size)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, Held(fake) as held:
        policy = policy_of(recipe, ranks, group)
        optimizer = torch.optim.AdamW(module._decay_groups(policy, recipe.train), fused=True)

        def log_probs():
            with torch.no_grad():
                policy(batch_of(tokens, size), entropy=True)

        def backward():
            policy(batch_of(tokens, size)).sum().backward()

        def step():
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()

        backward()
        step()  # makes the moments
        optimizer.zero_grad(set_to_none=True)
        kept, inference = held.bytes, held.peak(log_probs)
        policy.reshard()  # as `Trainer.release`
        for _ in range(2):  # the first time DTensor makes whole fakes
            sync = held.peak(lambda: deque(WholeTensors(policy.model, torch.bfloat16), maxlen=0))
        backward()
        # A second micro-batch, beside the gradients of the first.
        update, stepping = held.peak(backward), held.peak(step)
    assert kept == pytest.approx(sum(tensors["rollout"].values()), rel=0.01)
    assert held.gathered == {torch.bfloat16}, "weights travel in the type that engines get"
    assert sync == pytest.approx(sum(tensors["sync"].values()), rel=0.01)
    training = sum(tensors["training"].values())
    assert max(inference, stepping) < update <= training <= 1.1 * update
