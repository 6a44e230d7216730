"""Adapters are trained and the base stands still: in a trainer, its checkpoints, what it sends and what it saves."""

from contextlib import closing

import numpy as np
import peft
import pytest
import torch

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.recipe.dry_run import plan_of
from tltlab.runtime.recipe.recipe import load_recipe

from ..small_models import loaded
from .test_trainer import exact_logprobs, flat, model, near, samples, saved, tied_model, trained, trainer, updated

__all__ = ["model", "tied_model"]

PAIRS = [(s.prompt_token_ids, s.token_ids) for s in samples()]


def adapted(folder, lora=(), **config):
    return trainer(folder, lr=2e-2, lora={"rank": 4, "alpha": 8} | dict(lora), **config)


def scores(made):
    return np.concatenate(made.score(PAIRS))


def test_fresh_adapters_change_no_logprob(model):
    made = adapted(model)
    assert made.reference is None
    assert (scores(made) == scores(trainer(model))).all()


@pytest.mark.parametrize("lora", [{}, {"targets": ["q_proj", "down_proj"]}, {"serve": "adapter"}])
def test_adapters_alone_move_and_are_sent(model, lora):
    made, origin = adapted(model, lora), loaded(model).state_dict()
    shared = made.frozen()
    trained(made, 2)
    tensors = dict(made.policy.model.named_parameters())
    adapters = {name for name, tensor in tensors.items() if tensor.requires_grad}
    assert adapters == {name for name in tensors if ".lora_" in name}
    assert {id(tensor) for tensor in made.optimizer.state} == {id(tensors[name]) for name in adapters}
    merged = made.weights()
    for name, whole in merged.items():
        a, b = (tensors.get(f"{name.removesuffix('.weight')}.lora_{x}.default.weight") for x in "AB")
        assert torch.allclose(whole, origin[name] if a is None else origin[name] + 2 * b @ a, rtol=0, atol=1e-6)
    now = dict(made._sent)
    assert [tensor.shape for tensor in now.values()] == [meta.shape for meta in made._sent.metadata()]
    if lora.get("serve") == "adapter":
        assert len(now) == len(adapters)
    else:
        moved = {name for name in merged if not torch.equal(merged[name], origin[name])}
        assert moved <= now.keys() <= {name for name in merged if "self_attn" in name or "mlp" in name}
        assert all(torch.equal(merged[name], tensor) for name, tensor in now.items())
    assert torch.equal(made.frozen().lm_head, shared.lm_head), "a drafter's target stands still"


def test_recomputed_activations_change_no_update(model):
    assert near(trained(adapted(model, activation_checkpointing=True)), trained(adapted(model)), 2e-5)


def test_the_reference_is_the_base(random_model):
    made = adapted(random_model, kl_coef=0.1)
    assert updated(made).drift_kl > 1e-3
    assert updated(made, rl_step=1).kl > 1e-3
    with torch.no_grad():
        found = made.reference(made._packed(PAIRS)).numpy()
    assert near(found, scores(trainer(random_model)), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_is_bit_equal(random_model, tmp_path, dtype):
    folder, ends = str(tmp_path / "saved"), []
    for resumes in (False, True):
        with closing(adapted(random_model, kl_coef=0.1, dtype=dtype)) as made:
            if resumes:
                made.load_checkpoint(folder)
            else:
                trained(made, 2)
                made.save_checkpoint(folder)
            ends.append(([updated(made, rl_step=n) for n in (2, 3)], flat(made).tolist()))
    assert ends[0] == ends[1]
    other = loaded(random_model)
    with torch.no_grad():
        other.model.embed_tokens.weight[3, 5] += 1e-3
    for build, name in ((adapted, saved(other, tmp_path / "other", random_model)), (trainer, random_model)):
        with refused(RunError), closing(build(name, dtype=dtype)) as made:
            made.load_checkpoint(folder)


def test_a_saved_policy_loads_merged_and_by_peft(model, tmp_path):
    made = adapted(model, {"targets": ["q_proj", "up_proj"]})
    trained(made, 2)
    made.save(str(tmp_path / "final"))
    by_peft = peft.PeftModel.from_pretrained(loaded(model), tmp_path / "final" / "adapter")
    for network in (loaded(tmp_path / "final"), by_peft.eval()):
        with torch.no_grad():
            found = torch.cat([exact_logprobs(network, sample) for sample in samples()])
        assert near(found.numpy(), scores(made), 2e-5)


def test_unknown_targets_are_refused_by_name(random_model):
    with refused(ConfigError, naming=("lm_head", "q_proj", "down_proj")):
        adapted(random_model, {"targets": ["lm_head"]})


def test_a_plan_counts_what_adapters_take(recipe_file):
    recipe = load_recipe(recipe_file, ["train.lora.rank=4"])
    made = adapted(recipe.model)
    updated(made)
    planned = {part.name: part.num_bytes for memory in plan_of(recipe).memory for part in memory.parts}
    for name in ("master weights", "Adam moments"):
        assert planned[name] == pytest.approx(made.memory().parts[name], rel=0.01)
