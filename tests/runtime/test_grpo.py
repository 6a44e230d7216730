"""GRPO's advantage and loss against values worked out by hand."""

import math

import pytest
import torch

from tltlab.runtime.grpo import group_advantages, grpo_loss


def test_an_advantage_is_the_distance_to_the_groups_mean_in_standard_deviations():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 5.0, 5.0]), torch.tensor([7, 7, 7, 9, 9])
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    expected = [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0.0, 0.0]
    assert group_advantages(rewards, groups).tolist() == pytest.approx(expected)


def test_without_scaling_the_advantage_keeps_the_rewards_unit():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]), scale_by_std=False)
    assert advantages.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def loss_of(ratio: float, advantage: float, **settings: float) -> float:
    old = torch.zeros(1, 1)
    terms = grpo_loss(
        torch.full((1, 1), math.log(ratio)), old, torch.tensor([advantage]), torch.ones(1, 1), num_tokens=1, **settings
    )
    return float(terms.loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.1, 2.0, -2.2),  # inside the range: -ratio * advantage
        (1.5, 2.0, -2.56),  # above 1 + 0.28 with a good response: clipped
        (0.5, 2.0, -1.0),  # below the range with a good response: not clipped, it may come back
        (0.5, -2.0, 1.6),  # below 1 - 0.2 with a bad response: clipped
        (1.5, -2.0, 3.0),  # above with a bad response: not clipped
    ],
)
def test_the_ratio_is_clipped_only_where_it_would_run_away(ratio: float, advantage: float, loss: float):
    assert loss_of(ratio, advantage) == pytest.approx(loss, rel=1e-6)


def test_a_clipped_token_has_no_gradient_and_is_counted():
    logp = torch.tensor([[math.log(1.5), 0.0]], requires_grad=True)
    terms = grpo_loss(logp, torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2), num_tokens=2)
    terms.loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, -0.5]]
    assert terms.clip_fraction == 0.5


def test_padding_counts_for_nothing_and_every_token_for_the_same():
    logp = torch.tensor([[0.0, 0.0, 9.0], [0.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    terms = grpo_loss(logp, torch.zeros(2, 3), torch.tensor([1.0, -2.0]), mask, num_tokens=3)
    assert float(terms.loss) == pytest.approx((-1 - 1 + 2) / 3)


def test_micro_batches_add_up_to_their_mini_batch():
    torch.manual_seed(0)
    logp, old, advantages, mask = torch.randn(4, 5), torch.randn(4, 5), torch.randn(4), torch.ones(4, 5)
    whole = grpo_loss(logp, old, advantages, mask, num_tokens=20).loss
    halves = [grpo_loss(logp[i], old[i], advantages[i], mask[i], num_tokens=20).loss for i in (slice(2), slice(2, 4))]
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-5)


def test_the_penalty_is_the_low_variance_estimator():
    settings = {"kl_coef": 0.5, "ref_logp": torch.full((1, 1), math.log(0.5))}
    terms = grpo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1), num_tokens=1, **settings)
    k3 = 0.5 - math.log(0.5) - 1
    assert terms.kl == pytest.approx(k3)
    assert float(terms.loss) == pytest.approx(0.5 * k3)
