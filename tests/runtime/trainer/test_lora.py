"""Adapters are trained and the base stands still: in a trainer, its checkpoints, what it sends and what it saves."""

import json
from contextlib import closing

import numpy as np
import peft
import pytest
import torch

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.trainer.lora import BasePolicy

from ..small_models import loaded
from .test_trainer import exact_logprobs, flat, model, near, samples, saved, tied_model, trained, trainer, updated

__all__ = ["model", "tied_model"]

LORA = {"rank": 4, "alpha": 8}


def adapted(folder, *, lora=None, **config):
    return trainer(folder, lr=2e-2, lora=LORA | (lora or {}), **config)


def pairs():
    return [(s.prompt_token_ids, s.token_ids) for s in samples()]


def joined(arrays):
    return np.concatenate(list(arrays))


def test_fresh_adapters_change_no_logprob(model):
    assert np.array_equal(joined(adapted(model).score(pairs())), joined(trainer(model).score(pairs())))


@pytest.mark.parametrize("lora", [{}, {"targets": ["q_proj", "down_proj"]}, {"serve": "adapter"}])
def test_adapters_alone_are_trained_and_sent(model, lora):
    made = adapted(model, lora=lora)
    base = {name: p.clone() for name, p in made.policy.named_parameters() if not p.requires_grad}
    sent_first = {name: part.clone() for name, part in made._sender.source}
    trained(made, 2)
    now = dict(made.policy.named_parameters())
    assert all(torch.equal(now[name], part) for name, part in base.items())
    assert {name.split(".")[-3] for name in now.keys() - base.keys()} == {"lora_A", "lora_B"}
    assert len(made.optimizer.state) == len(now) - len(base)

    origin, merged = loaded(model).state_dict(), made.weights()
    scale = LORA["alpha"] / LORA["rank"]
    named = {name.removeprefix("model."): part for name, part in now.items()}
    for name, part in merged.items():
        module = name.removesuffix(".weight")
        a, b = (named.get(f"{module}.lora_{x}.default.weight") for x in "AB")
        wanted = origin[name] if a is None else origin[name] + scale * b @ a
        assert torch.allclose(part, wanted, rtol=0, atol=1e-6)
    assert {name for name in merged if not torch.equal(merged[name], origin[name])} == {
        name.removesuffix(".lora_A.default.weight") + ".weight" for name in named if ".lora_A." in name
    }
    sent = dict(made._sender.source)
    assert [(meta.name, meta.shape) for meta in made._sender.source.metadata()] == [
        (name, tuple(part.shape)) for name, part in sent.items()
    ]
    assert any(not torch.equal(sent[name], part) for name, part in sent_first.items())
    if lora.get("serve") == "adapter":
        assert all(name.startswith("base_model.model.model.layers.") for name in sent)
    else:
        assert sent.keys() < merged.keys()
        assert not any("embed" in name or "lm_head" in name or name.endswith("norm.weight") for name in sent)
        assert all(torch.equal(merged[name], part) for name, part in sent.items())


def test_memory_settings_change_no_update(model):
    whole = trained(adapted(model, kl_coef=0.1))
    assert near(trained(adapted(model, kl_coef=0.1, tokens_per_microbatch=40)), whole, 2e-5)
    assert near(trained(adapted(model, kl_coef=0.1, activation_checkpointing=True)), whole, 2e-5)


def test_the_reference_is_the_base(random_model):
    made = adapted(random_model, kl_coef=0.1)
    assert updated(made).kl == pytest.approx(0, abs=1e-6) or made.steps > 1
    assert updated(made, rl_step=1).kl > 1e-4
    assert isinstance(made.reference, BasePolicy)
    before = trainer(random_model).score(pairs())
    with torch.no_grad():
        packed = made._packed(pairs())
        assert near(made.reference(packed).numpy(), joined(before), 1e-6)
        assert not near(made.policy(packed).numpy(), joined(before), 1e-3)
    assert made.memory().parts["reference model"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_is_bit_equal(random_model, tmp_path, dtype):
    with closing(adapted(random_model, kl_coef=0.1, dtype=dtype)) as made:
        trained(made, 2)
        made.save_checkpoint(str(tmp_path / "ck"))
        went_on = [updated(made, rl_step=n) for n in (2, 3)], flat(made)
    with closing(adapted(random_model, kl_coef=0.1, dtype=dtype)) as resumed:
        resumed.load_checkpoint(str(tmp_path / "ck"))
        again = [updated(resumed, rl_step=n) for n in (2, 3)], flat(resumed)
    assert again[0] == went_on[0]
    assert np.array_equal(again[1], went_on[1])
    size = sum(file.stat().st_size for file in (tmp_path / "ck" / "tensors").iterdir())
    assert size < 1.2 * 12 * sum(p.numel() for p in made.policy.parameters() if p.requires_grad) + 20_000


def test_adapters_of_another_model_are_refused(random_model, tied_model, tmp_path):
    made = adapted(random_model)
    updated(made)
    made.save_checkpoint(str(tmp_path / "ck"))
    other = loaded(random_model)
    with torch.no_grad():
        other.model.embed_tokens.weight[3, 5] += 1e-3
    for folder in (saved(other, tmp_path / "other", random_model), tied_model):
        with refused(RunError):
            adapted(folder).load_checkpoint(str(tmp_path / "ck"))
    with refused(RunError):
        trainer(random_model).load_checkpoint(str(tmp_path / "ck"))


def test_a_saved_policy_loads_merged_and_by_peft(model, tmp_path):
    made = adapted(model, lora={"targets": ["q_proj", "up_proj"]})
    trained(made, 2)
    made.save(str(tmp_path / "final"))
    by_peft = peft.PeftModel.from_pretrained(loaded(model), tmp_path / "final" / "adapter").eval()
    with torch.no_grad():
        for network in (loaded(tmp_path / "final"), by_peft):
            found = joined(exact_logprobs(network, sample).numpy() for sample in samples())
            assert near(found, joined(made.score(pairs())), 2e-5)
    settings = json.loads((tmp_path / "final" / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "up_proj"]


def test_unknown_targets_are_refused_by_name(random_model):
    with refused(ConfigError, naming=("q_prj", "q_proj", "down_proj")):
        adapted(random_model, lora={"targets": ["q_prj"]})
    with refused(ConfigError, naming=("lm_head",)):
        adapted(random_model, lora={"targets": ["lm_head"]})


def test_what_a_drafter_shares_stands_still(model):
    made = adapted(model)
    before = made.frozen()
    trained(made, 2)
    after = made.frozen()
    assert torch.equal(before.embedding, after.embedding)
    assert torch.equal(before.lm_head, after.lm_head)
