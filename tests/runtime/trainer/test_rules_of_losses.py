"""The table of losses: each row against a plain formula, and what holds for all of them in a trainer."""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
import torch

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.files import found_in
from tltlab.runtime.recipe.checks import objective
from tltlab.runtime.recipe.sections import OBJECTIVES, TrainConfig
from tltlab.runtime.recipe.user_code import code_of
from tltlab.runtime.trainer.advantages import EPSILON
from tltlab.runtime.trainer.losses import RULES, kl_estimate
from tltlab.runtime.trainer.trainer import Trainer

from ..small_models import loaded, small_recipe
from . import test_trainer as one_rank
from .test_losses import CAP, GROUPS, LENGTHS, REWARDS, batch, loss_of, terms_of

SETTINGS = {
    "clip": {},
    "dual clip": {"dual_clip": 1.1},
    "gspo": {"algorithm": "gspo"},
    "wide gspo": {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.2, "correction": "behaviour"},
    "cispo": {"algorithm": "cispo"},
    "masked": {"correction": "masked", "correction_cap": 1.3},
    "sequence": {"correction_level": "sequence", "correction_cap": 1.5},
    "masked sequence": {"correction": "masked", "correction_level": "sequence"},
    "uncorrected": {"correction": "none", "kl_coef": 0.1},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1"},
    "k2 masked": {"kl_coef": 0.1, "kl_estimator": "k2", "correction": "masked", "correction_cap": 1.2},
    "k3 behaviour": {"kl_coef": 0.1, "correction": "behaviour", "correction_cap": 1.2},
    "entropy": {"entropy_coef": 0.3},
}
"""A row of every rule, alone and with others."""


def test_settings_have_the_tables_names():
    """A setting is refused or has a formula."""
    for name in ("ratio", "kl_estimator", "correction"):
        assert set(get_args(TrainConfig.model_fields[name].annotation)) == set(RULES[name])
    assert set(OBJECTIVES) == set(RULES["objective"])


def weight(log_ratio, config):
    if config.correction in ("behaviour", "none"):
        return 1.0
    ratio = math.exp(log_ratio)
    if config.correction == "masked":
        return ratio if 1 / config.correction_cap <= ratio <= config.correction_cap else 0.0
    return min(ratio, config.correction_cap)


def plain(config, data):
    """The loss, token by token."""
    kl = {"k1": lambda r: r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(-r) - 1 + r}[config.kl_estimator]
    shaped = list(REWARDS)
    if config.overlong == "penalty":
        shaped = [r - max(0.0, n - 0.8 * CAP) / (0.2 * CAP) for r, n in zip(REWARDS, LENGTHS, strict=True)]
    total = 0.0
    for i, length in enumerate(LENGTHS):
        group = [r for r, g in zip(shaped, GROUPS, strict=True) if g == GROUPS[i]]
        advantage = (shaped[i] - np.mean(group)) / (np.std(group, ddof=1) + EPSILON)
        new, old, engine, ref, entropy = (data[name][i] for name in ("new", "old", "engine", "ref", "entropy"))
        base = engine if config.correction == "behaviour" else old
        for t in range(length):
            ratio = math.exp(new[t] - base[t])
            if config.ratio == "sequence":
                ratio = math.exp(sum(new[u] - base[u] for u in range(length)) / length)
            kept = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            gain = min(ratio * advantage, kept * advantage)
            if config.objective == "cispo":
                gain = kept * advantage * new[t]
            elif config.dual_clip and advantage < 0:
                gain = max(gain, config.dual_clip * advantage)
            span = range(length) if config.correction_level == "sequence" else [t]
            loss = -gain * weight(sum(old[u] - engine[u] for u in span), config)
            rule = "truncated" if config.correction == "behaviour" else config.correction
            source = weight(new[t] - engine[t], config.model_copy(update={"correction": rule}))
            loss += config.kl_coef * source * kl(new[t] - ref[t]) - config.entropy_coef * entropy[t]
            total += loss / (length * 6 if config.aggregation == "sequence" else sum(LENGTHS))
    return total


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_row_is_its_plain_formula(settings):
    config = TrainConfig(**settings)
    for seed in range(3):
        data = batch(seed)
        assert loss_of(config, data) == pytest.approx(plain(config, data), rel=1e-6, abs=1e-7)


def test_which_clipped_tokens_have_a_gradient():
    """In CISPO all, in PPO none; with a dual clip neither has a far one with a negative advantage."""
    new = torch.tensor([1.0, 1.0, 0.0, 200.0], dtype=torch.float64, requires_grad=True)
    tokens = {"old_logp": torch.zeros(4), "advantages": torch.tensor([1.0, -1.0, 1.0, 1.0]), "weights": torch.ones(4)}
    tokens["correction"] = torch.full((4,), 2.0)
    for settings, gradient, clipped in (
        ({"objective": "cispo"}, [-2.56, 2.56, -2.0, -2.56], 3),
        ({}, [0.0, 2 * math.e, -2.0, 0.0], 2),
        ({"dual_clip": 2.0}, [0.0, 0.0, -2.0, 0.0], 3),
    ):
        terms = terms_of(TrainConfig(**settings), logp=new, **tokens)
        assert torch.autograd.grad(terms.loss, new)[0].tolist() == pytest.approx(gradient)
        assert terms.clip_fraction == clipped


def test_a_sequences_ratio_is_of_drawn_tokens():
    """Not of the last one, which is a tool's."""
    near = torch.tensor([0.2, 0.4, 9.0], dtype=torch.float64, requires_grad=True)
    tokens = {"weights": torch.tensor([1.0, 1.0, 0.0]), "responses": torch.zeros(3).long()}
    config = TrainConfig(algorithm="gspo", clip_high=0.5)
    terms = terms_of(config, logp=near, old_logp=torch.zeros(3), advantages=torch.ones(3), **tokens)
    assert terms.loss.item() == pytest.approx(-2 * math.exp(0.3))
    assert torch.autograd.grad(terms.loss, near)[0].tolist() == pytest.approx([-math.exp(0.3)] * 2 + [0.0])


POLICY, ENGINE = torch.tensor([0.0, 1.0, -1.0, 0.5]), torch.tensor([-1.0, -1.0, 1.0, 0.0])
REF = torch.log_softmax(torch.tensor([1.5, -0.5, -0.5, 0.0], dtype=torch.float64), 0)


@pytest.mark.parametrize("logits", [POLICY, ENGINE], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_is_the_divergence_from_any_policys_tokens(estimator, logits):
    """All tokens of a small vocabulary, by the probability that they are drawn: no sampling error is left."""
    theta = POLICY.double().requires_grad_()
    behaviour = torch.log_softmax(logits.double(), 0)

    def penalty(**settings):
        logp = torch.log_softmax(theta, 0)
        nothing = torch.zeros(4, dtype=torch.float64)
        tokens = {"old_logp": logp.detach(), "behaviour_logp": behaviour, "ref_logp": REF, "advantages": nothing}
        config = TrainConfig(kl_coef=1.0, kl_estimator=estimator, **settings)
        return logp, terms_of(config, logp=logp, weights=behaviour.exp(), **tokens).loss

    logp, found = penalty(correction_cap=1e6)
    divergence = (logp.exp() * (logp - REF)).sum()
    estimated = (logp.exp() * kl_estimate(logp, REF, estimator)).sum()
    assert found.item() == pytest.approx(estimated.item())
    assert estimated.item() == pytest.approx(divergence.item(), rel=0.35 if estimator == "k2" else 1e-12)
    gradients = [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in (found, divergence)]
    assert torch.allclose(*gradients, rtol=1e-12)
    # Without weights the estimate is another number where the tokens are another policy's.
    unweighted = penalty(correction="none")[1].item()
    assert (unweighted == pytest.approx(found.item())) == (logits is POLICY)


def drawn_samples(trainer):
    """Samples whose log-probs are near the policy's, one with a tool's answer."""
    drawn, rng = one_rank.samples(), np.random.default_rng(1)
    drawn[3] = replace(drawn[3], from_tool=[0] * 6 + [1] * 5 + [0] * 7)
    near = trainer.score([(s.prompt_token_ids, s.token_ids) for s in drawn])
    return [
        replace(s, logprobs=(logp + rng.normal(0, 0.1, len(logp)) * s.drawn().numpy()).astype(np.float32))
        for s, logp in zip(drawn, near, strict=True)
    ]


TRAINED = SETTINGS | {
    "kl in reward": {"kl_coef": 0.1, "kl_in": "reward", "overlong": "filter"},
    "all": {"algorithm": "gspo", "kl_coef": 0.1, "entropy_coef": 0.1, "correction": "masked", "correction_cap": 50.0},
}


def learned(trainer, rl_steps=(0, 1)):
    """All weights after RL steps, None on ranks that do not gather them, and what the last one logs."""
    for rl_step in rl_steps:
        trainer.old_logprobs(drawn_samples(trainer), rl_step=rl_step)
        found = asdict(trainer.update(rl_step))
        assert found["grad_norm"] > 0
    weights = trainer.weights().values()
    return torch.cat([tensor.flatten() for tensor in weights]).numpy() if weights else None, found


def alike(found, expected):
    """True up to rounding; Adam's first steps are of the learning rate where a gradient is rounding alone."""
    assert np.mean(np.abs(found[0] - expected[0]) > 2e-5) < 1e-3
    return found[1] == pytest.approx(expected[1], abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("settings", TRAINED.values(), ids=TRAINED)
def test_micro_batches_and_a_resume_change_nothing(random_model, tmp_path, settings):
    small_recipe(train=settings)
    made = one_rank.trainer(random_model, tokens_per_microbatch=4096, **settings)
    learned(made, [0])
    made.save_checkpoint(str(tmp_path))
    whole = learned(made, [1])
    resumed = one_rank.trainer(random_model, tokens_per_microbatch=4096, **settings)
    resumed.load_checkpoint(str(tmp_path))
    assert (learned(resumed, [1])[0] == whole[0]).all()
    assert alike(learned(one_rank.trainer(random_model, tokens_per_microbatch=40, **settings)), whole)


def of_rank(rank, model, folder, size):
    """In its own process: the weights that each setting makes, on two ranks of which `size` share sequences."""
    found = {}
    for number, (name, settings) in enumerate(TRAINED.items()):
        trainer = Trainer(
            str(model), TrainConfig(sequence_parallel=size, tokens_per_microbatch=64, **settings),
            temperature=one_rank.TEMPERATURE, max_response_tokens=one_rank.CAP, seed=0, rank=rank, world=2,
            rendezvous=f"file://{folder}/{size}-{number}", timeout_s=300.0,
        )  # fmt: skip
        try:
            found[name] = learned(trainer)
        finally:
            trainer.close()
    return found


@pytest.mark.engine
@pytest.mark.parametrize("size", [1, 2], ids=["own sequences", "shared sequences"])
def test_two_ranks_learn_what_one_does(random_model, tmp_path, size):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        answers = [pool.submit(of_rank, rank, random_model, tmp_path, size) for rank in range(2)]
        found = answers[0].result(400)
        answers[1].result(400)
    for name, settings in TRAINED.items():
        assert alike(found[name], learned(one_rank.trainer(random_model, tokens_per_microbatch=64, **settings))), name


def test_a_penalty_in_the_reward_is_part_of_the_advantage(random_model):
    """As rewards from which it was subtracted beforehand; the reference is the first policy."""
    settings = {"minibatches": 1, "max_grad_norm": 1e9, "lr": 1e-3}
    inside = one_rank.trainer(random_model, kl_coef=0.1, kl_in="reward", kl_estimator="k1", **settings)
    before = one_rank.trainer(random_model, **settings)
    reference = one_rank.trainer(random_model)
    for rl_step in range(2):
        drawn = drawn_samples(inside)
        pairs = [(s.prompt_token_ids, s.token_ids) for s in drawn]
        sums = [
            float((new - ref)[sample.drawn().numpy()].sum())
            for sample, new, ref in zip(drawn, inside.score(pairs), reference.score(pairs), strict=True)
        ]
        assert any(sums) == bool(rl_step)
        less = [replace(s, reward=s.reward - 0.1 * kl) for s, kl in zip(drawn, sums, strict=True)]
        one_rank.updated(inside, drawn, rl_step)
        one_rank.updated(before, less, rl_step)
    assert one_rank.near(one_rank.flat(inside), one_rank.flat(before), 1e-5)


def test_the_entropy_is_that_of_whole_distributions(random_model):
    made = one_rank.trainer(random_model)
    drawn = drawn_samples(made)
    exact = loaded(random_model)
    logp = torch.cat([one_rank.exact_rows(exact, s)[s.drawn()] for s in drawn]).detach()
    assert one_rank.updated(made, drawn).entropy == pytest.approx(float(-(logp.exp() * logp).sum(1).mean()), rel=1e-5)
    bold = one_rank.trainer(random_model, entropy_coef=10.0, lr=1e-3)
    entropies = [one_rank.updated(bold, drawn, rl_step).entropy for rl_step in range(3)]
    assert entropies == sorted(entropies)


OWN = """
import torch
def plain(tokens, ratio, config):
    return -ratio * tokens.advantages
def scalar(tokens, ratio, config):
    return (ratio * tokens.advantages).sum()
def cut(tokens, ratio, config):
    return -ratio.detach() * tokens.advantages
def infinite(tokens, ratio, config):
    return tokens.logp / 0
def number(tokens, ratio, config):
    return 1.0
def wrong(tokens, ratio, config):
    return tokens.log
"""


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("own_losses:plain", None),
        ("own_losses:scalar", ("[5]",)),
        ("own_losses:cut", ("gradient",)),
        ("own_losses:infinite", ("finite",)),
        ("own_losses:number", ("float", "[5]")),
        ("own_losses:wrong", ("AttributeError", "own_losses.py, line 14")),
        ("own_losses:gone", ("own_losses.py", "gone")),
        ("nowhere:loss", ("nowhere",)),
    ],
)
def test_an_own_loss_is_called_before_anything_starts(random_model, tmp_path, name, facts):
    (tmp_path / "own_losses.py").write_text(OWN)
    recipe = small_recipe(train={"objective": name}, code=[str(tmp_path)])
    assert "own_losses" in code_of(recipe) or facts == ("nowhere",)
    if facts is not None:
        with refused(ConfigError, naming=("train.objective", *facts)):
            objective(recipe)
        return
    objective(recipe)
    # Far bounds are none.
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    with found_in(recipe.code):
        found = one_rank.trained(one_rank.trainer(random_model, objective=name))
    assert one_rank.near(found, one_rank.trained(one_rank.trainer(random_model, **wide)), 1e-6)


@pytest.mark.parametrize(
    ("train", "facts"),
    [
        ({"objective": "cipso"}, ("cispo", "module:function")),
        ({"dual_clip": 1.0}, ("dual_clip", "1")),
        ({"ratio": "sequence"}, ("train.ratio", "GSPO", "train.correction_level")),
        ({"algorithm": "gspo", "correction_level": "token"}, ("train.ratio", "train.correction_level")),
        ({"algorithm": "cispo", "dual_clip": 3.0}, ("train.dual_clip", "cispo")),
        ({"correction": "behaviour", "correction_cap": 3.0}, ("correction_cap", "3", "behaviour")),
        ({"correction": "behaviour", "correction_level": "sequence"}, ("correction_level", "behaviour")),
        ({"kl_in": "reward"}, ("train.kl_coef", "kl_estimator")),
        ({"kl_coef": 0.1, "kl_estimator": "k1", "correction": "none"}, ("k1", "none")),
    ],
)
def test_losses_that_contradict_themselves_are_refused(train, facts):
    with refused(ValueError, naming=facts):
        small_recipe(train=train)
