"""One policy loss whose parts are chosen by name (`RULES`); published algorithms are `recipe.sections.ALGORITHMS`.

N responses of T tokens in all, packed one after another; log-probs are natural logarithms at the sampling temperature.
Advantages and weights of tokens (`advantages`) are computed before the work is split; `policy_loss` is a sum over
tokens of whole responses, so the parts of a mini-batch add up to it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tltlab.errors import ConfigError
from tltlab.own import load_name, raised
from tltlab.records import frozen
from tltlab.runtime.recipe.sections import TrainConfig

_MOST = 20.0
"""Log-ratios are clamped to +-20: exp overflows in float32 at 88, and infinity times 0 is not a gradient."""


@frozen
class LossTokens:
    """T tokens of whole responses to learn from, tensors [T].

    `logp` and `entropy` of the policy being trained have gradients; `entropy` is that of its whole distribution.
    `old_logp` are the denominators of ratios: of the policy before the update, or with correction "behaviour" of the
    engine. `behaviour_logp` are the engine's, `ref_logp` the reference model's. `weights` in the sum are 0 for tokens
    that no policy drew. `responses` numbers each token's response, from 0. `correction` are importance weights.
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    weights: Tensor
    responses: Tensor
    correction: Tensor | None = None
    behaviour_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    entropy: Tensor | None = None


Objective = Callable[[LossTokens, Tensor, TrainConfig], Tensor]
"""Loss [T] to minimise, of each token, from the tokens, their ratios [T] with gradient (`train.ratio`) and settings."""


def _clip(tokens: LossTokens, ratio: Tensor, config: TrainConfig) -> Tensor:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if config.dual_clip is None:
        return loss
    return torch.where(tokens.advantages < 0, torch.minimum(loss, -config.dual_clip * tokens.advantages), loss)


def _cispo(tokens: LossTokens, ratio: Tensor, config: TrainConfig) -> Tensor:
    return -ratio.detach().clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantages * tokens.logp


def _of_sequence(log_ratio: Tensor, tokens: LossTokens) -> Tensor:
    """Return for each token the mean over the tokens that a policy drew of its response."""
    drawn = tokens.weights.ne(0).double()
    zeros = torch.zeros_like(drawn)  # responses are at most as many as tokens
    sums = zeros.index_add(0, tokens.responses, log_ratio * drawn)
    return (sums / zeros.index_add(0, tokens.responses, drawn).clamp(min=1))[tokens.responses].to(log_ratio.dtype)


RULES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "objective": {
        # PPO, arXiv 1707.06347, Eq. 7; two bounds: arXiv 2503.14476, Eq. 8. A bound on the loss of tokens with a
        # negative advantage: `dual_clip`, Ye et al. 2019, arXiv 1912.09729, Eq. 5.
        "clip": _clip,
        # MiniMax-M1, arXiv 2506.13585, Eqs. 4 and 5: the clipped ratio weighs log pi and has no gradient.
        "cispo": _cispo,
    },
    "ratio": {
        "token": lambda log_ratio, tokens: log_ratio,
        # GSPO, arXiv 2507.18071, Eqs. 5 to 7: the geometric mean over the response, with gradient.
        "sequence": _of_sequence,
    },
    "kl_estimator": {
        # Schulman 2020, "Approximating KL divergence", of log(policy / reference); tokens are the policy's.
        "k1": lambda log_ratio: log_ratio,
        "k2": lambda log_ratio: log_ratio**2 / 2,
        "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
    },
    "correction": {
        # Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
        "truncated": lambda ratio, cap: ratio.clamp(max=cap),
        # IcePop, arXiv 2510.18855, section 3.1: what is outside of [1 / cap, cap] is left out.
        "masked": lambda ratio, cap: ratio * ((ratio >= 1 / cap) & (ratio <= cap)),
        "behaviour": lambda ratio, cap: torch.ones_like(ratio),
        "none": lambda ratio, cap: torch.ones_like(ratio),
    },
}
"""Formulas by the setting of `train` and its value."""


def load_objective(name: str, config: TrainConfig) -> Objective:
    """Return an objective by its name in `RULES`, or the user's own, `module:function`, after a call on made-up tokens.

    ConfigError for one that cannot be imported, or returns no tensor [T] of finite numbers with a finite gradient.
    """
    if ":" not in name:
        return RULES["objective"][name]
    subject = f"train.objective {name}"
    own: Objective = load_name(name, subject)
    logp = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0], requires_grad=True)
    others = logp.detach()[[1, 0, 3, 2, 4]]
    tokens = LossTokens(
        logp=logp,
        old_logp=others,
        advantages=torch.tensor([0.5, 0.5, -1.0, -1.0, -1.0]),
        weights=torch.full((5,), 0.2),
        responses=torch.tensor([0, 0, 1, 1, 1]),
        behaviour_logp=others,
    )
    try:
        loss = own(tokens, torch.exp(logp - others), config)
    except Exception as error:  # whatever a user's function raises
        raise raised(error, subject) from error
    if not isinstance(loss, Tensor) or loss.shape != logp.shape or not loss.isfinite().all():
        found = f"a tensor {list(loss.shape)}: {loss.tolist()}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{subject} returned {found} for 5 tokens; a loss is a tensor [5] of finite numbers")
    gradient = torch.autograd.grad(loss.sum(), logp, allow_unused=True)[0] if loss.requires_grad else None
    if gradient is None or not gradient.isfinite().all() or not gradient.any():
        raise ConfigError(
            f"{subject}: its loss has no finite gradient in the policy's log-probs: use tokens.logp or ratio"
        )
    return own


def correction_weights(
    old_logp: Tensor, behaviour_logp: Tensor, cap: float, rule: str = "truncated", drawn: Tensor | None = None
) -> Tensor:
    """Importance weights of tokens [T] by `rule`, without gradient: of pi_old / pi_behaviour and a `cap`.

    They correct for tokens drawn from other probabilities than the trainer's: the engine's rounding or an older policy.
    With `drawn`, [T] bool, they are the tokens of one response, and the ratio is its product over those that are True
    (TRL's and ms-swift's "sequence" modes).

    log-probs -1.0 and -1.5 against behaviours of -1.0 and -3.0, cap 2: (1.0, 2.0), masked (1.0, 0.0).
    """
    log_ratio = old_logp - behaviour_logp
    if drawn is not None:
        log_ratio = log_ratio[drawn].sum().expand_as(log_ratio)
    return RULES["correction"][rule](torch.exp(log_ratio.clamp(-_MOST, _MOST)), cap).detach()


@frozen
class LossTerms:
    """The loss to minimise, and terms to log, summed over tokens by weight.

    The sums are shares and means where weights sum to 1 over the mini-batch. `clip_fraction` are tokens outside of the
    clip range where that changes their gradient, `kl` is KL(policy || reference).
    """

    loss: Tensor
    clip_fraction: float
    kl: float


def policy_loss(tokens: LossTokens, config: TrainConfig, objective: Objective) -> LossTerms:
    """Policy-gradient loss: sum of weight * (correction * objective + kl_coef * KL - entropy_coef * entropy).

    The sum is over tokens; gradients flow through `logp` and `entropy` alone. The penalty for KL(policy || reference)
    is that of `kl_penalty`; with `kl_in` "reward" it is only measured. It and the entropy are neither corrected nor
    clipped.

    Ratio 1.5, A = 2, weight 1, clip_high 0.28: loss -2.56, clip fraction 1.
    """
    log_ratio = RULES["ratio"][config.ratio](tokens.logp - tokens.old_logp, tokens)
    ratio = torch.exp(log_ratio.clamp(-_MOST, _MOST))
    loss = objective(tokens, ratio, config)
    if tokens.correction is not None:
        loss = loss * tokens.correction
    kl = torch.zeros_like(tokens.logp)
    if config.kl_coef:
        kl = kl_penalty(tokens, config)
        if config.kl_in == "loss":
            loss = loss + config.kl_coef * kl
    if tokens.entropy is not None:
        loss = loss - config.entropy_coef * tokens.entropy
    low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    outside = low | high
    if config.objective != "cispo":
        far = ratio > (config.dual_clip or math.inf)
        outside = ((low | far) & (tokens.advantages < 0)) | (high & (tokens.advantages > 0))
    return LossTerms(
        loss=(loss * tokens.weights).sum(),
        clip_fraction=float((outside * tokens.weights).sum()),
        kl=float((kl.detach() * tokens.weights).sum()),
    )


def kl_penalty(tokens: LossTokens, config: TrainConfig) -> Tensor:
    """KL(policy || reference) per token [T], estimated from the tokens that the engine drew.

    The estimate is weighted by min(pi / pi_behaviour, cap) of the token, by the rule of `correction`: its mean is over
    the policy's tokens, and these are the behaviour's. Its gradient is weight * log(pi / pi_ref) * d log pi, whose mean
    is the gradient of the divergence, with any estimator: the derivatives of k1 and k3 themselves have the means 0 and
    d KL(reference || policy) (Tang and Munos 2025, arXiv 2506.09477; verl's "k3+"). With correction "none" the estimate
    is neither weighted nor changed: GRPO's published penalty (arXiv 2402.03300, Eq. 4).
    """
    assert tokens.ref_logp is not None
    estimate = kl_estimate(tokens.logp, tokens.ref_logp, config.kl_estimator)
    if config.correction == "none":
        return estimate
    assert tokens.behaviour_logp is not None
    rule = "masked" if config.correction == "masked" else "truncated"
    weights = correction_weights(tokens.logp, tokens.behaviour_logp, config.correction_cap, rule)
    distance = _log_ratio(tokens.logp, tokens.ref_logp).detach()
    return weights * (estimate.detach() + distance * (tokens.logp - tokens.logp.detach()))


def kl_estimate(logp: Tensor, other_logp: Tensor, estimator: str = "k3") -> Tensor:
    """KL(policy || other) per token, estimated from tokens that the policy drew.

    With r = log(policy / other) k1 is r, k2 r^2 / 2 and k3 exp(-r) - 1 + r. k1 and k3 are unbiased, k2 and k3 are never
    negative. log-probs 0 and log 0.5, k3: 0.5 - 1 - log 0.5 = 0.193.
    """
    return RULES["kl_estimator"][estimator](_log_ratio(logp, other_logp))


@frozen
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
