"""One policy loss with GRPO, Dr. GRPO, DAPO and DLER as settings (`recipe.sections.ALGORITHMS`).

N responses of T tokens in all, packed one after another; log-probs are natural logarithms at the sampling temperature.
Advantages and weights of tokens (`advantages`) are computed before the work is split; `policy_loss` is a sum over
tokens, so the parts of a mini-batch add up to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 20.0
"""Log-ratios are clamped to +-20: exp overflows in float32 at 88, and infinity times 0 is not a gradient."""


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
