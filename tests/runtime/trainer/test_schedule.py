"""How far each optimizer step goes: the learning rate over a run, passes over a batch, and what decays."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer.samples import minibatches_of
from tltlab.runtime.trainer.trainer import learning_rate

from .test_trainer import flat, near, samples, trainer, updated

LR, SHARE = 1e-3, 0.1


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_rates_are_those_of_torchs_schedulers(kind, warmup):
    config = TrainConfig(lr=LR, lr_schedule=kind, lr_min_share=SHARE, warmup_steps=warmup, steps=6, passes=2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    num = 6 * 2 * 2 - warmup
    after_warmup = (
        CosineAnnealingLR(optimizer, T_max=num, eta_min=SHARE * LR)
        if kind == "cosine"
        else LinearLR(optimizer, start_factor=1.0, end_factor=SHARE, total_iters=num)
    )
    expected = [LR * (n + 1) / warmup for n in range(warmup)]
    for _ in range(num):
        expected += after_warmup.get_last_lr()
        optimizer.step()
        after_warmup.step()
    found = [learning_rate(config, n, n) for n in range(6 * 2 * 2)]
    assert found == pytest.approx(expected, rel=1e-9)
    longer = config.model_copy(update={"steps": 12})
    assert learning_rate(longer, 23, 23) > found[-1], "a longer run has a longer ramp"


def test_a_minibatch_without_gradient_takes_its_place(random_model):
    made = trainer(random_model, lr=LR, lr_schedule="linear", steps=4, minibatches=2)
    alike = [replace(sample, reward=1.0) for sample in samples()]
    assert updated(made, alike, rl_step=0).lr == 0.0
    assert updated(made, rl_step=1).lr == pytest.approx(LR * (1 - 3 / 8))


def test_later_passes_keep_the_ratios_of_the_first(random_model):
    twice, once = (trainer(random_model, lr=LR, minibatches=1, passes=n) for n in (2, 1))
    updated(twice)
    updated(once)
    once.update(0)
    assert near(flat(twice), flat(once), 1e-6)


def test_each_pass_has_an_order_of_its_own():
    config = TrainConfig(minibatches=3)
    orders = [torch.cat(minibatches_of(16, config, 7, 5, number)).tolist() for number in range(3)]
    assert orders[0] == np.random.default_rng([7, 5]).permutation(16).tolist(), "one pass is as it was"
    assert len(set(map(tuple, orders))) == 3


def test_norms_and_biases_do_not_decay(random_model, tmp_path):
    plain, exempt, whole = (
        trainer(random_model, lr=LR, minibatches=1, weight_decay=decay, decay_all=decay_all)
        for decay, decay_all in ((0.0, True), (0.5, False), (0.5, True))
    )
    before = {name: p.detach().clone() for name, p in plain.policy.named_parameters()}
    for made in (plain, exempt, whole):
        updated(made)
    for name, parameter in plain.policy.named_parameters():
        decayed = parameter - LR * 0.5 * before[name]
        for made, decays in ((exempt, parameter.ndim > 1), (whole, True)):
            expected = decayed if decays else parameter
            assert torch.allclose(dict(made.policy.named_parameters())[name], expected, rtol=0, atol=1e-6), name
    whole.save_checkpoint(str(tmp_path))
    exempt.load_checkpoint(str(tmp_path))
    for mine, theirs in zip(exempt.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(exempt.optimizer.state[mine]["exp_avg_sq"], whole.optimizer.state[theirs]["exp_avg_sq"])
