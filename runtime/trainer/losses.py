"""One policy loss with GRPO, Dr. GRPO, DAPO and DLER as settings (`recipe.sections.ALGORITHMS`).

N responses of T tokens in all, packed one after another; log-probs are natural logarithms at the sampling temperature.
Rewards and advantages of responses (`shape_rewards`, `advantages`) and weights of their tokens (`token_weights`) are
computed before the work is split; `policy_loss` is a sum over tokens, so the parts of a mini-batch add up to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DAPO_BUFFER_SHARE = 1 / 5
"""Share of the cap over which DAPO's length penalty grows: 4,096 of 20,480 tokens (arXiv 2503.14476, section 4.1)."""

_MOST = 20.0
"""Log-ratios are clamped to +-20: exp overflows in float32 at 88, and infinity times 0 is not a gradient."""


def shape_rewards(
    rewards: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    *,
    overlong: Literal["keep", "filter", "penalty", "zero"],
    buffer: int,
    max_response_tokens: int,
) -> Tensor:
    """Return the training rewards [N]. `truncated` [N] is True for responses that ended at a cap, not by themselves.

    "keep" and "filter" change nothing here: a filtered response is still part of its group's mean, and `token_weights`
    leaves it out of the loss. "zero": a truncated response gets no positive reward, and keeps a negative one (DLER,
    arXiv 2510.15110). "penalty": DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13) is added, 0 up to `buffer`
    tokens before the cap and from there linearly to -1 at it; a truncated response gets all of it at any length. With
    `buffer` 0 it is DAPO's own share of the cap (`DAPO_BUFFER_SHARE`); 1 punishes at the cap alone.

    Lengths 80, 90, 100 under a cap of 100 with a buffer of 20: penalties 0.0, -0.5, -1.0.
    """
    if overlong == "zero":
        return torch.where(truncated, rewards.clamp(max=0.0), rewards)
    if overlong == "penalty":
        width = buffer or math.ceil(max_response_tokens * DAPO_BUFFER_SHARE)
        over = ((lengths - (max_response_tokens - width)) / width).clamp(0.0, 1.0)
        return rewards - torch.where(truncated, torch.ones_like(over), over).to(rewards.dtype)
    return rewards


def advantages(rewards: Tensor, groups: Tensor, *, scale: Literal["group", "batch", "none"]) -> Tensor:
    """Return A [N]: each reward less the mean of its group, over a standard deviation. `groups` [N]: integer labels.

    "group" divides by that of the group (GRPO, arXiv 2402.03300, section 4.1.2), "none" by 1 (Dr. GRPO, arXiv
    2503.20783), "batch" by that of all centred rewards (REINFORCE++ with a baseline, arXiv 2501.03262; DLER). Groups
    whose rewards are all equal have advantage 0 exactly, and do not count in the batch: their number must not change
    the step of the others, as it would not with dynamic sampling. Standard deviations are the unbiased ones (n - 1).

    >>> advantages(torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]), scale="group")
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    _, label = torch.unique(groups, return_inverse=True)
    exact = rewards.double()
    count = torch.bincount(label)
    zeros = torch.zeros(len(count), dtype=exact.dtype, device=exact.device)
    mean = zeros.index_add(0, label, exact) / count
    lowest = zeros.scatter_reduce(0, label, exact, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, label, exact, "amax", include_self=False)
    # Not by a standard deviation of 0: the mean of equal numbers may be rounded, and 1e-17 / 1e-17 is 1.
    mixed = (highest > lowest)[label]
    centred = torch.where(mixed, exact - mean[label], 0.0)
    if scale == "group":
        std = (zeros.index_add(0, label, centred**2) / (count - 1).clamp(min=1)).sqrt()[label]
    elif scale == "batch":
        std = ((centred**2).sum() / (mixed.sum() - 1).clamp(min=1)).sqrt().expand_as(centred)
    else:
        std = torch.ones_like(centred)
    return torch.where(mixed, centred / torch.where(mixed, std, 1.0), 0.0).to(rewards.dtype)


def token_weights(
    lengths: Tensor,
    kept: Tensor,
    *,
    aggregation: Literal["token", "sequence", "constant"],
    max_response_tokens: int,
) -> Tensor:
    """Return w [N]: the weight of each token of a response in the loss of its mini-batch, whose responses these are.

    "token": every token the same, 1 / all tokens (DAPO, Eq. 8). "sequence": the mean over responses of their tokens'
    mean (GRPO, Eq. 3). "constant": 1 / (N * max_response_tokens), independent of a response's length (Dr. GRPO). Those
    not `kept` [N] weigh 0 and count in no mean; with none kept all weigh 0. The weights of all tokens sum to 1, those
    of "constant" to the mean length over the cap.

    Lengths 1 and 3, cap 10: (0.25, 0.25), (0.5, 0.1667) and (0.05, 0.05).
    """
    tokens = lengths.double()
    num = kept.sum().clamp(min=1)
    if aggregation == "token":
        weights = torch.ones_like(tokens) / tokens[kept].sum().clamp(min=1)
    elif aggregation == "sequence":
        weights = 1.0 / (num * tokens.clamp(min=1))
    else:
        weights = torch.ones_like(tokens) / (num * max_response_tokens)
    return torch.where(kept, weights, 0.0).float()


def correction_weights(old_logp: Tensor, behaviour_logp: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(pi_old / pi_behaviour, cap) [T], without gradient.

    They correct for tokens drawn from other probabilities than the trainer's: the engine's rounding or an older policy
    (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").

    log-probs -1.0 and -1.5 against behaviours of -1.0 and -3.0, cap 2: (1.0, 2.0).
    """
    return torch.exp(_log_ratio(old_logp, behaviour_logp)).clamp(max=cap).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The loss to minimise, and terms to log, summed over tokens by weight.

    The sums are shares and means where weights sum to 1 over the mini-batch. `clip_fraction` are tokens without
    gradient because of the clip, `kl` is KL(policy || reference).
    """

    loss: Tensor
    clip_fraction: float
    kl: float


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction: Tensor | None,
    kl_coef: float,
    ref_logp: Tensor | None,
) -> LossTerms:
    """Clipped policy-gradient loss (arXiv 2402.03300, Eq. 3; with two bounds arXiv 2503.14476, Eq. 8), all tensors [T].

    Sum over tokens of w * (-c * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3), r = exp(logp -
    old_logp). Gradients flow through `logp` alone. `correction` c is 1 if None. It does not weigh the penalty, which
    depends on the policy, not on the token's source. k3 is `kl_estimate(logp, ref_logp)`; without `ref_logp` there is
    none, so `kl_coef` above 0 needs it. With the behaviour's `old_logp` the ratio itself corrects for it.

    Ratio 1.5, A = 2, w = 1, clip_high 0.28: loss -2.56, clip fraction 1.
    """
    if kl_coef and ref_logp is None:
        raise ValueError("kl_coef > 0 needs ref_logp")
    ratio = torch.exp(_log_ratio(logp, old_logp))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if correction is not None:
        loss = loss * correction
    kl = torch.zeros_like(logp) if ref_logp is None else kl_estimate(logp, ref_logp)
    if kl_coef:
        loss = loss + kl_coef * kl
    outside = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    return LossTerms(
        loss=(loss * weights).sum(),
        clip_fraction=float((outside * weights).sum()),
        kl=float((kl.detach() * weights).sum()),
    )


def kl_estimate(logp: Tensor, other_logp: Tensor) -> Tensor:
    """KL(policy || other) per token, estimated from tokens that the policy drew: exp(r) - r - 1, r = other - policy.

    Schulman's k3, unbiased and never negative. log-probs 0 and log 0.5: 0.5 - log 0.5 - 1 = 0.193.
    """
    difference = _log_ratio(other_logp, logp)
    return torch.expm1(difference) - difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Difference between the trainer's log-probs and those of the engine that drew the tokens.

    `mismatch_abs` and `mismatch_max`: mean and largest absolute difference. `mismatch_kl`: the k3 estimate of
    KL(behaviour || trainer) per token. `mismatch_ess`: effective share of the tokens under truncated importance
    weights, (sum w)^2 / (T sum w^2); 1 where engine and trainer agree.
    """

    mismatch_abs: float = 0.0
    mismatch_max: float = 0.0
    mismatch_kl: float = 0.0
    mismatch_ess: float = 1.0


def mismatch_sums(old_logp: Tensor, behaviour_logp: Tensor, *, cap: float = math.inf) -> tuple[Tensor, float]:
    """Return sums of differences between the trainer's log-probs [T] and the engine's [T], weights capped at `cap`.

    Sums [5], float64, of 1, the absolute difference, its k3 estimate, the weights and their squares; and the largest
    difference. Sums of several parts add up.
    """
    old, behaviour = old_logp.double(), behaviour_logp.double()
    difference = (old - behaviour).abs()
    weights = correction_weights(old, behaviour, cap)
    kl = kl_estimate(behaviour, old)
    sums = [torch.tensor(float(len(old))), difference.sum(), kl.sum(), weights.sum(), (weights**2).sum()]
    return torch.stack([part.double() for part in sums]), float(difference.max()) if len(old) else 0.0


def mismatch(sums: Tensor, largest: float) -> Mismatch:
    """Return the means of `mismatch_sums`."""
    num, difference, kl, weight, weight_2 = sums.tolist()
    if not num:
        return Mismatch()
    return Mismatch(
        mismatch_abs=difference / num,
        mismatch_max=largest,
        mismatch_kl=kl / num,
        mismatch_ess=weight**2 / (num * weight_2),
    )


def _log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    return (logp - other_logp).clamp(-_MOST, _MOST)
