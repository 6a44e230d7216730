"""Seer's marginal-benefit-aware budget: how deep to draft for the requests that others wait for, and for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tltlab.errors import ConfigError
from tltlab.state import StepState
from tltlab.strategy import Strategy

from .budget import DraftBudget, refuse_trees


def best_depth(alpha: float, batch: int, *, base_s: float, token_s: float, draft_s: float, most: int) -> int:
    """gamma* = argmin T_SD(B, gamma), 0 where no depth beats plain decoding (arXiv 2511.14617, section on MBA).

        T_SD(B, gamma) = (1 - alpha) * (D + T(B, gamma)) / (1 - alpha^(gamma + 1)),

    with D = draft_s * gamma and T(B, gamma) = base_s + token_s * B * (gamma + 1): the seconds per token of a request.

    >>> [best_depth(0.6, b, base_s=0.01, token_s=1e-4, draft_s=0.0, most=8) for b in (1, 16, 256)]
    [7, 3, 0]
    """

    def seconds(depth: int) -> float:
        pass_s = draft_s * depth + base_s + token_s * batch * (depth + 1)
        return pass_s / sum(alpha**i for i in range(depth + 1))

    return min(range(most + 1), key=lambda depth: (seconds(depth), depth))


def marginal_depths(
    num_high: int, num_low: int, profile: Sequence[float], total: int, *, weight: float = 2.0, most: int = 8
) -> tuple[int, int]:
    """Depths of the high- and the low-priority requests: Algorithm 1 of arXiv 2511.14617, `total` tokens in all.

    If the total is less than one token per high-priority request, no request drafts. Then these get one each and the
    rest is handed out level by level: to the high ones if benefit_h > `weight` * benefit_l, the total covers them and
    they have fewer than `most`, else to the low ones if it covers them, else it stops.

    `profile[i]` is the chance that token i is kept, all before it too; profile[0] = 1. benefit_x is B_x * (profile[g] -
    profile[g + 1]) as printed, where the text has lost its subscripts.

    >>> profile = [1, 0.9, 0.8, 0.7, 0.3, 0.2, 0.1]
    >>> marginal_depths(12, 4, profile, 60), marginal_depths(5, 0, profile, 4)
    ((5, 0), (0, 0))
    """
    if num_high < 1 or total < num_high:
        return (0, min(most, total // num_low) if not num_high and num_low else 0)

    def benefit(count: int, depth: int) -> float:
        last = len(profile) - 1
        return count * (profile[min(depth, last)] - profile[min(depth + 1, last)])

    high, low, remaining = 1, 0, total - num_high
    while True:
        room_high, room_low = high < most and remaining >= num_high, low < most and 0 < num_low <= remaining
        if room_high and (not num_low or benefit(num_high, high) > weight * benefit(num_low, low)):
            high, remaining = high + 1, remaining - num_high
        elif room_low:
            low, remaining = low + 1, remaining - num_low
        elif room_high and low >= most:
            high, remaining = high + 1, remaining - num_high
        else:
            return high, low


class MbaBudget(DraftBudget):
    """Depths by `marginal_depths` for a total of gamma* per request (`best_depth`).

    Probes have high priority: sample 0 of each group, whose length predicts those of the other samples. alpha is a / (a
    + 1) of the mean recent acceptance a, and the profile alpha^i. A request without a draft so far counts as `prior`:
    else one early draft that is not kept ends all drafting, since nothing is measured any more.

    >>> from tltlab.state import RequestState
    >>> requests = [RequestState(key=(0, "p", i, 0), prompt_id="p", generated_tokens=9, max_response_tokens=99)
    ...             for i in range(3)]
    >>> budget = MbaBudget(base_s=0.01, token_s=1e-3)
    >>> budget.allot(StepState(rl_step=0, batch=3, requests=requests), Strategy.chain("suffix", 8))
    [1, 1, 1]
    """

    def __init__(
        self, base_s: float = 9.5e-3, token_s: float = 5e-5, draft_s: float = 0.0, weight: float = 2.0,
        prior: float = 1.0,
    ) -> None:  # fmt: skip
        if min(base_s, token_s) <= 0 or min(draft_s, weight, prior) < 0:
            raise ConfigError(
                "MBA: base_s and token_s must be above 0, draft_s, weight and prior at least 0, got "
                f"{base_s}, {token_s}, {draft_s}, {weight} and {prior}"
            )
        self.base_s, self.token_s, self.draft_s = base_s, token_s, draft_s
        self.weight = weight
        self.prior = prior

    def allot(self, state: StepState, strategy: Strategy) -> list[int]:
        if not strategy.speculates:
            return [0] * state.batch
        refuse_trees(strategy)
        requests = list(state.requests)
        recent = [self.prior if r.recent_acceptance is None else r.recent_acceptance for r in requests]
        accepted = float(np.mean(recent)) if recent else self.prior
        alpha = accepted / (accepted + 1.0)
        most = strategy.reach
        depth = best_depth(
            alpha, state.batch, base_s=self.base_s, token_s=self.token_s, draft_s=self.draft_s, most=most
        )
        probes = [request.key[2] == 0 for request in requests] or [False] * state.batch
        high, low = marginal_depths(
            sum(probes), state.batch - sum(probes), [alpha**i for i in range(most + 2)], depth * state.batch,
            weight=self.weight, most=most,
        )  # fmt: skip
        return [high if probe else low for probe in probes]
