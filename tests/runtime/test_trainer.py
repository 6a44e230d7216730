"""The trainer on a model whose log-probs can be worked out one response at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tltlab.errors import ConfigError
from tltlab.runtime.recipe import TrainConfig
from tltlab.runtime.trainer import Sample, Trainer

TEMPERATURE = 0.8


def samples(num: int = 8) -> list[Sample]:
    rng = np.random.default_rng(0)
    drawn = []
    for n in range(num):
        tokens = rng.integers(4, 24, 3 + 5 * n).tolist()
        prompt = rng.integers(4, 24, 2 + n % 3).tolist()
        drawn.append(
            Sample(
                prompt_token_ids=prompt,
                token_ids=tokens,
                logprobs=[-1.0] * len(tokens),
                reward=float(n % 2),
                group=n // 4,
            )
        )
    return drawn


def trainer(model: Path, **config: float) -> Trainer:
    return Trainer(str(model), TrainConfig(**config), temperature=TEMPERATURE, seed=0)


def test_padding_and_order_change_no_logprob(random_model: Path):
    made = trainer(random_model, tokens_per_microbatch=64)
    made.old_logprobs(samples())
    exact = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    for sample, found in zip(samples(), made._old, strict=True):
        ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
        with torch.no_grad():
            logp = torch.log_softmax(exact(ids).logits[0, :-1] / TEMPERATURE, -1)
        start = len(sample.prompt_token_ids) - 1
        expected = logp[start:].gather(1, ids[0, start + 1 :, None])[:, 0]
        assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def test_an_update_does_not_depend_on_the_size_of_micro_batches(random_model: Path):
    weights = []
    for budget in (40, 4096):
        made = trainer(random_model, tokens_per_microbatch=budget)
        made.old_logprobs(samples())
        made.update()
        weights.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]).numpy())
    assert weights[0] == pytest.approx(weights[1], abs=2e-5)


def test_groups_without_a_difference_teach_nothing(random_model: Path):
    made = trainer(random_model)
    before = made.weights()
    same = [Sample(prompt_token_ids=[5], token_ids=[6, 7], logprobs=[-1.0] * 2, reward=1.0, group=0) for _ in range(4)]
    made.old_logprobs(same)
    assert made.update()["trained_responses"] == 0
    assert all((before[name] == tensor).all() for name, tensor in made.weights().items())


def test_good_responses_become_likelier(random_model: Path):
    made = trainer(random_model, lr=1e-3)
    made.old_logprobs(samples())
    before = [float(old.sum()) for old in made._old]
    made.update()
    made.old_logprobs(samples())
    gained = [float(old.sum()) - was for old, was in zip(made._old, before, strict=True)]
    assert np.mean(gained[1::2]) > np.mean(gained[::2])


def test_a_penalty_keeps_the_policy_near_its_reference(random_model: Path):
    distances = {}
    for kl_coef in (1e-6, 10.0):
        made = trainer(random_model, lr=1e-3, kl_coef=kl_coef)
        for _ in range(6):
            made.old_logprobs(samples())
            metrics = made.update()
        distances[kl_coef] = metrics["kl"]
    assert 0 < distances[10.0] < distances[1e-6]


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot load a model"):
        trainer(tmp_path)
