"""The losses against their papers' formulas, written out as loops over responses and tokens."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer.advantages import EPSILON, advantages, shape_rewards, token_weights
from tltlab.runtime.trainer.losses import (
    LossTokens,
    Mismatch,
    correction_weights,
    load_objective,
    mismatch,
    mismatch_sums,
    policy_loss,
)

CAP = 10
LENGTHS = [3, 5, 10, 2, 4, 6]
GROUPS = [0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
TRUNCATED = [False, False, True, False, False, False]


def batch(seed=0):
    """Log-probs of six responses under the policy, the one before, the engine's and the reference: one array each."""
    rng = np.random.default_rng(seed)
    old = [rng.uniform(-3, -0.1, n) for n in LENGTHS]
    return {
        "new": [o + rng.normal(0, 0.4, len(o)) for o in old],
        "old": old,
        "engine": [o + rng.normal(0, 0.2, len(o)) for o in old],
        "ref": [o + rng.normal(0, 0.3, len(o)) for o in old],
        "entropy": [rng.uniform(0, 3, len(o)) for o in old],
    }


def packed(rows):
    return torch.tensor(np.concatenate(rows), dtype=torch.float64)


def terms_of(config, **tokens):
    """The loss of tokens, each by itself a response where they do not say."""
    tokens = {"responses": torch.arange(len(tokens["logp"]))} | tokens
    return policy_loss(LossTokens(**tokens), config, load_objective(config.objective, config))


def loss_of(config, data):
    """What this package makes of the batch by the settings, as the trainer puts it together."""
    lengths, truncated = torch.tensor(LENGTHS), torch.tensor(TRUNCATED)
    rewards = shape_rewards(
        torch.tensor(REWARDS), lengths, truncated,
        overlong=config.overlong, buffer=config.overlong_buffer, max_response_tokens=CAP,
    )  # fmt: skip
    each = advantages(rewards, torch.tensor(GROUPS), scale=config.advantage_scale, baseline=config.baseline)
    weights = token_weights(
        lengths, torch.ones(6, dtype=torch.bool), aggregation=config.aggregation, max_response_tokens=CAP
    )
    old, engine = packed(data["old"]), packed(data["engine"])
    level = torch.ones_like(old, dtype=torch.bool) if config.correction_level == "sequence" else None
    parts = zip(*(x.split(LENGTHS) for x in (old, engine)), LENGTHS, strict=True)
    corrections = [
        correction_weights(o, e, config.correction_cap, config.correction, level if level is None else level[:n])
        for o, e, n in parts
    ]
    terms = terms_of(
        config,
        logp=packed(data["new"]),
        old_logp=engine if config.correction == "behaviour" else old,
        behaviour_logp=engine,
        advantages=each.repeat_interleave(lengths),
        weights=weights.repeat_interleave(lengths),
        responses=torch.arange(6).repeat_interleave(lengths),
        correction=torch.cat(corrections),
        ref_logp=packed(data["ref"]),
        entropy=packed(data["entropy"]) if config.entropy_coef else None,
    )
    return float(terms.loss)


def surrogate(new, old, engine, advantage, low, high):
    """One token of the clipped objective, to be maximised, with its importance weight truncated at 2."""
    ratio = math.exp(new - old)
    kept = min(max(ratio, 1 - low), 1 + high)
    return min(math.exp(old - engine), 2.0) * min(ratio * advantage, kept * advantage)


def group_rewards(i, rewards):
    return [r for r, g in zip(rewards, GROUPS, strict=True) if g == GROUPS[i]]


def deviation(rewards):
    """The unbiased standard deviation, and what TRL adds to it."""
    return np.std(rewards, ddof=1) + EPSILON


def tokens_of(data, i):
    return list(zip(data["new"][i], data["old"][i], data["engine"][i], strict=True))


def grpo(data):
    """arXiv 2402.03300, Eqs. 3 and 4, mean over the two questions; the penalty is weighted, as the surrogate is."""
    total = 0.0
    for i in range(6):
        mine = group_rewards(i, REWARDS)
        advantage = (REWARDS[i] - np.mean(mine)) / deviation(mine)
        inner = 0.0
        for (new, old, engine), ref in zip(tokens_of(data, i), data["ref"][i], strict=True):
            k3 = math.exp(ref - new) - (ref - new) - 1
            inner += surrogate(new, old, engine, advantage, 0.2, 0.2) - 0.04 * min(math.exp(new - engine), 2.0) * k3
        total += inner / LENGTHS[i] / 3
    return -total / 2


def clipped(data, advantages, high=0.2):
    """The sum over the tokens of responses with these advantages."""
    return sum(surrogate(*token, a, 0.2, high) for i, a in enumerate(advantages) for token in tokens_of(data, i))


def centred(rewards):
    """Rewards less the mean of their prompt's."""
    return [reward - np.mean(group_rewards(i, rewards)) for i, reward in enumerate(rewards)]


def normalised(values):
    return [(value - np.mean(values)) / deviation(values) for value in values]


def dr_grpo(data):
    """arXiv 2503.20783: no division by the standard deviation nor by the length, but by the generation cap."""
    return -clipped(data, centred(REWARDS)) / (6 * CAP)


def dapo(data):
    """arXiv 2503.14476, Eqs. 8, 9 and 13 with a buffer of a fifth of the cap."""
    shaped = []
    for reward, length in zip(REWARDS, LENGTHS, strict=True):
        buffer = 0.2 * CAP
        penalty = 0.0 if length <= CAP - buffer else ((CAP - buffer) - length) / buffer
        shaped.append(reward + penalty)
    scaled = [each / deviation(group_rewards(i, shaped)) for i, each in enumerate(centred(shaped))]
    return -clipped(data, scaled, high=0.28) / sum(LENGTHS)


def dler(data):
    """arXiv 2510.15110: a truncated response gets 0; centred in the group, scaled over the batch."""
    shaped = [0.0 if cut else reward for reward, cut in zip(REWARDS, TRUNCATED, strict=True)]
    return -clipped(data, normalised(centred(shaped)), high=0.28) / sum(LENGTHS)


def rloo(data):
    """arXiv 2402.14740, section 2: whole responses, each against the mean of the others; over the cap, as dr_grpo."""
    each = []
    for i, reward in enumerate(REWARDS):
        mine = group_rewards(i, REWARDS)
        each.append(reward - (sum(mine) - reward) / (len(mine) - 1))
    return -clipped(data, each) / (6 * CAP)


def reinforce_pp(data):
    """arXiv 2501.03262: rewards normalised over the batch, here each once, whatever their prompt."""
    return -clipped(data, normalised(REWARDS)) / sum(LENGTHS)


def reinforce_pp_baseline(data):
    """The same less the mean of a prompt's responses, which is subtracted first."""
    return -clipped(data, normalised(centred(REWARDS))) / sum(LENGTHS)


FORMULAS = {
    "grpo": grpo, "dr-grpo": dr_grpo, "dapo": dapo, "dler": dler, "rloo": rloo, "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
}  # fmt: skip


@pytest.mark.parametrize(("name", "formula"), FORMULAS.items(), ids=FORMULAS)
def test_each_algorithm_is_its_papers_formula(name, formula):
    for seed in range(3):
        data = batch(seed)
        assert loss_of(TrainConfig(algorithm=name), data) == pytest.approx(formula(data), rel=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "kept", "each"),
    [
        ("token", [True, True, False], [0.25, 0.25, 0]),
        ("sequence", [True, True, False], [1 / 2, 1 / 6, 0]),
        ("constant", [True, True, False], [0.05, 0.05, 0]),
        ("token", [False] * 3, [0, 0, 0]),
    ],
)
def test_what_is_filtered_weighs_nothing(aggregation, kept, each):
    """The weights of all tokens sum to 1, except with constant aggregation."""
    weights = token_weights(
        torch.tensor([1, 3, 10]), torch.tensor(kept), aggregation=aggregation, max_response_tokens=CAP
    )
    assert weights.tolist() == pytest.approx(each)


def test_a_group_of_equal_rewards_has_no_advantage():
    """Though its mean is rounded; nor does it change the scale of a batch."""
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1])
    assert float(rewards[:3].sum() / 3) != 0.1
    for scale in ("group", "batch", "none"):
        assert advantages(rewards, groups, scale=scale).abs().max() == 0
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    mixed = advantages(rewards[:4], groups[:4], scale="batch").tolist()
    assert mixed == pytest.approx((np.array([0.5, -0.5, 1.5, -1.5]) / deviation([0.5, -0.5, 1.5, -1.5])).tolist())
    assert advantages(rewards, groups, scale="batch").tolist() == [*mixed, 0.0, 0.0]


def shaped(overlong, buffer=0):
    rewards, lengths = torch.tensor([1.0, 1.0, 1.0, -0.5, 1.0]), torch.tensor([80, 90, 100, 100, 60])
    truncated = torch.tensor([False, False, False, True, True])  # the last one by its own smaller cap
    settings = {"overlong": overlong, "buffer": buffer, "max_response_tokens": 100}
    return shape_rewards(rewards, lengths, truncated, **settings).tolist()


def test_responses_near_the_cap_are_punished_softly():
    assert shaped("keep") == shaped("filter") == [1.0, 1.0, 1.0, -0.5, 1.0]
    assert shaped("zero") == [1.0, 1.0, 1.0, -0.5, 0.0]
    assert shaped("penalty", 20) == [1.0, 0.5, 0.0, -1.5, 0.0]
    assert shaped("penalty", 40) == [0.5, 0.25, 0.0, -1.5, 0.0]
    assert shaped("penalty", 1) == [1.0, 1.0, 0.0, -1.5, 0.0]
    assert shaped("penalty") == shaped("penalty", 20)


def test_importance_weights_are_cut_above_alone():
    old = torch.tensor([-1.0, -1.0, -1.0, -500.0, 0.0], requires_grad=True)
    weights = correction_weights(old, torch.tensor([-1.0, -3.0, 0.0, 0.0, -500.0]), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 0.0, 2.0], abs=1e-6)
    assert not weights.requires_grad


def test_the_mismatch_is_that_of_its_formulas():
    old, engine = np.array([-1.0, -2.0, -0.5]), np.array([-1.2, -2.0, -2.5])
    found = mismatch(*mismatch_sums(torch.tensor(old), torch.tensor(engine), cap=2.0))
    weights = np.minimum(np.exp(old - engine), 2.0)
    assert asdict(Mismatch()) == {"mismatch_abs": 0, "mismatch_max": 0, "mismatch_kl": 0, "mismatch_ess": 1}
    assert mismatch(*mismatch_sums(torch.tensor(old), torch.tensor(old))) == Mismatch()
    assert mismatch(*mismatch_sums(torch.empty(0), torch.empty(0))) == Mismatch()
    assert found.mismatch_abs == pytest.approx(2.2 / 3)
    assert found.mismatch_max == pytest.approx(2.0)
    assert found.mismatch_kl == pytest.approx(np.mean(np.exp(old - engine) - (old - engine) - 1))
    assert found.mismatch_ess == pytest.approx(weights.sum() ** 2 / (3 * (weights**2).sum()))
