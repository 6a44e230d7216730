"""Advantages of responses and the weights of their tokens: what an update needs to know before work is split.

N responses; their order is any.
"""

import math
from typing import Literal

import torch
from torch import Tensor

DAPO_BUFFER_SHARE = 1 / 5
"""Share of the cap over which DAPO's length penalty grows: 4,096 of 20,480 tokens (arXiv 2503.14476, section 4.1)."""
EPSILON = 1e-4
"""Added to standard deviations, as in TRL (verl: 1e-6): rewards that differ by rounding make no step."""


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


def advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    scale: Literal["group", "batch", "none"],
    baseline: Literal["group", "leave_one_out", "none"] = "group",
) -> Tensor:
    """Return A [N]: each reward less its baseline, over a standard deviation. `groups` [N]: integer labels.

    Baseline "group" is the group's mean, "leave_one_out" the mean of the group's other responses (RLOO, arXiv
    2402.14740), "none" is 0. Scale "group" divides by the standard deviation of the group's rewards (GRPO, arXiv
    2402.03300, section 4.1.2), "none" by 1 (Dr. GRPO, arXiv 2503.20783), "batch" by that of all rewards less their
    baselines (REINFORCE++ with a baseline, arXiv 2501.03262; DLER). Without a baseline "batch" subtracts the mean of
    all rewards before it divides (REINFORCE++). Standard deviations are the unbiased ones (n - 1) plus `EPSILON`.

    "batch" is over the responses of an RL step, each once. REINFORCE++ averages over their tokens, and DLER and
    REINFORCE++ count groups whose rewards are all equal. Here those groups do not count: their number must not change
    the step of the others, as it would not with dynamic sampling. They have advantage 0 exactly; without a baseline
    only a batch whose rewards are all equal has.

    >>> advantages(torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]), scale="group")
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    """
    if baseline == "none":
        if scale == "none":
            return rewards
        groups = torch.zeros_like(groups)
    _, label = torch.unique(groups, return_inverse=True)
    exact = rewards.double()
    count = torch.bincount(label)
    zeros = torch.zeros(len(count), dtype=exact.dtype, device=exact.device)
    mean = zeros.index_add(0, label, exact) / count
    lowest = zeros.scatter_reduce(0, label, exact, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, label, exact, "amax", include_self=False)
    # Not by a standard deviation of 0: the mean of equal numbers may be rounded.
    mixed = (highest > lowest)[label]
    centred = torch.where(mixed, exact - mean[label], 0.0)
    if baseline == "leave_one_out":
        centred = centred * (count / (count - 1).clamp(min=1))[label]
    if scale == "group":
        std = (zeros.index_add(0, label, centred**2) / (count - 1).clamp(min=1)).sqrt()[label]
    elif scale == "batch":
        std = ((centred**2).sum() / (mixed.sum() - 1).clamp(min=1)).sqrt()
    else:
        return centred.to(rewards.dtype)
    return (centred / (std + EPSILON)).to(rewards.dtype)


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
