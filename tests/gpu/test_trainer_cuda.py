"""The trainer on a CUDA device: FlashAttention over packed sequences, bfloat16, memory given back. Torch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tltlab.runtime.recipe.recipe import TrainConfig
from tltlab.runtime.trainer.ranks import be_repeatable
from tltlab.runtime.trainer.trainer import Sample, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

VOCABULARY = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of random weights with grouped-query attention and heads of the usual width."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    drawn = []
    for n in range(16):
        tokens = rng.integers(0, VOCABULARY, 5 + 30 * n).tolist()
        drawn.append(
            Sample(
                prompt_token_ids=rng.integers(0, VOCABULARY, 4 + n).tolist(),
                token_ids=tokens,
                logprobs=[-6.0] * len(tokens),
                reward=float(n % 2),
                group=n // 4,
            )
        )
    return drawn


PAIRS = [(s.prompt_token_ids, s.token_ids) for s in samples()]


@contextmanager
def trainer(model: Path, **config: Any) -> Iterator[Trainer]:
    config = {"tokens_per_microbatch": 1024, "lr": 1e-4} | config
    made = Trainer(str(model), TrainConfig(**config), temperature=1.0, max_response_tokens=512, seed=0)
    try:
        yield made
    finally:
        made.close()


def train(made: Trainer, rl_step: int) -> None:
    made.old_logprobs(samples())
    made.update(rl_step)


def flat(made: Trainer) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in made.weights().values()])


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> list[np.ndarray]:
    """The log-probs that float32 on the CPU gives."""
    with trainer(model, backend="gloo", dtype="float32") as made:
        return made.score(PAIRS)


def test_bfloat16_is_what_a_device_gets_and_its_logprobs_are_those_of_float32(model: Path, on_cpu: list[np.ndarray]):
    with trainer(model) as made:
        assert made.dtype == torch.bfloat16
        assert next(made.policy.parameters()).is_cuda
        for found, expected in zip(made.score(PAIRS), on_cpu, strict=True):
            assert np.abs(found - expected).mean() < 0.02


def test_float32_agrees_closely(model: Path, on_cpu: list[np.ndarray]):
    with trainer(model, dtype="float32") as made:
        for found, expected in zip(made.score(PAIRS), on_cpu, strict=True):
            assert found == pytest.approx(expected, abs=2e-3)


def test_a_sequence_gets_the_same_logprobs_whatever_it_is_packed_with(model: Path):
    with trainer(model) as packed, _alone(model) as alone:
        for found, expected in zip(packed.score(PAIRS), alone, strict=True):
            assert np.abs(found - expected).mean() < 0.01


@contextmanager
def _alone(model: Path) -> Iterator[list[np.ndarray]]:
    with trainer(model, tokens_per_microbatch=1, dtype="float32") as made:
        yield made.score(PAIRS)


def test_good_responses_become_likelier_with_checkpointed_activations(model: Path):
    with trainer(model, activation_checkpointing=True) as made:
        before = [float(logp.mean()) for logp in made.score(PAIRS)]
        for rl_step in range(3):
            train(made, rl_step)
        gained = [float(logp.mean()) - was for logp, was in zip(made.score(PAIRS), before, strict=True)]
    assert np.mean(gained[1::2]) > np.mean(gained[::2])


def test_an_offloaded_trainer_gives_the_device_back_and_goes_on(model: Path):
    with trainer(model) as made:
        train(made, 0)
        held, weights = torch.cuda.memory_allocated(), flat(made)
        made.offload()
        assert torch.cuda.memory_allocated() < 0.2 * held
        made.onload()
        assert torch.equal(flat(made), weights)
        train(made, 1)
        assert not torch.equal(flat(made), weights)


def test_a_resumed_trainer_goes_on_bit_by_bit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # FlashAttention's backward adds in no fixed order unless it is told to.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ends = []
    with trainer(model, deterministic=True) as made:
        train(made, 0)
        made.save_checkpoint(str(tmp_path))
        train(made, 1)
        ends.append(flat(made))
    with trainer(model, deterministic=True) as resumed:
        resumed.load_checkpoint(str(tmp_path))
        train(resumed, 1)
        ends.append(flat(resumed))
    be_repeatable(False)
    assert torch.equal(*ends)
