"""What a dry run reckons, held against what real processes hold: tensors part by part, and all that is resident."""

import ctypes
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from tltlab.runtime.recipe.dry_run import PHASES, plan_of
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.run.grpo import train
from tltlab.runtime.trainer.samples import Sample
from tltlab.runtime.trainer.trainer import Trainer

CLOSE = 0.1
MMAP_THRESHOLD = -3
"""In glibc's malloc.h."""
UPDATE = ("gradients", "activations", "logits and gradients")
GLIBC_BYTES = 150e6
BOUNDS = ("update", "captured states", "drafter history", "drafter, held out", "history")
"""Parts of which a dry run tells the most that they can take."""


@pytest.fixture(scope="module")
def wide_model(random_model, tmp_path_factory):
    """A model whose tensors are larger than what any estimate leaves out; tokenizer and prompts of the small one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(random_model, folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def recipe(model, tokens_per_microbatch=2048):
    """Every micro-batch is filled, and with a penalty every response is trained; buffers are too small for all."""
    return Recipe.model_validate(
        {
            "model": str(model),
            "reward": "tltlab.runtime.models.tasks:subset_sum_reward",
            "data": {"train": str(model / "train.jsonl"), "max_prompt_tokens": 8},
            "rollout": {
                "num_workers": 1, "prompts_per_step": 8, "group_size": 4, "max_response_tokens": 120,
                "max_draft_depth": 8, "policy": "beg-mab-learned",
                "vllm": {"max_num_seqs": 32, "max_model_len": 128, "kv_cache_memory_bytes": 40 << 20},
            },
            "train": {"steps": 2, "minibatches": 1, "kl_coef": 0.01, "tokens_per_microbatch": tokens_per_microbatch},
            "drafter": {"schedule": {"kind": "always"}, "ages": 0, "buffer": {"max_bytes": 2 << 20}},
            "reward_pool": {"processes": 0},
            "eval": {"num_prompts": 0},
            "log": {"tensorboard": False},
        }
    )  # fmt: skip


def reckoned(plan, process):
    """The most that each part of a process takes in any phase."""
    parts = {}
    for found in plan.memory:
        for part in found.parts:
            if part.process == process:
                parts[part.name] = max(parts.get(part.name, 0.0), part.num_bytes)
    return parts


def plan_bytes(plan, process, phase):
    """Of one process in a phase."""
    on_host = next(found for found in plan.memory if found.where == "the driver's host" and found.phase == phase)
    return sum(part.num_bytes for part in on_host.parts if part.process == process)


def update_bytes(model):
    """Bytes that an update took at most, in a process in which nothing else was."""
    # Each tensor has its own pages and gives them back: glibc keeps nothing.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    trainer = Trainer(str(model), recipe(model, 1024).train, temperature=1.0, max_response_tokens=120, seed=0)
    samples = [
        Sample(prompt_token_ids=[5] * 6, token_ids=[7] * 120, logprobs=[-6.0] * 120, reward=float(i % 2), group=i // 4)
        for i in range(16)
    ]
    # The first update makes the moments.
    for rl_step, batch in enumerate((samples[:4], samples)):
        trainer.old_logprobs(batch)
        trainer.update(rl_step)
    return trainer.memory().parts["update"]


def test_an_update_takes_what_is_reckoned(wide_model):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        found = alone.submit(update_bytes, wide_model).result()
    expected = reckoned(plan_of(recipe(wide_model, 1024)), "trainer rank")
    assert found == pytest.approx(sum(expected[name] for name in UPDATE), rel=CLOSE)


@pytest.mark.engine
def test_a_run_holds_what_its_plan_states(wide_model, tmp_path):
    plan = plan_of(recipe(wide_model))
    train(recipe(wide_model), tmp_path / "run")
    processes = json.loads((tmp_path / "run" / "memory.json").read_text())["processes"]
    assert {found["process"] for found in processes} == {"rollout worker", "trainer rank", "drafter trainer", "driver"}
    for found in processes:
        expected = reckoned(plan, found["process"] if found["process"] != "driver" else "Ray's object store")
        # Of freed memory glibc keeps what the flat part of the process allows for.
        expected["update"] = sum(expected.get(name, 0.0) for name in UPDATE) + GLIBC_BYTES
        for name, num_bytes in found["parts"].items():
            least = 0.0 if name in BOUNDS else (1 - CLOSE) * expected[name]
            assert least <= num_bytes <= (1 + CLOSE) * expected[name], (found["process"], name, expected[name])
        total = max(plan_bytes(plan, found["process"], phase) for phase in PHASES)
        # The driver is the process of the tests.
        if found["process"] != "driver":
            assert found["peak_bytes"] <= (1 + CLOSE) * total, (found["process"], total)
