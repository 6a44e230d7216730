"""A random model of 24 words, made here: small enough that its exact distribution can be written down."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from .small_models import small_shape

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = 20

PARITY = """
from tltlab import NO_SPECULATION, Selector, Strategy

def reward(prompt, response, answer):
    return float(len(response.split()) % 2 == 0)

class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 2), Strategy.chain("ngram", 8))

    def choose(self, state):
        return self.strategies[2 if state.batch <= 2 else 1 if state.batch <= 8 else 0]
"""


@pytest.fixture
def sockets():
    """A folder with a short path, however long that of `tmp_path` is: a socket's has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A Llama folder with random weights, tokenizer, and prompts; vocabulary: 4 special tokens and w0..w19."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("random-model")
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**small_shape(num_key_value_heads=2, head_dim=32)))
    with torch.no_grad():
        # Wide enough logits that a wrong temperature shows, flat enough that many tokens occur.
        model.lm_head.weight.mul_(8.0)
    model.save_pretrained(folder)
    for name, numbers in (("train", range(32)), ("heldout", range(32, 48))):
        rows = [
            {"prompt_id": f"p{n}", "prompt": " ".join(f"w{(n + i * 7) % WORDS}" for i in range(6)), "answer": "even"}
            for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parity.py").write_text(PARITY)
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """The audit's target of five tokens and its drafters."""
    from tltlab.runtime.audit.models import make_tiny_models

    return make_tiny_models(tmp_path_factory.mktemp("tiny-models"))


@pytest.fixture(scope="session")
def recipe_file(random_model):
    """A recipe for the random model; its reward, 1 for an even number of words, is a module in the model's folder."""
    path = random_model / "recipe.toml"
    path.write_text(
        f"""
model = "{random_model}"
reward = "parity:reward"
[data]
train = "{random_model / "train.jsonl"}"
heldout = "{random_model / "heldout.jsonl"}"
[rollout]
prompts_per_step = 4
group_size = 4
max_response_tokens = 48
max_draft_depth = 8
repeat_every = 2
vllm = {{max_num_seqs = 32, max_model_len = 128, kv_cache_memory_bytes = 33554432}}
[train]
steps = 3
threads = 1
[eval]
num_prompts = 8
"""
    )
    return path
