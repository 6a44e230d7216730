"""GRPO's advantage and loss (Shao et al. 2024, arXiv 2402.03300, Eqs. 3-4), token-level as in DAPO (arXiv 2503.14476).

N responses of T padded token positions; log-probs are natural logarithms at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, *, scale_by_std: bool = True) -> torch.Tensor:
    """Return A [N]: each reward less its group's mean, over the group's standard deviation.

    `rewards` [N] float, `groups` [N] integer labels. A group whose rewards are all equal has advantage 0: it says
    nothing about which response to prefer. `scale_by_std=False` is Dr. GRPO (arXiv 2503.20783).

    >>> group_advantages(torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    _, label = torch.unique(groups, return_inverse=True)
    count = torch.bincount(label).to(rewards.dtype)
    mean = torch.zeros_like(count).index_add_(0, label, rewards) / count
    centred = rewards - mean[label]
    if not scale_by_std:
        return centred
    variance = torch.zeros_like(count).index_add_(0, label, centred**2) / (count - 1).clamp(min=1)
    std = variance.sqrt()[label]
    return torch.where(std > 0, centred / std.clamp(min=1e-12), torch.zeros_like(centred))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The loss to minimise and what to log, each a mean over response tokens."""

    loss: torch.Tensor
    clip_fraction: float
    kl: float


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    num_tokens: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    ref_logp: torch.Tensor | None = None,
) -> LossTerms:
    """Clipped policy-gradient loss summed over tokens and divided by `num_tokens`, the tokens of the whole mini-batch.

    `logp`, `old_logp`, `mask` [N, T]; `advantages` [N]; gradients flow through `logp` alone. `clip_low` and
    `clip_high` bound the ratio to [1 - clip_low, 1 + clip_high]. With `kl_coef` the low-variance estimator
    exp(r) - r - 1, r = ref_logp - logp (Schulman's k3), is added. Micro-batches of one mini-batch sum to its loss.
    """
    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantage = advantages[:, None]
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    kl = torch.zeros_like(logp)
    if kl_coef:
        if ref_logp is None:
            raise ValueError("kl_coef > 0 needs ref_logp")
        difference = ref_logp - logp
        kl = torch.exp(difference) - difference - 1
        loss = loss + kl_coef * kl
    outside = ((ratio < 1 - clip_low) & (advantage < 0)) | ((ratio > 1 + clip_high) & (advantage > 0))
    return LossTerms(
        loss=(loss * mask).sum() / num_tokens,
        clip_fraction=float((outside * mask).sum() / num_tokens),
        kl=float((kl.detach() * mask).sum() / num_tokens),
    )
